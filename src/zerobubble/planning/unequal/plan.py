"""Plans schedules for microbatches of unequal cost: first for equal ones, then by searching orders of passes and microbatches jointly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, reduce
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING

from zerobubble.costs import UNIT_BYTES, Costs, Level, Limits
from zerobubble.ir import Placement
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Budget, bound_by_windows, shorter
from zerobubble.planning.kernels import load_kernels
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.transforms import fits_memory, split
from zerobubble.planning.unequal.order import first_choices

if TYPE_CHECKING:
    from zerobubble.planning.kernels.entry_points import BudgetMeter, JointOrder


def with_equal_microbatches(problem: Problem, levels: Sequence[Level] = ()) -> Problem:
    """Returns `problem` with equal microbatches of the mean time and the largest memory, so that its schedules fit in any order.

    With recomputation at one of `levels`, the bytes that a forward keeps may round differently than in `problem`. The memory limits are
    lowered by that difference, so that these schedules fit, too.
    """
    shares = problem.costs.shares
    mean, largest = (problem.costs.scaled(share) for share in (fmean(shares), max(shares)))
    costs = replace(mean, held_after_f=largest.held_after_f, held_after_b=largest.held_after_b)
    memory = list(problem.limits.memory)
    for stage, rank in enumerate(problem.placement.routes[0]):
        kept = [[each.with_recompute(level).column("held_input")[stage] for level in levels] for each in (problem.costs, costs)]
        more = max((round(own * max(shares)) - here for own, here in zip(*kept, strict=True)), default=0)
        memory[rank] = max(1, memory[rank] - problem.num_microbatches * max(0, more))
    return replace(problem, costs=costs, limits=Limits(tuple(memory)), workload=None, cut=None, trains=True)


@cache
def compile_joint_search() -> None:
    """Compiles the kernels of `unequal`, or loads them from the cache, once per process."""
    kernels, costs = load_kernels(), replace(Costs.uniform(2), shares=(1, 2))
    tables = kernels.tables_of(Problem(Placement.linear(2), 2, costs, Limits((8 * UNIT_BYTES,) * 2)))
    (start,) = kernels.search_assignments(tables, [range(2)], 0, kernels.BudgetMeter(0.0, 2), 0, 1)
    kernels.improve_jointly(tables, start, 0, kernels.BudgetMeter(0.0, 1), 0, moves_passes=True)


LISTED_SHARE = 0.3
"""Share of the budget for list scheduling, with microbatches in many orders."""

MOST_STARTS = 3
"""Maximum number of orders to start the search from: the best list schedules, and the best orders from the plan for equal microbatches."""

TRIAL_SHARE = 0.4
"""Share of the budget to improve all of these starts; the rest is for the best of them."""


def plan_unequal(problem: Problem, found: Plan, budget: Budget, seed: int) -> Plan:
    """Returns the best plan for `problem`, whose microbatches have shares, given the plan `found` for `with_equal_microbatches(problem)`.

    It is never longer than the schedule of `found` with microbatches in the order of the data. If `found` has no schedule, the result is
    infeasible for the same reason. Stages keep their levels of recomputation from `found`. If the order changes, recomputing stages
    recompute all microbatches, each R right before its B. Compilation does not count against the budget.
    """
    if found.problem.recomputation is not None:
        costs = problem.costs.with_recompute(found.problem.recomputation.chosen)
        problem = replace(problem, costs=costs, recomputation=found.problem.recomputation)
    bound = problem.bound()
    if found.order is None:
        return replace(found, problem=problem, bound=bound, reason=problem.shortage_reason or found.reason)
    compile_joint_search()
    started, kernels, base = perf_counter(), load_kernels(), split(found.schedule)
    bound = bound_by_windows(problem, bound, budget)
    base = base if fits_memory(base, problem) else found.schedule
    given = Plan.from_schedule(problem, bound, found.schedule, found.seconds, found.how)
    if problem.costs.shares == (1,) * problem.num_microbatches:
        return given
    tables, several = kernels.tables_of(problem), [range(problem.num_microbatches), *first_choices(problem.costs.shares)]
    starts = [(given.how, start) for start in kernels.first_orders(tables, kernels.order_of(base), several)]
    listing = budget.part(LISTED_SHARE)
    listed = kernels.search_assignments(tables, several, bound.time, _meter(listing), seed, MOST_STARTS)
    starts += [("list scheduling by size", start) for start in listed]
    if not starts:
        return given
    how, best = min(starts, key=_time_of)
    if budget.is_empty:
        ending = "microbatches ordered"
    else:
        ending = "passes and microbatches ordered"
        tried = sorted({start.time: (name, start) for name, start in reversed(starts)}.values(), key=_time_of)[:MOST_STARTS]
        part = budget.part(TRIAL_SHARE / len(tried))
        improved = [
            (name, kernels.improve_jointly(tables, start, bound.time, _meter(part), seed, moves_passes=True)) for name, start in tried
        ]
        how, best = min(improved, key=_time_of)
        left = budget.part(1 - LISTED_SHARE - TRIAL_SHARE)
        best = kernels.improve_jointly(tables, best, bound.time, _meter(left), seed + 1, moves_passes=True)
    name = f"{how}, {ending}"
    schedule = kernels.schedule_of_order(name, problem, tables, best.order, best.assignment.tolist())
    answers = [given, Plan.from_schedule(problem, bound, schedule, given.seconds, name)]
    return replace(reduce(shorter, answers), seconds=found.seconds + perf_counter() - started)


def _meter(budget: Budget) -> BudgetMeter:
    return load_kernels().BudgetMeter(budget.seconds, budget.evaluations)  # type: ignore[no-any-return]


def _time_of(start: tuple[str, JointOrder]) -> int:
    return start[1].time
