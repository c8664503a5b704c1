"""Writes the error file of a rank, which torchrun prints in its last lines.

torchrun passes the path in an environment variable; without it, nothing is written. The format is that of
torch.distributed.elastic's `ErrorHandler`.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

from zerobubble.error_reports.text import shortened

MOST_CHARACTERS = 50_000
"""The longest report that is written."""
_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_written: set[str] = set()


def write_error_file(message: str, report: str, *, is_cause: bool = True, replace: bool = False) -> None:
    """Writes `message`, and the `report` that torchrun prints. Keeps a file that exists, unless `replace` and another process wrote it.

    torchrun prints the report with the earliest timestamp last, and that of the lowest rank among several of one second. So the rank that
    failed, the cause, dates its report a second earlier than ranks that stop because of it.
    """
    path = os.environ.get(_VARIABLE)
    if not path or path in _written:
        return
    details = {"py_callstack": shortened(report, MOST_CHARACTERS), "timestamp": str(int(time.time()) - is_cause)}
    with suppress(OSError), open(path, "w" if replace else "x") as file:
        json.dump({"message": {"message": message, "extraInfo": details}}, file)
        _written.add(path)


def forget_error_file() -> None:
    """Removes the file that this process has written: the process outlived that failure and makes a new pipeline."""
    while _written:
        with suppress(OSError):
            os.remove(_written.pop())
