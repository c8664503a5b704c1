"""Calls that block and hear nothing meanwhile: made in a thread of their own, which can be left behind."""

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

Answer = TypeVar("Answer")

_TICK_S = 0.1
_LONGEST_TICK_S = 0.5
_SOON_S, _SPARE_S = 10.0, 2.0
_left_behind: weakref.WeakKeyDictionary[threading.Thread, float] = weakref.WeakKeyDictionary()
"""The threads of calls that were left behind, each with the time, by `time.monotonic`, by which its call ends."""


def in_background(call: Callable[[], Answer], every_tick: Callable[[float], None], longest_s: float = math.inf) -> Answer:
    """What `call` gives or raises in a thread of its own.

    While it lasts, `every_tick(seconds)` is told ten times a second for how long this rank has waited since it was told last. What it
    raises leaves the call behind, which ends by itself after at most `longest_s` seconds. The time in which this rank itself was frozen or
    starved does not count as waiting.
    """
    future: Future[Answer] = Future()
    modes = _Modes(torch.is_inference_mode_enabled(), current_stream())
    thread = threading.Thread(target=_settle, args=(future, call, modes), name="zerobubble-background", daemon=True)
    thread.start()
    began = told = time.monotonic()
    try:
        while not wait([future], _TICK_S).done:
            now = time.monotonic()
            every_tick(min(now - told, _LONGEST_TICK_S))
            told = now
        thread.join()
        return future.result()
    except BaseException:
        _left_behind[thread] = began + longest_s
        raise
    finally:
        del future  # its error holds this frame


@atexit.register
def _stay() -> None:
    """A thread that comes back from C++ while the interpreter ends aborts the process, so those that are about to are waited for."""
    for thread, end in list(_left_behind.items()):
        left_s = max(0.0, end - time.monotonic())
        if left_s < _SOON_S:
            thread.join(left_s + _SPARE_S)


class _Modes(NamedTuple):
    """What torch has for each thread, and the one that calls for another has set."""

    inference: bool
    stream: Any


def _settle(future: Future[Answer], call: Callable[[], Answer], modes: _Modes) -> None:
    try:
        set_stream(modes.stream)
        with torch.inference_mode(modes.inference):
            future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for
        future.set_exception(error)
