"""Our planner: seeds, policies and order annealing, until the bound is met or the budget is spent.

What is compiled lies in `kernels` and is imported when first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from types import ModuleType
from typing import NamedTuple

from zerobubble.costs import FULL, NONE, UNIT_BYTES, Costs, Level, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.problem.recomputation import Recomputation
from zerobubble.planning.seeds import computed_again, serial_schedule


class Progress(NamedTuple):
    """The best objective so far and its proven bound in ns, what found it, and the seconds since the start."""

    time_ns: int
    bound: int
    how: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best schedule of a search, what found it, the schedules played and seconds it took, and whether Ctrl-C ended it."""

    schedule: Schedule
    how: str
    evaluations: int
    seconds: float
    interrupted: bool = False


def search(
    problem: Problem,
    bound: int,
    seeds: Sequence[Schedule] = (),
    *,
    seconds: float,
    seed: int = 0,
    evaluations: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best schedule found in `seconds`, or sooner where its objective meets `bound` (ns); never worse than a seed that fits.

    With `evaluations`, the number of schedules to play, the clock is not looked at and the result depends on `seed` alone. Without
    budget it is the best seed, or one pass of the list scheduler. `progress` hears of every new best; on an interrupt the best so far
    is given. Seeds over the limits are left out. Raises `InputError` when llvmlite is missing, when a seed has another placement or
    number of microbatches, or when memory does not hold one microbatch.
    """
    problem.costs.require_alike("the search for orders of passes")
    kernels = load_kernels()
    for other in seeds:
        if other.placement.routes != problem.placement.routes or other.num_microbatches != problem.num_microbatches:
            raise InputError(f"the seed {other.name!r} is for another placement or number of microbatches: leave it out")
    budget = kernels.BudgetMeter(seconds, evaluations)

    def report(time: int, how: str) -> None:
        if progress is not None:
            progress(Progress(time, bound, how, budget.elapsed))

    apart, joined = (kernels.tables_of(problem, joins=joins) for joins in (False, True))
    # Where B and W may be in one piece, half of the budget is for them apart, which is better where there is room for what B leaves to W.
    turns = [apart, joined] if joined.joins else [apart]
    state, orders, interrupted = kernels.SearchState(apart, bound, budget, report), [kernels.order_of(other) for other in seeds], False
    try:
        for done, tables in enumerate(turns):
            left = max(0.0, seconds - budget.elapsed) / (len(turns) - done)
            state = state.with_tables(tables, kernels.BudgetMeter(left, evaluations and evaluations // len(turns)))
            kernels.search_portfolio(state, problem, orders, seed)
            budget.used += state.budget.used
    except KeyboardInterrupt:
        if state.order is None:
            raise
        interrupted = True
    if state.order is None:
        raise InputError("no schedule fits the memory limits: they must hold one microbatch of every rank's stages")
    schedule = kernels.schedule_of_order("planned", problem, state.tables, state.order)
    return SearchResult(schedule, state.how, budget.used, budget.elapsed, interrupted)


def search_again(
    problem: Problem, schedule: Schedule, bound: int, seconds: float, evaluations: int | None = None, seed: int = 0
) -> tuple[Schedule, tuple[Level, ...]]:
    """`schedule`, which may have R's anywhere between F and B, in a better order, with other R's and levels; and the levels of its stages.

    It is annealed until its objective meets `bound` (ns) or the budget is spent; where nothing better is found it stays as it is.
    """
    kernels = load_kernels()
    found: tuple[Schedule, tuple[Level, ...]] = kernels.anneal_again(
        problem, schedule, bound, kernels.BudgetMeter(seconds, evaluations), seed
    )
    return found


def search_in_steps(
    problem: Problem, bound: int, schedules: Sequence[Schedule], *, seconds: float, seed: int = 0, evaluations: int | None = None
) -> SearchResult | None:
    """The best that annealing makes of `schedules` in the budget where passes may share steps, or sooner where it meets `bound` (ns).

    Which B and W are one BW, and which F overlaps which B or BW, changes with the order. None where no schedule fits the limits.
    """
    kernels = load_kernels()
    budget = kernels.BudgetMeter(seconds, evaluations)
    found = kernels.anneal_in_steps(problem, schedules, bound, budget, seed)
    return None if found is None else SearchResult(found.schedule, "annealing of steps", budget.used, budget.elapsed, found.interrupted)


def simulate_compiled(problem: Problem, schedule: Schedule) -> tuple[int, int, bool]:
    """Span and makespan of `schedule` in ns by the compiled simulator, and whether it fits the limits.

    A backward in one piece is played as B and W where there is room for what B leaves to W, unless steps of several passes save time: then
    all steps are played as they are. Raises `InputError` for a schedule that cannot run.
    """
    kernels = load_kernels()
    if problem.plans_steps:
        span, makespan, fits = kernels.play_in_steps(problem, schedule)
        if span < 0:
            raise InputError(f"the schedule {schedule.name!r} cannot run: see schedule_faults")
        return span, makespan, fits
    order = kernels.order_of(schedule)
    both = [kernels.tables_of(replace(problem, objective=one), joins=True) for one in (Objective.PERIOD, Objective.MAKESPAN)]
    rows = [kernels.rows_of(tables, order) for tables in both]
    fits, _ = map(kernels.all_ranks_fit, both, rows)  # which also finds out what is in one piece
    span, makespan = map(kernels.longest_time, both, rows)
    if span < 0:
        raise InputError(f"the schedule {schedule.name!r} cannot run: see schedule_faults")
    return span, makespan, fits


def compile_kernels(again: bool = False, steps: bool = False) -> float:
    """The seconds it took to compile what `search` uses, and `search_again` or `search_in_steps` if asked for.

    Or to load it where it was compiled before.
    """
    start = perf_counter()
    problem = Problem(Placement.linear(2), 2, Costs.uniform(2), Limits((2 * UNIT_BYTES,) * 2))
    load_kernels().compile_all(problem)
    if again:
        full = replace(problem, costs=problem.costs.with_recompute(FULL), recomputation=Recomputation((NONE, FULL), (FULL,) * 2))
        search_again(full, computed_again(serial_schedule(full.placement, 2), full), 0, 0.0, 1)
    if steps:
        hiding = replace(problem, costs=Costs.uniform(2, overlap=2.0))
        search_in_steps(hiding, 0, [serial_schedule(hiding.placement, 2)], seconds=0.0, evaluations=1)
    return perf_counter() - start


def load_kernels() -> ModuleType:
    """What is compiled; raises `InputError` with what to install when llvmlite is missing."""
    try:
        from zerobubble.planning import kernels
    except ModuleNotFoundError as error:
        if error.name not in ("llvmlite", "numpy"):
            raise
        raise InputError("the planner's search needs llvmlite: pip install 'zerobubble[plan]'") from error
    return kernels
