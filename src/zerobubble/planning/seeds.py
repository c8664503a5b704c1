"""Where a search starts: the published schedules on a placement, as far as they fit the memory."""

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
from zerobubble.planning.problem.recomputation import lean_costs
from zerobubble.rules import recomputed
from zerobubble.schedules import SCHEDULES, Recipe
from zerobubble.simulation import held_bytes, memory_faults


def published(placement: Placement, num_microbatches: int) -> Iterator[Schedule]:
    """Every published schedule on `placement`, one pass at a time."""
    return (_built(recipe, placement, num_microbatches) for recipe in _recipes(placement, num_microbatches))


def paired(problem: Problem) -> Iterator[Schedule]:
    """The published schedules with overlapped steps that fit the memory, as they were published; none if overlapping hides no time."""
    if not any(problem.costs.hidden) or problem.recomputation is not None:
        return
    placement = problem.placement
    for recipe in _recipes(placement, problem.num_microbatches):
        made = recipe.build(placement.num_ranks, problem.num_microbatches, placement.stages_per_rank)
        if made.overlaps and fits_memory(made := replace(made, placement=placement), problem):
            yield made


MAKE_SECONDS = 10e-6
"""Seconds for each pass of a seed to make and judge it."""

SEARCH_SECONDS = 6e-6
"""Seconds for each pass of a problem in which a search without a seed gets anywhere."""

WELL_FILLED = 0.9
"""The share of the memory from which on a schedule leaves little that a search could use."""


def promising(problem: Problem, seconds: float = inf) -> Iterator[Schedule]:
    """The published schedules on the placement of `problem`, each made when it is asked for: the most promising first.

    Closed forms predict both before one is made: those that should fit the memory come before the others, and then the smaller bubble.
    Where `seconds` are few, it is only the first, and only if it fills the memory: else they are better spent on a search, if they do for
    one.
    """
    recipes = sorted(_recipes(problem.placement, problem.num_microbatches), key=lambda recipe: _promise(recipe, problem))
    if SEARCH_SECONDS * problem.num_passes <= seconds < MAKE_SECONDS * problem.num_passes:
        recipes = [recipe for recipe in recipes[:1] if WELL_FILLED <= _fill(recipe, problem) <= 1]
    return (_built(recipe, problem.placement, problem.num_microbatches) for recipe in recipes)


def promise(problem: Problem, bound: int) -> tuple[bool, float]:
    """Less is better: whether its most promising published schedule should hold too much, and about how long it is, `bound` ns or more."""
    recipes = _recipes(problem.placement, problem.num_microbatches)
    over, bubble = min((_promise(recipe, problem) for recipe in recipes), default=(True, inf))
    return over, max(bound, problem.work / problem.placement.num_ranks + bubble)


def _promise(recipe: Recipe, problem: Problem) -> tuple[bool, float]:
    """Less is better: whether it should hold too much, and its bubble in ns."""
    forms, here = FORMULAS.get(recipe.name), _mean_setting(problem)
    return _fill(recipe, problem) > 1, forms.bubble(here).value(here) if forms else inf


def _fill(recipe: Recipe, problem: Problem) -> float:
    """The share of the memory that it should hold, infinite if no closed form says."""
    forms = FORMULAS.get(recipe.name)
    room = fmean(problem.limits.memory)
    return forms.peak.value(_mean_setting(problem)) * fmean(problem.costs.held_after_f) / room if forms else inf


def _mean_setting(problem: Problem) -> Setting:
    """The problem as if its ranks and stages were all like their mean, and messages took no time."""
    ranks, costs = problem.placement.num_ranks, problem.costs
    f, b, w = (sum(column) // ranks for column in (costs.forward, costs.backward, costs.weight))
    return Setting(ranks, problem.num_microbatches, problem.placement.stages_per_rank, f, b, w, c=0)


def _recipes(placement: Placement, num_microbatches: int) -> Iterator[Recipe]:
    """Those that place their stages as `placement` does."""
    ranks, stages = placement.num_ranks, placement.stages_per_rank
    for recipe in SCHEDULES.values():
        if recipe.trains and recipe.allows(ranks, num_microbatches, stages) and _routes(recipe, ranks, stages) == placement.routes:
            yield recipe


def _built(recipe: Recipe, placement: Placement, num_microbatches: int) -> Schedule:
    """The schedule; a long one is a short one lengthened where that can be, which is the same in less time."""
    ranks, stages, few = placement.num_ranks, placement.stages_per_rank, STEADY_MICROBATCHES * placement.num_ranks

    def built(microbatches: int) -> Schedule:
        return replace(recipe.build(ranks, microbatches, stages), placement=placement, overlaps=frozenset())

    is_long = ranks >= LARGE_RANKS and num_microbatches > few + ranks and recipe.allows(ranks, few, stages)
    return (lengthened(built(few), num_microbatches) if is_long else None) or built(num_microbatches)


LARGE_RANKS = 8
"""Ranks from which lengthening a short schedule pays."""

STEADY_MICROBATCHES = 3
"""Microbatches per rank at which warm-up, steady state and cool-down all show."""

MIDDLE_MICROBATCHES = 2
"""Microbatches per rank after which a schedule is in its steady state."""


def lengthened(short: Schedule, num_microbatches: int) -> Schedule | None:
    """`short` for more microbatches: in the middle each rank goes on with what it does over and over, a pass of each kind and stage.

    None where a rank does not. Microbatches are alike, so the passes of a kind and stage are numbered in their order.
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
    """Those that fit the limits, backward passes split where there is room for what that leaves to W.

    Forwards of stages that compute again are computed again. Where a BW takes less than B and W, others follow with backwards in one piece.
    """
    for schedule in schedules:
        order = split_in_room(computed_again(schedule, problem), problem)
        if fits_memory(order, problem):
            yield order
        if fusing_saves(problem.costs) and problem.plans_steps:
            for made in with_backwards_joined(schedule, problem):
                if made.rows != order.rows:
                    yield replace(made, name=f"{schedule.name}, {made.name}")


def computed_again(schedule: Schedule, problem: Problem) -> Schedule:
    """`schedule`, one pass at a time, with an R before each backward of the stages that compute again, unless it has some already."""
    again = {stage for stage in range(problem.placement.num_stages) if problem.recomputes(stage)}
    if not again or any(map(recomputed, schedule.rows)):
        return schedule

    def parts(op: Op) -> tuple[Op, ...]:
        return (op._replace(kind=Kind.R), op) if op.kind in kinds_making(ValueKind.GRADIENT) and op.stage in again else (op,)

    return replace(schedule, rows=tuple(tuple(part for op in row for part in parts(op)) for row in schedule.rows))


def lean(problem: Problem) -> Problem:
    """The problem as one of stages that keep little and whose B takes as long as with its R, for what knows nothing of R."""
    if problem.recomputation is None:
        return problem
    costs = lean_costs(problem.costs)
    return replace(problem, costs=costs, workload=None, recomputation=None, cut=None)


def with_room_for_again(problem: Problem) -> Problem:
    """`lean` with less memory: in addition to what its orders hold, one forward on each rank may be there in full."""
    asked = lean(problem)
    more = [0] * problem.placement.num_ranks
    for stage, rank in enumerate(problem.placement.routes[0]):
        more[rank] = max(more[rank], problem.costs.held_after_f[stage] - asked.costs.held_after_f[stage])
    return replace(asked, limits=Limits(tuple(max(1, room - size) for room, size in zip(problem.limits.memory, more, strict=True))))


def fits_memory(schedule: Schedule, problem: Problem) -> bool:
    """Whether no rank holds more than its limit."""
    return not memory_faults(schedule, problem.costs, problem.limits)


@lru_cache
def _routes(recipe: Recipe, ranks: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Where a recipe places its stages, whatever the number of microbatches: asked of the smallest it allows."""
    fewest = next(microbatches for microbatches in count(1) if recipe.allows(ranks, microbatches, stages))
    return recipe.build(ranks, fewest, stages).placement.routes


def split(schedule: Schedule) -> Schedule:
    """The same order, one pass at a time, with each BW as B and W: its gradient leaves earlier, and nothing has to wait longer."""
    rows = tuple(tuple(part for op in row for part in _parts(op)) for row in schedule.rows)
    return replace(schedule, rows=rows, overlaps=frozenset())


def split_in_room(schedule: Schedule, problem: Problem) -> Schedule:
    """As `split`, but a BW whose B leaves more to W than its rank has room for stays in one piece."""
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


def joined_for_room(schedule: Schedule, problem: Problem) -> Schedule:
    """The other way round: a B for whose W its rank has no room is in one piece with that W where it comes next."""
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
    """`schedule`, of passes one at a time, with B and W apart, in one piece where they stand side by side, and all in one piece.

    Those that fit the limits, named by what they are, without those that are the same.
    """
    apart = split(schedule)
    every = [{op for op in row if op.kind is Kind.B} for row in apart.rows]
    beside = [{op for op, other in pairwise(row) if op.kind is Kind.B and other == op._replace(kind=Kind.W)} for row in apart.rows]
    known = []
    for name, whole in (("B and W apart", [set()] * len(every)), ("B and W in one piece", every), ("some B and W in one piece", beside)):
        rows = tuple(tuple(_joined(*pair)) for pair in zip(apart.rows, whole, strict=True))
        made = replace(apart, name=name, rows=rows)
        if rows not in known and fits_memory(made, problem):
            known.append(rows)
            yield made


def _joined(row: Iterable[Op], whole: set[Op]) -> Iterator[Op]:
    """The row with each B of `whole` in one piece with its W."""
    for op in row:
        if op in whole:
            yield op._replace(kind=Kind.BW)
        elif not (op.kind is Kind.W and op._replace(kind=Kind.B) in whole):
            yield op


def _parts(op: Op) -> tuple[Op, ...]:
    kind, stage, microbatch = op
    return (Op(Kind.B, stage, microbatch), Op(Kind.W, stage, microbatch)) if kind is Kind.BW else (op,)


def serial_schedule(placement: Placement, num_microbatches: int) -> Schedule:
    """Each microbatch forward and backward before the next one starts: slow, and legal wherever one microbatch fits."""
    home = placement.routes[0]
    passes = [(Kind.F, stage) for stage in range(len(home))] + [(Kind.BW, stage) for stage in reversed(range(len(home)))]
    rows = tuple(
        tuple(Op(kind, stage, j) for j in range(num_microbatches) for kind, stage in passes if home[stage] == rank)
        for rank in range(placement.num_ranks)
    )
    return Schedule("one by one", placement, num_microbatches, rows)
