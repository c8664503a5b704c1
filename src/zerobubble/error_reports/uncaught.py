"""Shows an exception that nothing catches such that the last line on the screen names the rank, the fault and the line of the program.

Errors of zerobubble show the user's frames only. A rank that stops because another one has failed shows one line. Under torchrun, the same
is written to the rank's error file, which torchrun prints last. The hook that was installed before prints all tracebacks, such as that of
torch, IPython or rich.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from zerobubble.error_reports.error_file import write_error_file
from zerobubble.error_reports.text import describe, text_of
from zerobubble.error_reports.user_code import is_users, user_place, with_place
from zerobubble.errors import PipelineError, ZeroBubbleError
from zerobubble.installing import CUDA_BUILD

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

ALL_FRAMES = "ZEROBUBBLE_TRACEBACK"
"""The environment variable that shows all frames of every rank if it is "full"."""
_previous: list[Hook] = []
"""The hook that was installed before, once `show_uncaught` has installed its own."""


_none_reasons: dict[str, str] = {}
"""Why calls returned None on this rank, by call."""


_INIT = "call torch.distributed.init_process_group('gloo') on CPUs; 'nccl' needs GPUs, and torch built for CUDA"
_REMEDIES = {
    "Torch not compiled with CUDA enabled": f"leave out cuda() and device='cuda' on a machine without a GPU; else {CUDA_BUILD}",
    "Distributed package doesn't have NCCL": _INIT,
    "ProcessGroupNCCL is only supported with GPUs": _INIT,
    "Unknown backend type": _INIT,
    "Default process group has not been initialized": _INIT,
    "Pipeline is not an Optimizer": "give it the optimizer, made of pipe.parameters()",
}
"""What to do about errors that torch raises in the first lines of a program, by a part of their text."""


def explain_none(call: str, reason: str) -> None:
    """Adds `reason` to an uncaught error about None: why `call` returned it on this rank."""
    _none_reasons[call] = reason


def show_uncaught() -> None:
    """Installs the hook in this process, unless it is installed already."""
    if not _previous:
        _previous.append(sys.excepthook)
        sys.excepthook = _show


def _shows_all() -> bool:
    return os.environ.get(ALL_FRAMES) == "full"


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, (AttributeError, TypeError)) and "'NoneType'" in text_of(error):
        for reason in _none_reasons.values():
            error.add_note(reason)
    for words, remedy in _REMEDIES.items():
        if words in text_of(error) and not isinstance(error, ZeroBubbleError):
            error.add_note(remedy)
    if isinstance(error, ZeroBubbleError) and not _shows_all():
        _hide_internal_frames(error)
        trace = error.__traceback__
    if _is_of_other_rank(error) and not _shows_all():
        print(_last_line(error), file=sys.stderr)  # noqa: T201 - as the hook of Python does
    else:
        _previous[0](kind, error, trace)
    if isinstance(error, Exception):
        write_report(error, _last_line(error))


def report_exit(error: SystemExit) -> None:
    """Writes the error file for an exit with a status other than 0, which no hook of Python sees."""
    if error.code:
        write_report(error, _last_line(error))


def write_report(error: BaseException, last_line: str) -> None:
    """Writes the error file of this rank: the traceback of `error`, and `last_line` in place of its text."""
    of_other = _is_of_other_rank(error)
    report = last_line if of_other else f"{_trace_of(error)}{last_line}"
    write_error_file(last_line, report, is_cause=not of_other, replace=isinstance(error, ZeroBubbleError))


def _is_of_other_rank(error: BaseException) -> bool:
    return isinstance(error, PipelineError) and error.is_of_other_rank


def _last_line(error: BaseException) -> str:
    """Returns the rank, the fault, and the line of the user's code."""
    place = user_place(error)
    rank = f"rank {os.environ['RANK']}" if "RANK" in os.environ else "this process"
    if _is_of_other_rank(error):
        return f"{text_of(error)} ({rank} stopped{place and f' at {place}'})"
    if isinstance(error, PipelineError) and error.rank is not None:
        return with_place(text_of(error), error)
    return with_place(f"{rank}: {describe(error)}", error)


def _trace_of(error: BaseException) -> str:
    """Returns the traceback of `error` and of its causes, without its own text; empty if no line of it is of the user."""
    if isinstance(error, ZeroBubbleError) and not user_place(error) and not _shows_all():
        return ""
    try:
        lines = traceback.format_exception(error)
        text = traceback.format_exception_only(error)
    except Exception:  # noqa: BLE001 - its text, notes and class are the user's
        return ""
    return "".join(lines[: -len(text)] if lines[-len(text) :] == text else lines)


def _hide_internal_frames(error: ZeroBubbleError) -> None:
    """Drops the frames of libraries from errors of zerobubble in the chain of `error`, and causes that say nothing beyond its text."""
    error.__traceback__ = _of_user(error.__traceback__) or error.__traceback__
    cause = error.__context__ if error.__cause__ is None and not error.__suppress_context__ else error.__cause__
    if cause is None:
        return
    if not user_place(cause) and (isinstance(cause, ZeroBubbleError) or not isinstance(error, PipelineError)):
        error.__cause__ = None  # which suppresses the context, too
    elif isinstance(cause, ZeroBubbleError):
        _hide_internal_frames(cause)


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """Returns `trace` with the frames of the user's code only; None if it has none."""
    frames = []
    while trace is not None:
        if is_users(trace.tb_frame):
            frames.append(trace)
        trace = trace.tb_next
    chain = None
    for frame in reversed(frames):
        chain = TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return chain
