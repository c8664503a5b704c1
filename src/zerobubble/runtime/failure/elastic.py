"""The file by which torchrun learns why a rank ended: the rank that is to blame writes it, and torchrun's summary names that rank.

torchrun names the environment variable; without it there is no file. The form is that of torch.distributed.elastic's `ErrorHandler`.
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
    """Tell torchrun that this rank is to blame, with the `message` that all ranks are told. A file that is there already stays."""
    path = os.environ.get(_VARIABLE)
    if not path:
        return
    trace = "" if error is None else _trace_of(error)
    # torchrun blames the earliest, by whole seconds, and of several in one second the lowest rank; this rank failed before all others.
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
    """Remove the file that this process has written: it goes on after that failure."""
    while _written:
        with suppress(OSError):
            os.remove(_written.pop())
