"""What the tests of the closed forms share: the shapes and times they range over, and bubbles in ms."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

from tests.procs.exhaustive import EXHAUSTIVE
from zerobubble import Costs, Timeline, make, simulate
from zerobubble.costs import NS_PER_MS
from zerobubble.schedules import SCHEDULES

Times = tuple[float, float, float]
Choice = TypeVar("Choice")

UNIT: Times = (1, 1, 1)
TIMES: tuple[Times, ...] = (UNIT, (2, 3, 1), (3, 2, 1), (6, 6, 4), (1, 2, 2), (5, 5, 6), (3, 1, 2), (2, 2, 0))
"""F, B, W in ms."""

COMMS = (0.25, 0.5, 1, 1.5, 2, 3)
"""Times of a message in ms."""

RANKS = range(2, 17) if EXHAUSTIVE else (*range(2, 9), 11)
GRID = [(p, m) for p in RANKS for m in range(1, 4 * p + 1) if p <= 5 or m % p in (0, 1, p - 1) or m % 9 == p % 9]
"""(ranks, microbatches) of every closed form, as far as its conditions go: of many ranks those around multiples of p, and some others.

With ZEROBUBBLE_EXHAUSTIVE=1 of every number of ranks up to 16, which takes twice as long.
"""

FULL = [(p, m) for p, m in GRID if m >= 2 * p - 1]
"""Enough microbatches for no bubble at unit times."""


def drawn(shapes: Sequence[tuple[int, int]], choices: Sequence[Choice]) -> list[tuple[int, int, Choice]]:
    """Each shape with one of `choices`, drawn at random but always alike: every shape is met, and every choice at many shapes."""
    return [(p, m, Random(f"{p} {m}").choice(choices)) for p, m in shapes]


def allowed(name: str, shapes: Sequence[tuple[int, int]], stages_per_rank: int | None = None) -> list[tuple[int, int]]:
    """The shapes at which there is such a schedule."""
    return [(p, m) for p, m in shapes if SCHEDULES[name].allows(p, m, stages_per_rank)]


def played(name: str, p: int, m: int, times: Times, comm: float = 0.0, v: int = 1, **options: Any) -> Timeline:
    """The timeline at times of a rank that v divides exactly."""
    schedule = make(name, p, m, v, **options)
    return simulate(schedule, Costs.uniform(schedule.num_stages, tuple(v * t for t in times), comm, stages_per_rank=v))


def makespan_bubble(timeline: Timeline, m: int, times: Times, v: int = 1) -> float:
    """Makespan beyond the work of a rank, in ms."""
    return timeline.makespan / NS_PER_MS - m * v * sum(times)


def span_bubble(timeline: Timeline, m: int, times: Times, v: int = 1) -> float:
    """The largest span beyond the work of a rank, in ms."""
    return timeline.span / NS_PER_MS - m * v * sum(times)
