"""Ends a rank that torchrun started when torchrun's agent ends, and writes the file with which torchrun names the rank to blame.

Nothing else would end such a rank, or restart it. A thread sleeps until the agent's process ends, from the first pipeline of this process
on. It then reports to the other ranks and ends this process as SIGTERM would, which the agent would have sent. Systems without `pidfd_open`
watch nothing.

torchrun passes the path of the error file in an environment variable; without it, nothing is written. The format is that of
torch.distributed.elastic's `ErrorHandler`.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
import traceback
from contextlib import suppress

from zerobubble.runtime.failure.error_text import shortened
from zerobubble.runtime.failure.termination import end_this_process, open_pipelines

_STARTED_BY_AGENT = "TORCHELASTIC_RUN_ID"
"""The environment variable that torchrun sets for the processes that it starts."""
_lock = threading.Lock()
_watched_by: list[int] = []
"""The number of the process that watches its agent, once it does. A forked child finds its parent's number and starts to watch."""


def end_with_agent() -> None:
    """Ends this process when the torchrun agent that started it ends. Does nothing if something else started it."""
    with _lock:
        if _STARTED_BY_AGENT in os.environ and hasattr(os, "pidfd_open") and _watched_by != [os.getpid()]:
            with suppress(OSError):  # an old kernel, or a sandbox that forbids it
                descriptor = os.pidfd_open(os.getppid())
                threading.Thread(target=_watch, args=(descriptor,), name="zerobubble-agent", daemon=True).start()
            _watched_by[:] = [os.getpid()]


def _watch(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    # Report first: the signal may end this process at once.
    for pipeline in open_pipelines():
        pipeline.report_agent_end()
    end_this_process()


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
