"""The seeds of a search: published schedules that fit the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain, count
from math import inf
from statistics import fmean

from zerobubble.bounds.overlap import fusing_saves
from zerobubble.errors import InputError
from zerobubble.formulas import FORMULAS, FormulaInput
from zerobubble.ir import Op, Placement, Schedule
from zerobubble.kinds import Kind
from zerobubble.planning.lengthening import extend_by_pattern
from zerobubble.planning.placements import family
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.transforms import fits_memory, fused_variants, split_in_memory, with_recompute_passes
from zerobubble.schedules import SCHEDULES, Recipe


def published_schedules(placement: Placement, num_microbatches: int) -> Iterator[Schedule]:
    """Yields every published schedule on `placement`, without overlapped steps."""
    return (_built(recipe, placement, num_microbatches) for recipe in _recipes(placement, num_microbatches))


def overlapped_seeds(problem: Problem) -> Iterator[Schedule]:
    """Yields the published schedules with overlapped steps that fit the memory; none if overlap hides no time."""
    if not any(problem.costs.hidden) or problem.recomputation is not None or problem.slices > 1:
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
"""Fraction of the memory above which a schedule leaves little for a search to use."""


def ranked_seeds(problem: Problem, seconds: float = inf) -> Iterator[Schedule]:
    """Yields the published schedules on the placement of `problem`, each made on demand, the best estimate first.

    Closed forms estimate memory and bubble: schedules that should fit come first, in order of their bubble. If `seconds` are enough for a
    search but not for a seed, only the first is made, and only if it nearly fills the memory. Otherwise a search is the better use of time.
    """
    mean, slices = problem.of_mean_slices, problem.slices
    recipes = sorted(_recipes(problem.placement, problem.num_microbatches, slices), key=lambda recipe: _estimate(recipe, mean))
    if SEARCH_SECONDS * problem.num_passes <= seconds < MAKE_SECONDS * problem.num_passes:
        recipes = [recipe for recipe in recipes[:1] if WELL_FILLED <= _fill(recipe, mean) <= 1]
    if slices > 1:
        return (made for recipe in recipes for made in _over_slices(recipe, problem))
    return (_built(recipe, problem.placement, problem.num_microbatches) for recipe in recipes)


def estimate_of_best_seed(problem: Problem, bound: int) -> tuple[bool, float]:
    """Returns whether the first of `ranked_seeds` should exceed the memory, and its estimated time in ns, at least `bound`."""
    recipes, mean = _recipes(problem.placement, problem.num_microbatches, problem.slices), problem.of_mean_slices
    over, bubble = min((_estimate(recipe, mean) for recipe in recipes), default=(True, inf))
    return over, max(bound, problem.work / problem.placement.num_ranks + bubble)


def _estimate(recipe: Recipe, problem: Problem) -> tuple[bool, float]:
    """Returns whether the schedule should exceed the memory, and its estimated bubble in ns."""
    forms, here = FORMULAS.get(recipe.name), _mean_setting(problem)
    return _fill(recipe, problem) > 1, forms.bubble(here).value(here) if forms else inf


def _fill(recipe: Recipe, problem: Problem) -> float:
    """Returns the estimated fraction of the memory that the schedule uses; infinite without a closed form."""
    forms = FORMULAS.get(recipe.name)
    limit = fmean(problem.limits.memory)
    return forms.peak.value(_mean_setting(problem)) * fmean(problem.costs.held_after_f) / limit if forms else inf


def _mean_setting(problem: Problem) -> FormulaInput:
    """Returns the arguments of closed forms: mean times over ranks, and no time for messages."""
    ranks, costs = problem.placement.num_ranks, problem.costs
    f, b, w = (sum(column) // ranks for column in (costs.forward, costs.backward, costs.weight))
    return FormulaInput(ranks, problem.num_microbatches, problem.placement.stages_per_rank, f, b, w, c=0)


def _recipes(placement: Placement, num_microbatches: int, slices: int = 1) -> Iterator[Recipe]:
    """Yields the recipes that place their stages as `placement` does, of those for the `slices` of each microbatch."""
    ranks, stages, whole = placement.num_ranks, placement.stages_per_rank, num_microbatches // slices
    for recipe in SCHEDULES.values():
        if slices > 1 and SLICES not in recipe.options:
            continue
        if recipe.trains and recipe.allows(ranks, whole, stages) and _places_like(recipe, placement):
            yield recipe


SLICES = "slices"
"""The option of recipes that can cut microbatches into slices of their sequence."""


def _over_slices(recipe: Recipe, problem: Problem) -> Iterator[Schedule]:
    """Yields the schedule over the slices of `problem`, or nothing if the recipe needs more of them."""
    placement, microbatches = problem.placement, problem.whole_microbatches
    with suppress(InputError):
        made = recipe.build(placement.num_ranks, microbatches, placement.stages_per_rank, **{SLICES: problem.slices})
        yield replace(made, placement=placement)


def _built(recipe: Recipe, placement: Placement, num_microbatches: int) -> Schedule:
    """Builds the schedule. A long one is made by lengthening a short one if possible, which gives the same schedule in less time."""
    ranks, stages, few = placement.num_ranks, placement.stages_per_rank, STEADY_MICROBATCHES * placement.num_ranks

    def built(microbatches: int) -> Schedule:
        return replace(recipe.build(ranks, microbatches, stages), placement=placement, overlaps=frozenset())

    is_long = ranks >= LARGE_RANKS and num_microbatches > few + ranks and recipe.allows(ranks, few, stages)
    return (extend_by_pattern(built(few), num_microbatches) if is_long else None) or built(num_microbatches)


LARGE_RANKS = 8
"""Number of ranks from which lengthening a short schedule saves time."""

STEADY_MICROBATCHES = 3
"""Microbatches per rank that are enough for a schedule with a warm-up, a steady state and a cool-down."""


def fit_to_memory(schedules: Iterable[Schedule], problem: Problem) -> Iterator[Schedule]:
    """Yields versions of the schedules that fit the limits, with backward passes split if memory holds what B keeps for W.

    Recomputing stages get their R's. If a BW takes less than B and W, variants with fused backward passes follow.
    """
    for schedule in schedules:
        order = split_in_memory(with_recompute_passes(schedule, problem), problem)
        if fits_memory(order, problem):
            yield order
        if fusing_saves(problem.costs) and problem.plans_steps:
            for made in fused_variants(schedule, problem):
                if made.rows != order.rows:
                    yield replace(made, name=f"{schedule.name}, {made.name}")


@lru_cache
def _places_like(recipe: Recipe, placement: Placement) -> bool:
    """Returns whether a recipe places its stages as `placement` does: in its smallest schedule, if possible on few ranks of that family."""
    small, stages = _on_few_ranks(placement), placement.stages_per_rank
    shapes = chain(((small, microbatches) for microbatches in range(1, 4 * small.num_ranks)), ((placement, n) for n in count(1)))
    where, fewest = next(shape for shape in shapes if recipe.allows(shape[0].num_ranks, shape[1], stages))
    return recipe.build(where.num_ranks, fewest, stages).placement.routes == where.routes


MANY_RANKS = 32
"""Number of ranks from which building a schedule takes long enough to ask about a smaller one."""


def _on_few_ranks(placement: Placement) -> Placement:
    """Returns the family of a placement on few ranks, as even or odd in number; the placement itself if it has few ranks or no family."""
    ranks, stages = placement.num_ranks, placement.stages_per_rank
    if ranks <= MANY_RANKS:
        return placement
    names = ("linear", "vee", f"looped-{stages}", f"wave-{stages}")
    return next((family(name, MANY_RANKS + ranks % 2) for name in names if family(name, ranks).routes == placement.routes), placement)


def serial_schedule(placement: Placement, num_microbatches: int, slices: int = 1) -> Schedule:
    """Returns a schedule that finishes each microbatch before the next one starts: slow, but legal if one microbatch fits in memory.

    `num_microbatches` counts the `slices` of all microbatches.
    """
    home = placement.routes[0]
    rows: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    for first in range(0, num_microbatches, slices):
        numbers = range(first, first + slices)
        for stage, rank in enumerate(home):
            rows[rank] += [Op(Kind.F, stage, j) for j in numbers]
        for stage, rank in reversed([*enumerate(home)]):
            rows[rank] += [Op(Kind.BW, stage, j) for j in reversed(numbers)]
    return Schedule("one by one", placement, num_microbatches, tuple(map(tuple, rows)), slices=slices)
