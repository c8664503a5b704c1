"""Runs blocking calls in a thread that can be detached, so that the caller can react to failures while they run."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, TypeVar

import torch

from zerobubble.runtime.device import current_stream, set_stream
from zerobubble.runtime.transport.stalls import StallMonitor

Answer = TypeVar("Answer")

_TICK_S = 0.1
_LONGEST_TICK_S = 0.5
"""The most seconds that count between two ticks; more means that the process was frozen or starved."""
_SOON_S, _SPARE_S = 10.0, 2.0
"""At exit, a detached call is awaited if it must end within the first, and for the second longer than that."""
_detached: weakref.WeakKeyDictionary[threading.Thread, float] = weakref.WeakKeyDictionary()
"""The detached threads, each with the latest `time.monotonic()` at which its call ends."""


def in_background(
    call: Callable[[], Answer], every_tick: Callable[[float], None], longest_s: float = math.inf, stalls: StallMonitor | None = None
) -> Answer:
    """Runs `call` in a thread of its own, and returns its result or raises its error.

    Meanwhile, calls `every_tick(seconds)` ten times a second with the time waited since its last call. Time in which this process itself
    was frozen or starved does not count; `stalls` measures it. If `every_tick` raises, the thread is detached; `call` must then end within
    `longest_s` seconds.
    """
    future: Future[Answer] = Future()
    modes = _Modes(torch.is_inference_mode_enabled(), current_stream())
    thread = threading.Thread(target=_settle, args=(future, call, modes), name="zerobubble-background", daemon=True)
    thread.start()
    began = ticked = time.monotonic()
    try:
        while not _is_done(future, stalls or StallMonitor()):
            now = time.monotonic()
            every_tick(min(now - ticked, _LONGEST_TICK_S))
            ticked = now
        thread.join()
        return future.result()
    except BaseException:
        _detached[thread] = began + longest_s
        raise
    finally:
        del future  # its error refers to this stack frame, and so to all its variables


def _is_done(future: Future[Answer], stalls: StallMonitor) -> bool:
    """Returns whether the future is done, after at most a tick."""
    with stalls.waiting(_TICK_S):
        return bool(wait([future], _TICK_S).done)


@atexit.register
def _wait_at_exit() -> None:
    """Waits for threads that are about to return: one that returns from C++ while the interpreter shuts down aborts the process."""
    for thread, end in list(_detached.items()):
        left_s = max(0.0, end - time.monotonic())
        if left_s < _SOON_S:
            thread.join(left_s + _SPARE_S)


class _Modes(NamedTuple):
    """The thread-local modes of torch, copied from the calling thread."""

    inference: bool
    stream: Any


def _settle(future: Future[Answer], call: Callable[[], Answer], modes: _Modes) -> None:
    try:
        set_stream(modes.stream)
        with torch.inference_mode(modes.inference):
            future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        future.set_exception(error)
