"""What a rank has done and heard, written so that it outlives the rank: a line an entry, with the time on the clock that all share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """`what` happened at this time, in seconds, in call number `call` (or as call, when that began or ended), and what there is to say."""

    time: float
    what: str
    call: int
    said: Any


class Diary:
    """The diary of one rank, which alone writes it; the judge reads it."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.call = -1

    def write(self, what: str, said: Any = None) -> None:
        """Add an entry; it is there for all when this returns."""
        os.write(self._file, (json.dumps([time.monotonic(), what, self.call, said]) + "\n").encode())


def read(file: Path) -> list[Entry]:
    """The entries so far."""
    if not file.exists():
        return []
    whole = file.read_text().rpartition("\n")[0]
    return [Entry(*json.loads(line)) for line in whole.splitlines()]
