"""The table that drives the tests: every schedule at every shape it is tried at."""

from __future__ import annotations

from zerobubble import SCHEDULES

SHAPES = [(p, m) for p in range(1, 9) for m in sorted({1, 2, 3, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p}) if m > 0]
"""(ranks, microbatches): fewer and more microbatches than ranks, around every limit a formula names."""

SMALL = [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 3, 4, 7, 8)]


def stage_counts(name: str) -> tuple[int, ...]:
    """The numbers of stages per rank a schedule is tried with."""
    return (1, 2, 3, 4) if SCHEDULES[name].any_stages else (SCHEDULES[name].stages_per_rank,)


EVERY = [(name, v) for name in SCHEDULES for v in stage_counts(name)]
"""(schedule, stages per rank)."""
