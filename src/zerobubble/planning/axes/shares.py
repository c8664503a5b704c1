"""Microbatches of unequal cost as an axis: orders for equal ones, then a search that orders passes and microbatches jointly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from zerobubble.bounds import Bound
from zerobubble.costs import Level, Limits
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Budget, bound_by_windows
from zerobubble.planning.axes.axis import ChoicesOfAxis
from zerobubble.planning.candidate import UNBOUNDED, Candidate, Effort, Lift
from zerobubble.planning.kernels import load_kernels
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.recompute.reduction import with_less_recompute
from zerobubble.planning.transforms import fits_memory, split
from zerobubble.planning.unequal.order import first_choices

if TYPE_CHECKING:
    from zerobubble.planning.kernels.entry_points import BudgetMeter, JointOrder
    from zerobubble.planning.kernels.tables import Tables

JOINTLY = 0.75
"""Share of the budget for the joint search."""


@dataclass(frozen=True)
class SharesChoices(ChoicesOfAxis):
    """Orders for equal microbatches, whose forwards may be recomputed at the levels `offered`, turned into orders of unequal ones."""

    offered: tuple[Level, ...] = ()

    def choices(self, candidate: Candidate) -> Iterator[Candidate]:
        problem = candidate.problem

        def unequal(plan: Plan, effort: Effort) -> Iterator[Plan]:
            for ordered in unequal_plans(problem, plan, effort.budget, effort.seed):
                yield with_less_recompute(ordered, effort.budget.emptied)

        yield candidate.choose("shares", "unequal", with_equal_microbatches(problem, self.offered), lift=Lift(unequal, JOINTLY))


def with_equal_microbatches(problem: Problem, levels: Sequence[Level] = ()) -> Problem:
    """Returns `problem` with equal microbatches of the mean time and the largest memory, so that its schedules fit in any order.

    With recomputation at one of `levels`, the bytes that a forward keeps may round differently than in `problem`. The memory limits are
    lowered by that difference, so that these schedules fit, too.
    """
    shares = problem.costs.shares
    mean, largest = (problem.costs.scaled(share) for share in (fmean(shares), max(shares)))
    costs = replace(mean, held_after_f=largest.held_after_f, held_after_b=largest.held_after_b)
    memory = list(problem.limits.memory)
    kept = [[each.with_recompute(level).column("held_input") for level in levels] for each in (problem.costs, costs)]
    for stage, rank in enumerate(problem.placement.routes[0]):
        more = max((round(own[stage] * max(shares)) - here[stage] for own, here in zip(*kept, strict=True)), default=0)
        memory[rank] = max(1, memory[rank] - problem.num_microbatches * max(0, more))
    return replace(problem, costs=costs, limits=Limits(tuple(memory)), workload=None, cut=None, trains=True)


LISTED_SHARE = 0.3
"""Share of the budget for list scheduling, with microbatches in many orders."""

MOST_STARTS = 3
"""Maximum number of orders to start the search from: the best list schedules, and the best orders from the plan for equal microbatches."""

TRIAL_SHARE = 0.4
"""Share of the budget to improve all of these starts; the rest is for the best of them."""


def unequal_plans(problem: Problem, plan: Plan, budget: Budget, seed: int) -> Iterator[Plan]:
    """Plans for `problem`, whose microbatches have shares, from one for `with_equal_microbatches(problem)`: its order, then the best order.

    Stages keep their levels of recomputation. If the order changes, recomputing stages recompute all microbatches, each R right before its
    B.
    """
    levels = plan.problem.recomputation
    problem = problem if levels is None else problem.offering(levels.offered, *levels.chosen)
    bound = UNBOUNDED if budget.is_empty else bound_by_windows(problem, problem.bound(), budget)
    yield Plan.from_schedule(problem, bound, plan.schedule, plan.seconds, plan.how)
    if problem.costs.shares == (1,) * problem.num_microbatches:
        return
    kernels, base = load_kernels(), split(plan.schedule)
    base = base if fits_memory(base, problem) else plan.schedule
    tables, several = kernels.tables_of(problem), [range(problem.num_microbatches), *first_choices(problem.costs.shares)]
    starts = [(plan.how, start) for start in kernels.first_orders(tables, kernels.order_of(base), several)]
    listed = kernels.search_assignments(tables, several, bound.time, _meter(budget.part(LISTED_SHARE)), seed, MOST_STARTS)
    starts += [("list scheduling by size", start) for start in listed]
    if starts:
        how, best = min(starts, key=_time_of) if budget.is_empty else _improved(tables, starts, bound, budget, seed)
        name = f"{how}, {'microbatches' if budget.is_empty else 'passes and microbatches'} ordered"
        schedule = kernels.schedule_of_order(name, problem, tables, best.order, best.assignment.tolist())
        yield Plan.from_schedule(problem, bound, schedule, plan.seconds, name)


def _improved(tables: Tables, starts: Sequence[tuple[str, JointOrder]], bound: Bound, budget: Budget, seed: int) -> tuple[str, JointOrder]:
    """The best order after a joint search from the shortest starts, and how it started."""
    improve = partial(load_kernels().improve_jointly, tables, moves_passes=True)
    tried = sorted({start.time: (name, start) for name, start in reversed(starts)}.values(), key=_time_of)[:MOST_STARTS]
    part = budget.part(TRIAL_SHARE / len(tried))
    how, best = min(((name, improve(start, bound.time, _meter(part), seed)) for name, start in tried), key=_time_of)
    return how, improve(best, bound.time, _meter(budget.part(1 - LISTED_SHARE - TRIAL_SHARE)), seed + 1)


def _meter(budget: Budget) -> BudgetMeter:
    return load_kernels().BudgetMeter(budget.seconds, budget.evaluations)  # type: ignore[no-any-return]


def _time_of(start: tuple[str, JointOrder]) -> int:
    return start[1].time
