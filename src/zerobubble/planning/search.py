"""The compiled search: list scheduling, beam search and annealing of orders, until the bound is met or the budget is spent.

Compiled code is in `kernels`, imported when first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter
from typing import NamedTuple

from zerobubble.costs import FULL, NONE, UNIT_BYTES, Costs, Level, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.planning.kernels import load_kernels
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.recomputation import Recomputation
from zerobubble.planning.seeds import serial_schedule
from zerobubble.planning.transforms import with_recompute_passes


class Progress(NamedTuple):
    """The best objective so far and its lower bound in ns, the method that found it, and the seconds since the start."""

    time_ns: int
    bound: int
    how: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best schedule of a search, the method that found it, the schedules simulated and seconds taken, and whether Ctrl-C ended it."""

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
    """Finds the best schedule in `seconds`, or until its objective meets `bound` (ns); never worse than a seed that fits.

    With `evaluations`, the number of schedules to simulate, the clock is not read and the result depends only on `seed`. With an empty
    budget, the result is the best seed, or that of one run of the list scheduler. `progress` is called with every new best. Ctrl-C returns
    the best so far. Seeds that exceed the limits are ignored. Raises `InputError` if llvmlite is missing, if a seed has another placement
    or number of microbatches, and if not even one microbatch fits in memory.
    """
    problem.costs.require_equal("the search for orders of passes")
    kernels = load_kernels()
    for other in seeds:
        problem.require_schedule(other, "seed")
    budget = kernels.BudgetMeter(seconds, evaluations)

    def report(time: int, how: str) -> None:
        if progress is not None:
            progress(Progress(time, bound, how, budget.elapsed))

    apart, joined = (kernels.tables_of(problem, joins=joins) for joins in (False, True))
    # If B and W may be fused, half of the budget is for schedules that split them: these are better if memory holds what B keeps for W.
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
        raise InputError("no schedule fits the memory limits", remedy="raise them to at least one microbatch of every rank's stages")
    schedule = kernels.schedule_of_order("planned", problem, state.tables, state.order)
    return SearchResult(schedule, state.how, budget.used, budget.elapsed, interrupted)


def search_with_recompute(
    problem: Problem, schedule: Schedule, bound: int, seconds: float, evaluations: int | None = None, seed: int = 0
) -> tuple[Schedule, tuple[Level, ...]]:
    """Anneals `schedule`, which may have R's, until its objective meets `bound` (ns) or the budget is spent; also returns its levels.

    Moves change the order, place R's anywhere between F and B, add and remove R's, and change the levels of stages. Returns `schedule` if
    nothing better is found.
    """
    kernels = load_kernels()
    found: tuple[Schedule, tuple[Level, ...]] = kernels.anneal_recompute(
        problem, schedule, bound, kernels.BudgetMeter(seconds, evaluations), seed
    )
    return found


def search_in_steps(
    problem: Problem, bound: int, schedules: Sequence[Schedule], *, seconds: float, seed: int = 0, evaluations: int | None = None
) -> SearchResult | None:
    """Anneals `schedules` whose passes may be fused or overlapped, until the bound (ns) is met or the budget is spent.

    Moves change the order, which B and W are fused, and which F overlaps which B or BW. Returns None if no schedule fits the limits.
    """
    kernels = load_kernels()
    budget = kernels.BudgetMeter(seconds, evaluations)
    found = kernels.anneal_in_steps(problem, schedules, bound, budget, seed)
    return None if found is None else SearchResult(found.schedule, "annealing of steps", budget.used, budget.elapsed, found.interrupted)


def compile_kernels(recompute: bool = False, steps: bool = False, shares: bool = False) -> float:
    """Compiles the kernels of `search`, and of `search_with_recompute` and `search_in_steps` if asked; returns the seconds taken.

    Kernels that were compiled before are loaded from the cache.
    """
    start = perf_counter()
    problem = Problem(Placement.linear(2), 2, Costs.uniform(2), Limits((2 * UNIT_BYTES,) * 2))
    load_kernels().compile_all(problem)
    if recompute:
        full = replace(problem, costs=problem.costs.with_recompute(FULL), recomputation=Recomputation((NONE, FULL), (FULL,) * 2))
        search_with_recompute(full, with_recompute_passes(serial_schedule(full.placement, 2), full), 0, 0.0, 1)
    if steps:
        hiding = replace(problem, costs=Costs.uniform(2, overlap=2.0))
        search_in_steps(hiding, 0, [serial_schedule(hiding.placement, 2)], seconds=0.0, evaluations=20)
    if shares:
        compile_joint_search()
    return perf_counter() - start


@cache
def compile_joint_search() -> None:
    """Compiles the kernels of the search for microbatches of unequal cost, or loads them from the cache, once per process."""
    kernels, costs = load_kernels(), replace(Costs.uniform(2), shares=(1, 2))
    tables = kernels.tables_of(Problem(Placement.linear(2), 2, costs, Limits((8 * UNIT_BYTES,) * 2)))
    (start,) = kernels.search_assignments(tables, [range(2)], 0, kernels.BudgetMeter(0.0, 2), 0, 1)
    kernels.improve_jointly(tables, start, 0, kernels.BudgetMeter(0.0, 1), 0, moves_passes=True)
