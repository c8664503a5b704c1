"""The bytes that torch's allocator allocates and frees during a step, without our own accounting.

The profiler reports those of the CPU allocator; the CUDA allocator reports its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

import zerobubble as zb

_MARK = "between two actions"


class Peak(NamedTuple):
    """Bytes beyond those allocated before the step: the most between two actions of a rank, and the most at any moment."""

    between: int
    within: int


def peak_of(pipe: zb.Pipeline, step: Callable[[], object]) -> Peak:
    """The peak of this rank in `step`, a step of `pipe` like the last one.

    Gradients must be there before, so that they are added to and nothing new stays. Between CPUs of one machine messages lie in shared
    memory, which is not torch's.
    """
    return _on_cuda(pipe, step) if pipe.device.type == "cuda" else _on_cpu(pipe, step)


def _on_cuda(pipe: zb.Pipeline, step: Callable[[], object]) -> Peak:
    levels: list[int] = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with _after_actions(pipe, lambda: levels.append(torch.cuda.memory_allocated())):
        step()
    return Peak(max(levels) - before, torch.cuda.max_memory_allocated() - before)


def _on_cpu(pipe: zb.Pipeline, step: Callable[[], object]) -> Peak:
    with _after_actions(pipe, _mark), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    return _peak(sorted(_walk(profiled.profiler.kineto_results.experimental_event_tree()), key=lambda event: event.start_time_ns))


@contextmanager
def _after_actions(pipe: zb.Pipeline, look: Callable[[], object]) -> Iterator[None]:
    executor = pipe._steps.last
    calls = executor._calls
    executor._calls = [partial(_in_turn, call, look) for call in calls]
    try:
        yield
    finally:
        executor._calls = calls


def _in_turn(call: Callable[[], object], look: Callable[[], object]) -> None:
    call()
    look()


def _mark() -> None:
    with record_function(_MARK):
        pass


def _peak(events: list[Any]) -> Peak:
    level = between = within = 0
    for event in events:
        if event.tag == _EventType.Allocation:
            level += event.extra_fields.alloc_size
            within = max(within, level)
        elif event.name == _MARK:
            between = max(between, level)
    return Peak(between, within)


def _walk(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)
