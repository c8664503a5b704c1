"""The seeds of a search: published schedules that fit the memory, and transformations of schedules that preserve their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count, pairwise
from math import inf
from statistics import fmean

from zerobubble.bounds.overlap import fusing_saves
from zerobubble.costs import Costs, Limits
from zerobubble.formulas import FORMULAS, Setting
from zerobubble.ir import Op, Placement, Schedule
from zerobubble.kinds import Kind, ValueKind, kinds_making
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.recomputation import costs_with_recompute_in_backward
from zerobubble.rules import recomputed
from zerobubble.schedules import SCHEDULES, Recipe
from zerobubble.simulation import held_bytes, memory_faults


def published(placement: Placement, num_microbatches: int) -> Iterator[Schedule]:
    """Yields every published schedule on `placement`, without overlapped steps."""
    return (_built(recipe, placement, num_microbatches) for recipe in _recipes(placement, num_microbatches))


def paired(problem: Problem) -> Iterator[Schedule]:
    """Yields the published schedules with overlapped steps that fit the memory; none if overlap hides no time."""
    if not any(problem.costs.hidden) or problem.recomputation is not None:
        return
    placement = problem.placement
    for recipe in _recipes(placement, problem.num_microbatches):
        made = recipe.build(placement.num_ranks, problem.num_microbatches, placement.stages_per_rank)
        if made.overlaps and fits_memory(made := replace(made, placement=placement), problem):
            yield made


MAKE_SECONDS = 10e-6
"""Seconds per pass to make and check a seed."""

SEARCH_SECONDS = 6e-6
"""Seconds per pass that a search without a seed needs to find a useful schedule."""

WELL_FILLED = 0.9
"""Share of the memory above which a schedule leaves little for a search to use."""


def promising(problem: Problem, seconds: float = inf) -> Iterator[Schedule]:
    """Yields the published schedules on the placement of `problem`, each made on demand, the most promising first.

    Closed forms predict memory and bubble: schedules that should fit come first, in order of their bubble. If `seconds` are enough for a
    search but not for a seed, only the first is made, and only if it nearly fills the memory. Otherwise a search is the better use of time.
    """
    recipes = sorted(_recipes(problem.placement, problem.num_microbatches), key=lambda recipe: _promise(recipe, problem))
    if SEARCH_SECONDS * problem.num_passes <= seconds < MAKE_SECONDS * problem.num_passes:
        recipes = [recipe for recipe in recipes[:1] if WELL_FILLED <= _fill(recipe, problem) <= 1]
    return (_built(recipe, problem.placement, problem.num_microbatches) for recipe in recipes)


def promise(problem: Problem, bound: int) -> tuple[bool, float]:
    """Returns a sort key: whether the most promising schedule should exceed the memory, and its estimated time in ns, at least `bound`."""
    recipes = _recipes(problem.placement, problem.num_microbatches)
    over, bubble = min((_promise(recipe, problem) for recipe in recipes), default=(True, inf))
    return over, max(bound, problem.work / problem.placement.num_ranks + bubble)


def _promise(recipe: Recipe, problem: Problem) -> tuple[bool, float]:
    """Returns a sort key: whether the schedule should exceed the memory, and its predicted bubble in ns."""
    forms, here = FORMULAS.get(recipe.name), _mean_setting(problem)
    return _fill(recipe, problem) > 1, forms.bubble(here).value(here) if forms else inf


def _fill(recipe: Recipe, problem: Problem) -> float:
    """Returns the predicted share of the memory that the schedule uses; infinite without a closed form."""
    forms = FORMULAS.get(recipe.name)
    limit = fmean(problem.limits.memory)
    return forms.peak.value(_mean_setting(problem)) * fmean(problem.costs.held_after_f) / limit if forms else inf


def _mean_setting(problem: Problem) -> Setting:
    """Returns the arguments of closed forms: mean times over ranks, and no time for messages."""
    ranks, costs = problem.placement.num_ranks, problem.costs
    f, b, w = (sum(column) // ranks for column in (costs.forward, costs.backward, costs.weight))
    return Setting(ranks, problem.num_microbatches, problem.placement.stages_per_rank, f, b, w, c=0)


def _recipes(placement: Placement, num_microbatches: int) -> Iterator[Recipe]:
    """Yields the recipes that place their stages as `placement` does."""
    ranks, stages = placement.num_ranks, placement.stages_per_rank
    for recipe in SCHEDULES.values():
        if recipe.trains and recipe.allows(ranks, num_microbatches, stages) and _routes(recipe, ranks, stages) == placement.routes:
            yield recipe


def _built(recipe: Recipe, placement: Placement, num_microbatches: int) -> Schedule:
    """Builds the schedule. A long one is made by lengthening a short one if possible, which gives the same schedule in less time."""
    ranks, stages, few = placement.num_ranks, placement.stages_per_rank, STEADY_MICROBATCHES * placement.num_ranks

    def built(microbatches: int) -> Schedule:
        return replace(recipe.build(ranks, microbatches, stages), placement=placement, overlaps=frozenset())

    is_long = ranks >= LARGE_RANKS and num_microbatches > few + ranks and recipe.allows(ranks, few, stages)
    return (lengthened(built(few), num_microbatches) if is_long else None) or built(num_microbatches)


LARGE_RANKS = 8
"""Number of ranks from which lengthening a short schedule saves time."""

STEADY_MICROBATCHES = 3
"""Microbatches per rank that are enough for a schedule with a warm-up, a steady state and a cool-down."""

MIDDLE_MICROBATCHES = 2
"""Microbatches per rank after which a schedule is in its steady state."""


def lengthened(short: Schedule, num_microbatches: int) -> Schedule | None:
    """Returns `short` extended to more microbatches: each rank repeats its steady state, one pass of each kind and stage.

    Returns None if a rank has no such pattern. Microbatches are equal, so the passes of a kind and stage are numbered in order.
    """
    rows = []
    for row in short.rows:
        pattern = [op[:2] for op in row]
        first = [at for at, pass_kind in enumerate(pattern) if pass_kind == pattern[0]]
        here, there, end = first[MIDDLE_MICROBATCHES * short.num_ranks :][:3]
        period = pattern[here:there]
        if pattern[there:end] != period or set(period) != set(pattern) or len(period) > len(set(period)):
            return None
        long = pattern[:there] + period * (num_microbatches - short.num_microbatches) + pattern[there:]
        numbers = {pass_kind: count() for pass_kind in period}
        rows.append(tuple([Op(*pass_kind, next(numbers[pass_kind])) for pass_kind in long]))
    return replace(short, num_microbatches=num_microbatches, rows=tuple(rows))


def fitting(schedules: Iterable[Schedule], problem: Problem) -> Iterator[Schedule]:
    """Yields the schedules that fit the limits, with backward passes split if memory holds what B keeps for W.

    Recomputing stages get their R's. If a BW takes less than B and W, variants with fused backward passes follow.
    """
    for schedule in schedules:
        order = split_in_memory(with_recompute_passes(schedule, problem), problem)
        if fits_memory(order, problem):
            yield order
        if fusing_saves(problem.costs) and problem.plans_steps:
            for made in with_backwards_joined(schedule, problem):
                if made.rows != order.rows:
                    yield replace(made, name=f"{schedule.name}, {made.name}")


def with_recompute_passes(schedule: Schedule, problem: Problem) -> Schedule:
    """Inserts an R before each backward of recomputing stages, unless `schedule` has R's already. It must not have overlapped steps."""
    recomputing = {stage for stage in range(problem.placement.num_stages) if problem.recomputes(stage)}
    if not recomputing or any(map(recomputed, schedule.rows)):
        return schedule

    def parts(op: Op) -> tuple[Op, ...]:
        return (op._replace(kind=Kind.R), op) if op.kind in kinds_making(ValueKind.GRADIENT) and op.stage in recomputing else (op,)

    return replace(schedule, rows=tuple(tuple(part for op in row for part in parts(op)) for row in schedule.rows))


def with_recompute_in_backward(problem: Problem) -> Problem:
    """Returns the problem with R as a part of B and only the inputs held after F, for algorithms that do not support R."""
    if problem.recomputation is None:
        return problem
    costs = costs_with_recompute_in_backward(problem.costs)
    return replace(problem, costs=costs, workload=None, recomputation=None, cut=None)


def with_memory_for_recompute(problem: Problem) -> Problem:
    """Returns `with_recompute_in_backward` with lower limits, so that every rank can hold one recomputed forward in addition."""
    reduced = with_recompute_in_backward(problem)
    more = [0] * problem.placement.num_ranks
    for stage, rank in enumerate(problem.placement.routes[0]):
        more[rank] = max(more[rank], problem.costs.held_after_f[stage] - reduced.costs.held_after_f[stage])
    return replace(reduced, limits=Limits(tuple(max(1, limit - size) for limit, size in zip(problem.limits.memory, more, strict=True))))


def fits_memory(schedule: Schedule, problem: Problem) -> bool:
    """Returns whether no rank exceeds its limit."""
    return not memory_faults(schedule, problem.costs, problem.limits)


@lru_cache
def _routes(recipe: Recipe, ranks: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Returns where a recipe places its stages: those of its smallest schedule, since the number of microbatches does not matter."""
    fewest = next(microbatches for microbatches in count(1) if recipe.allows(ranks, microbatches, stages))
    return recipe.build(ranks, fewest, stages).placement.routes


def split(schedule: Schedule) -> Schedule:
    """Splits each BW into B and W, in the same order: gradients are sent earlier, and no pass is delayed."""
    rows = tuple(tuple(part for op in row for part in _parts(op)) for row in schedule.rows)
    return replace(schedule, rows=rows, overlaps=frozenset())


def split_in_memory(schedule: Schedule, problem: Problem) -> Schedule:
    """As `split`, but a BW stays fused if its rank cannot hold what B keeps for W."""
    costs, whole = problem.costs, split(schedule)
    if all(after_b <= after_f for after_b, after_f in zip(costs.held_after_b, costs.held_after_f, strict=True)):
        return whole
    rows = (_row_in_room(row, costs, limit) for row, limit in zip(schedule.rows, problem.limits.memory, strict=True))
    return replace(whole, rows=tuple(rows))


def _row_in_room(row: Sequence[Op], costs: Costs, limit: int) -> tuple[Op, ...]:
    passes: list[Op] = []
    for op, held in zip(row, held_bytes(row, costs), strict=True):
        waits = -costs.memory_change(Kind.W, op.stage, microbatch=op.microbatch)
        passes += _parts(op) if held + waits <= limit else [op]
    return tuple(passes)


def joined_for_memory(schedule: Schedule, problem: Problem) -> Schedule:
    """The reverse of `split_in_memory`: fuses a B and the W right after it if the rank cannot hold what B keeps for W."""
    rows = (_row_joined(row, problem.costs, limit) for row, limit in zip(schedule.rows, problem.limits.memory, strict=True))
    return replace(schedule, rows=tuple(rows))


def _row_joined(row: Sequence[Op], costs: Costs, limit: int) -> tuple[Op, ...]:
    passes: list[Op] = []
    for op, before, over in zip(row, (None, *row), (False, *(held > limit for held in held_bytes(row, costs))), strict=False):
        if over and before == op._replace(kind=Kind.B) and op.kind is Kind.W:
            passes[-1] = op._replace(kind=Kind.BW)
        else:
            passes.append(op)
    return tuple(passes)


def with_backwards_joined(schedule: Schedule, problem: Problem) -> Iterator[Schedule]:
    """Yields `schedule` with B and W split, with all fused, and with adjacent ones fused; only those that fit, without duplicates."""
    divided = split(schedule)
    every = [{op for op in row if op.kind is Kind.B} for row in divided.rows]
    adjacent = [{op for op, other in pairwise(row) if op.kind is Kind.B and other == op._replace(kind=Kind.W)} for row in divided.rows]
    known = []
    for name, whole in (
        ("B and W split", [set()] * len(every)),
        ("B and W in one piece", every),
        ("some B and W in one piece", adjacent),
    ):
        rows = tuple(tuple(_joined(*pair)) for pair in zip(divided.rows, whole, strict=True))
        made = replace(divided, name=name, rows=rows)
        if rows not in known and fits_memory(made, problem):
            known.append(rows)
            yield made


def _joined(row: Iterable[Op], whole: set[Op]) -> Iterator[Op]:
    """Yields the row with each B of `whole` fused with its W."""
    for op in row:
        if op in whole:
            yield op._replace(kind=Kind.BW)
        elif not (op.kind is Kind.W and op._replace(kind=Kind.B) in whole):
            yield op


def _parts(op: Op) -> tuple[Op, ...]:
    kind, stage, microbatch = op
    return (Op(Kind.B, stage, microbatch), Op(Kind.W, stage, microbatch)) if kind is Kind.BW else (op,)


def serial_schedule(placement: Placement, num_microbatches: int) -> Schedule:
    """Returns a schedule that finishes each microbatch before the next one starts: slow, but legal if one microbatch fits in memory."""
    home = placement.routes[0]
    passes = [(Kind.F, stage) for stage in range(len(home))] + [(Kind.BW, stage) for stage in reversed(range(len(home)))]
    rows = tuple(
        tuple(Op(kind, stage, j) for j in range(num_microbatches) for kind, stage in passes if home[stage] == rank)
        for rank in range(placement.num_ranks)
    )
    return Schedule("one by one", placement, num_microbatches, rows)
