"""Writes the error file of a rank, which torchrun prints in its last lines.

torchrun passes the path in an environment variable; without it, nothing is written. The format is that of
torch.distributed.elastic's `ErrorHandler`. A rank that is killed or frozen cannot write its file, so another rank of its machine does.

torchrun prints the report with the earliest time last, as the root cause, and a rank without a file has the time when torchrun notices its
end. So the time of a cause is earlier than that of its consequences.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from zerobubble.error_reports.text import shortened

MOST_CHARACTERS = 50_000
"""The longest report that is written."""
BEFORE_S, AFTER_S = 1, 10
"""A cause is dated this long before it is written, and a consequence this long after: its process may take seconds to end."""
_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_written: set[str] = set()


def error_file() -> str:
    """Returns the path of this process's error file; empty without torchrun."""
    return os.environ.get(_VARIABLE, "")


def write_error_file(message: str, report: str, *, is_cause: bool = True, replace: bool = False) -> None:
    """Writes `message`, and the `report` that torchrun prints. Keeps a file that exists, unless `replace` and another process wrote it.

    `is_cause` says whether this rank failed, rather than stopped because another rank has failed.
    """
    path = error_file()
    if path and path not in _written and _write(path, message, report, -BEFORE_S if is_cause else AFTER_S, replace):
        _written.add(path)


def write_error_file_of_other(path: str, message: str) -> None:
    """Writes `message` to the error file at `path` of a rank that no longer runs, unless it exists; does nothing if `path` is empty."""
    if path:
        _write(path, message, message, -BEFORE_S, replace=False)


def _write(path: str, message: str, report: str, delay_s: int, replace: bool) -> bool:
    """Returns whether the file at `path` was written. It appears complete, because torchrun may read it at any time."""
    details = {"py_callstack": shortened(report, MOST_CHARACTERS), "timestamp": str(int(time.time()) + delay_s)}
    if not replace and os.path.exists(path):
        return False
    complete = Path(f"{path}.{threading.get_native_id()}")
    with suppress(OSError):
        complete.write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
        complete.replace(path)
        return True
    return False


def forget_error_file() -> None:
    """Removes the file that this process has written: the process outlived that failure and makes a new pipeline."""
    while _written:
        with suppress(OSError):
            os.remove(_written.pop())
