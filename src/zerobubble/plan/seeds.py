"""Where a search starts: the published schedules on a placement, as far as they fit the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, islice

from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.plan.problem import Problem
from zerobubble.schedules import SCHEDULES, Recipe
from zerobubble.simulate import memory_faults


def published(placement: Placement, num_microbatches: int) -> Iterator[Schedule]:
    """Every published schedule on `placement`, one pass at a time."""
    ranks, stages = placement.num_ranks, placement.stages_per_rank
    for recipe in SCHEDULES.values():
        if recipe.trains and recipe.allows(ranks, num_microbatches, stages) and _routes(recipe, ranks, stages) == placement.routes:
            yield replace(recipe.build(ranks, num_microbatches, stages), placement=placement, overlaps=frozenset())


def fitting(schedules: Iterable[Schedule], problem: Problem) -> Iterator[Schedule]:
    """Those that fit the limits, backward passes split unless what a split leaves to W takes more room than there is."""
    for schedule in schedules:
        yield from islice((order for order in (split(schedule), schedule) if fits(order, problem)), 1)


def fits(schedule: Schedule, problem: Problem) -> bool:
    """Whether no rank holds more than its limit."""
    return not memory_faults(schedule, problem.costs, problem.limits)


def _routes(recipe: Recipe, ranks: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Where a recipe places its stages, whatever the number of microbatches: asked of the smallest it allows."""
    fewest = next(microbatches for microbatches in count(1) if recipe.allows(ranks, microbatches, stages))
    return recipe.build(ranks, fewest, stages).placement.routes


def split(schedule: Schedule) -> Schedule:
    """The same order, one pass at a time, with each BW as B and W: its gradient leaves earlier, and nothing has to wait longer."""
    rows = tuple(tuple(part for op in row for part in _parts(op)) for row in schedule.rows)
    return replace(schedule, rows=rows, overlaps=frozenset())


def _parts(op: Op) -> tuple[Op, ...]:
    return (op._replace(kind=Kind.B), op._replace(kind=Kind.W)) if op.kind is Kind.BW else (op,)


def one_by_one(placement: Placement, num_microbatches: int) -> Schedule:
    """Each microbatch forward and backward before the next one starts: slow, and legal wherever one microbatch fits."""
    home = placement.routes[0]
    passes = [(Kind.F, stage) for stage in range(len(home))] + [(Kind.BW, stage) for stage in reversed(range(len(home)))]
    rows = tuple(
        tuple(Op(kind, stage, j) for j in range(num_microbatches) for kind, stage in passes if home[stage] == rank)
        for rank in range(placement.num_ranks)
    )
    return Schedule("one by one", placement, num_microbatches, rows)
