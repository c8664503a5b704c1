"""One rank's failure is every rank's clear error: the first to fail writes down why, closes its connections, and so wakes the rest.

A rank blocked on a message is woken when the other end closes; it reads the note, closes in turn, and the wave passes through the
group. A rank that was killed leaves no note: then the first to miss it writes one.
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

from zerobubble.errors import PipelineError

GRACE_S = 2.0
"""How long a rank that lost contact waits for the note of the one that failed."""
FAREWELL_S = 3.0
"""How long a rank stays after a failure, so that the others can read the note before its process may end."""


class Note(NamedTuple):
    """Who failed, at which pass or action, and why; `rank` is -1 where only a lost connection is known."""

    rank: int
    op: str
    message: str


class NoticeBoard:
    """The place where a failed pipeline's note hangs, in the store of torch.distributed."""

    def __init__(self, store: Any, size: int) -> None:
        self._store = store
        self._size = size

    def publish(self, note: Note) -> Note:
        """Hang `note` up unless one hangs already; gives the one that hangs. With the store gone, `note` itself."""
        try:
            won = self._store.compare_set("note", "", json.dumps(note))
            return Note(*json.loads(won))
        except (RuntimeError, ValueError):
            return note

    def look(self, seconds: float) -> Note | None:
        """The note, waiting up to `seconds` for one to appear."""
        end = time.monotonic() + seconds
        try:
            while not self._store.check(["note"]):
                if time.monotonic() > end:
                    return None
                time.sleep(0.02)
            return Note(*json.loads(self._store.get("note")))
        except RuntimeError:
            return None

    def farewell(self) -> None:
        """Wait until every rank has read the note, at most `FAREWELL_S` seconds."""
        end = time.monotonic() + FAREWELL_S
        try:
            seen = self._store.add("seen", 1)
            while seen < self._size and time.monotonic() < end:
                time.sleep(0.02)
                seen = self._store.add("seen", 0)
        except RuntimeError:
            return


def error_of(note: Note) -> PipelineError:
    """The exception that tells of `note`."""
    return PipelineError(note.message, rank=note.rank if note.rank >= 0 else None, op=note.op or None)
