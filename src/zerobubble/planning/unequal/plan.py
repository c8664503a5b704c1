"""Plans for microbatches of unequal cost: first as if they were alike, then passes and microbatches in a better order together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, reduce
from statistics import fmean
from time import perf_counter

from zerobubble.costs import UNIT_BYTES, Costs, Level, Limits
from zerobubble.ir import Placement
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Budget, shorter
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.search import load_kernels
from zerobubble.planning.seeds import fits_memory, serial_schedule, split
from zerobubble.planning.unequal.order import first_choices


def alike(problem: Problem, levels: Sequence[Level] = ()) -> Problem:
    """The problem with microbatches that all take the mean time and hold the bytes of the largest: its schedules fit in any order.

    So do those that compute forwards again at one of `levels`: what a forward keeps is rounded otherwise here, for which room is left.
    """
    shares = problem.costs.shares
    mean, largest = (problem.costs.scaled(share) for share in (fmean(shares), max(shares)))
    costs = replace(mean, held_after_f=largest.held_after_f, held_after_b=largest.held_after_b)
    room = list(problem.limits.memory)
    for stage, rank in enumerate(problem.placement.routes[0]):
        kept = [[each.with_recompute(level).column("held_input")[stage] for level in levels] for each in (problem.costs, costs)]
        more = max((round(own * max(shares)) - here for own, here in zip(*kept, strict=True)), default=0)
        room[rank] = max(1, room[rank] - problem.num_microbatches * max(0, more))
    return replace(problem, costs=costs, limits=Limits(tuple(room)), workload=None, cut=None)


@cache
def compile_joint_search() -> None:
    """Compile what `unequal` searches with, or load what was compiled before; once in a process."""
    kernels, costs = load_kernels(), replace(Costs.uniform(2), shares=(1, 2))
    tables = kernels.tables_of(Problem(Placement.linear(2), 2, costs, Limits((8 * UNIT_BYTES,) * 2)))
    (start,) = kernels.first_orders(tables, kernels.order_of(split(serial_schedule(Placement.linear(2), 2))), [range(2)])
    kernels.improve_jointly(tables, start, 0, kernels.BudgetMeter(0.0, 1), 0, moves_passes=True)


def unequal(problem: Problem, found: Plan, budget: Budget, seed: int) -> Plan:
    """The best answer to `problem`, whose microbatches have shares, that the answer `found` to `alike(problem)` leads to.

    It is never longer than the schedule of `found` with the microbatches in the order of the data. Where nothing was found there, it
    is infeasible for the same reason. Stages have the levels of recomputation that they have there; in another order, those that compute
    again do so for all microbatches, each R right before its B. Compiling the search is not counted as part of the budget.
    """
    if found.problem.recomputation is not None:
        costs = problem.costs.with_recompute(found.problem.recomputation.chosen)
        problem = replace(problem, costs=costs, recomputation=found.problem.recomputation)
    bound = problem.bound()
    if found.order is None:
        return replace(found, problem=problem, bound=bound, reason=problem.shortage_reason or found.reason)
    started, kernels, base = perf_counter(), load_kernels(), split(found.schedule)
    base = base if fits_memory(base, problem) else found.schedule
    given = Plan.of(problem, bound, found.schedule, found.seconds, found.how)
    tables, order = kernels.tables_of(problem), kernels.order_of(base)
    starts = kernels.first_orders(tables, order, [range(problem.num_microbatches), *first_choices(problem.costs.shares)])
    if not starts or problem.costs.shares == (1,) * problem.num_microbatches:
        return given
    best = min(starts, key=lambda start: start.time)

    def answer(how: str) -> Plan:
        schedule = kernels.schedule_of_order(f"{given.how}, {how}", problem, tables, best.order, best.takers.tolist())
        return Plan.of(problem, bound, schedule, given.seconds, schedule.name)

    answers = [given]
    if budget.is_empty:
        answers.append(answer("microbatches ordered"))
    else:
        compile_joint_search()
        for part, moves_passes in ((budget.share(4), False), (budget.share(4)._replace(seconds=0.75 * budget.seconds), True)):
            meter = kernels.BudgetMeter(part.seconds, part.evaluations)
            best = kernels.improve_jointly(tables, best, bound.time, meter, seed, moves_passes=moves_passes)
        answers.append(answer("passes and microbatches ordered"))
    return replace(reduce(shorter, answers), seconds=found.seconds + perf_counter() - started)
