"""The table of test cases: every schedule with every shape that it is tested at."""

from __future__ import annotations

from zerobubble.schedules import SCHEDULES

SHAPES = [(p, m) for p in range(1, 9) for m in sorted({1, 2, 3, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p}) if m > 0]
"""(ranks, microbatches): fewer and more microbatches than ranks, around every limit a formula names."""

DENSE = [(p, m) for p in range(1, 9) for m in range(1, 33)]
"""Every shape of up to 8 ranks and 32 microbatches, for schedules with one number of stages per rank."""

SMALL = [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 3, 4, 7, 8)]


def stage_counts(name: str) -> tuple[int, ...]:
    """The numbers of stages per rank a schedule is tried with: those of up to 4 that some shape allows."""
    return tuple(v for v in range(1, 5) if any(SCHEDULES[name].allows(p, m, v) for p, m in SHAPES))


def grid(name: str, stages_per_rank: int, shapes: list[tuple[int, int]] | None = None) -> list[tuple[int, int]]:
    """The (ranks, microbatches) of `shapes` that the schedule allows; of all shapes it is tried at if not given."""
    shapes = shapes or (SHAPES if len(stage_counts(name)) > 2 else DENSE)
    return [(p, m) for p, m in shapes if SCHEDULES[name].allows(p, m, stages_per_rank)]


def shape(name: str, ranks: int, microbatches: int) -> tuple[int, int]:
    """This shape where there is such a schedule, otherwise 4 ranks and 8 microbatches, where there is every schedule."""
    return (ranks, microbatches) if SCHEDULES[name].allows(ranks, microbatches) else (4, 8)


EVERY = [(name, v) for name in SCHEDULES for v in stage_counts(name)]
"""(schedule, stages per rank)."""

IN_TORCH_CSV = [name for name, recipe in SCHEDULES.items() if recipe.torch_csv]
"""The schedules that PyTorch's CSV can express."""

TRAINING = [name for name, recipe in SCHEDULES.items() if recipe.trains]
"""The schedules with backward passes."""
