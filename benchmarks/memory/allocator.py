"""What the CPU allocator hands out and gets back during a step, to the byte, as torch's profiler hears it: nothing of ours counts here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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

    Gradients must be there before, so that they are added to and nothing new stays. Messages lie in shared memory, which is not torch's.
    """
    executor = pipe._measured
    calls = executor._calls
    executor._calls = [_marked(call) for call in calls]
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    finally:
        executor._calls = calls
    return _peak(sorted(_walk(profiled.profiler.kineto_results.experimental_event_tree()), key=lambda event: event.start_time_ns))


def _marked(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        call()
        with record_function(_MARK):
            pass

    return run


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
