"""Calls that block and hear nothing meanwhile: made in a thread of their own, which can be left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple, TypeVar

import torch

Answer = TypeVar("Answer")

_TICK_S = 0.1
_LONGEST_TICK_S = 0.5


def in_background(call: Callable[[], Answer], every_tick: Callable[[float], None]) -> Answer:
    """What `call` gives or raises in a thread of its own.

    While it lasts, `every_tick(seconds)` is told ten times a second for how long this rank has waited since it was told last. What it
    raises leaves the call behind. The time in which this rank itself was frozen or starved does not count as waiting.
    """
    future: Future[Answer] = Future()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    modes = _Modes(torch.is_inference_mode_enabled(), stream)
    thread = threading.Thread(target=_settle, args=(future, call, modes), name="zerobubble-background", daemon=True)
    thread.start()
    try:
        told = time.monotonic()
        while not wait([future], _TICK_S).done:
            now = time.monotonic()
            every_tick(min(now - told, _LONGEST_TICK_S))
            told = now
        thread.join()
        return future.result()
    finally:
        del future  # its error holds this frame


class _Modes(NamedTuple):
    """What torch has for each thread, and the one that calls for another has set."""

    inference: bool
    stream: torch.cuda.Stream | None


def _settle(future: Future[Answer], call: Callable[[], Answer], modes: _Modes) -> None:
    try:
        if modes.stream is not None:
            torch.cuda.set_stream(modes.stream)
        with torch.inference_mode(modes.inference):
            future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for
        future.set_exception(error)
