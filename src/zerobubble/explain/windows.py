"""Idle time and free memory before the passes of each rank, for work other than passes."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import NamedTuple

from zerobubble.arguments import takes
from zerobubble.costs import Costs, Limits
from zerobubble.errors import raise_faults
from zerobubble.ir import Schedule
from zerobubble.simulation import memory_faults, peak_memory, simulate


class Window(NamedTuple):
    """Idle time of a rank before a step of its row.

    Attributes:
        step: The index of the step in the row, from 0.
        start: The beginning in ns since the start of the first pass of all ranks.
        end: The end in ns since then.
        free: The unused memory of the rank in bytes.
    """

    step: int
    start: int
    end: int
    free: int

    @property
    def duration(self) -> int:
        """The length in ns."""
        return self.end - self.start


@takes(schedule=Schedule, costs=Costs)
def windows(schedule: Schedule, costs: Costs, limits: Limits | None = None) -> tuple[tuple[Window, ...], ...]:
    """Return the idle time before each step of every rank. With correct `costs`, work that ends within a window delays no pass.

    Args:
        schedule: The schedule.
        costs: The times and bytes of its passes.
        limits: The memory of each rank, up to which memory is free; without, up to the rank's peak.

    Idle time after the last step of a row is left out:
    unless ranks wait for each other between training steps, it belongs to the idle time before the first pass of the next one. Raises
    `ScheduleError` and `InputError` as `simulate` does, and `InputError` for a schedule that exceeds `limits`.

    >>> import zerobubble as zb
    >>> found = zb.explain.windows(zb.make("1f1b", 2, 2), zb.Costs.uniform(2, times=(1, 1, 1)))
    >>> for window in found[0]:
    ...     print(window)
    Window(step=2, start=2000000, end=4000000, free=0)
    Window(step=3, start=6000000, end=7000000, free=1000000)
    """
    ceilings = peak_memory(schedule, costs)
    if limits is not None:
        raise_faults(memory_faults(schedule, costs, limits))
        ceilings = limits.memory
    timeline = simulate(schedule, costs)
    by_rank = []
    for row, steps, memory, ceiling in zip(timeline.rows, schedule.steps, timeline.memory, ceilings, strict=True):
        spans, times = iter(row), [time for time, _ in memory]
        in_rank, idle_from = [], timeline.start
        for number, step in enumerate(steps):
            span, *_ = islice(spans, len(step))
            if span.start > idle_from:
                changes = bisect_right(times, idle_from)
                held = memory[changes - 1][1] if changes else 0
                in_rank.append(Window(number, idle_from - timeline.start, span.start - timeline.start, ceiling - held))
            idle_from = span.end
        by_rank.append(tuple(in_rank))
    return tuple(by_rank)
