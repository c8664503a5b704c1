"""Writes the file that says why a rank ended, so that torchrun's summary names the rank that is to blame.

torchrun passes the path in an environment variable; without it, nothing is written. The format is that of torch.distributed.elastic's
`ErrorHandler`.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress

from zerobubble.runtime.failure.error_text import shortened

MOST_CHARACTERS = 50_000
"""The longest trace that is written."""
_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_written: set[str] = set()


def write_error_file(message: str, error: BaseException | None = None) -> None:
    """Reports to torchrun that this rank is to blame, with the `message` that all ranks raise. Keeps a file that exists already."""
    path = os.environ.get(_VARIABLE)
    if not path:
        return
    trace = "" if error is None else _trace_of(error)
    # torchrun blames the earliest timestamp, in whole seconds, and the lowest rank of several within one second. Ranks that raise this
    # rank's error may write a file in the same second, so this one is dated a second earlier.
    details = {"py_callstack": f"{trace}{message}", "timestamp": str(int(time.time()) - 1)}
    with suppress(OSError), open(path, "x") as file:
        json.dump({"message": {"message": message, "extraInfo": details}}, file)
        _written.add(path)


def _trace_of(error: BaseException) -> str:
    try:
        return shortened("".join(traceback.format_exception(error)), MOST_CHARACTERS)
    except Exception:  # noqa: BLE001 - its text, notes and class are the user's
        return ""


def forget_error_file() -> None:
    """Removes the file that this process has written: the process outlived that failure and makes a new pipeline."""
    while _written:
        with suppress(OSError):
            os.remove(_written.pop())
