"""Removes recomputation that a schedule does not need: uses cheaper levels, and drops R's, wherever memory suffices.

The order of passes stays. Removing or shortening a pass delays no other pass, so nothing gets longer. From there, annealing moves R's like
other passes, adds and removes some, and changes the levels of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

from zerobubble.costs import NONE, Costs
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Budget, shorter
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.search import search_with_recompute
from zerobubble.rules import recomputed
from zerobubble.simulation import held_bytes

MOST_OTHERS = 6
"""Other schedules that are tried, and the share of the seconds for them."""

FOR_OTHERS = 0.15

WHERE_IT_PAYS = ", R where it pays"
"""Suffix to the name of the plan that an answer was made from."""


class Recompute(NamedTuple):
    """A recomputed forward: between positions `start` and `stop` of its row, F and R, its rank holds only what the level keeps."""

    stage: int
    microbatch: int
    start: int
    stop: int


def with_less_recompute(plan: Plan, budget: Budget, seed: int = 0, others: Sequence[Schedule] = ()) -> Plan:
    """The plan with less recomputation and, within `budget`, an order that suits it; unchanged if nothing gets shorter.

    `others` are longer schedules within the limits that may be shorter with less recomputation; they are tried if there is a budget. The
    problem of the answer has the levels of its stages.
    """
    recomputation = plan.problem.recomputation
    if plan.order is None or recomputation is None:
        return plan
    started = perf_counter()
    best = shorter(plan, _reduced(plan))
    for other in () if budget.is_empty else others[:MOST_OTHERS]:
        best = shorter(best, _reduced(Plan.from_schedule(plan.problem, plan.bound, other, plan.seconds, other.name)))
        if budget.evaluations is None and perf_counter() - started > FOR_OTHERS * budget.seconds:
            break
    if not budget.is_empty:
        best = shorter(best, _searched(best, budget._replace(seconds=budget.seconds + started - perf_counter()), seed))
    if best is plan:
        return plan
    name = best.how if best.how.endswith(WHERE_IT_PAYS) else f"{best.how}{WHERE_IT_PAYS}"
    return replace(best, how=name, order=replace(best.schedule, name=name), seconds=plan.seconds + perf_counter() - started)


def _searched(plan: Plan, budget: Budget, seed: int) -> Plan:
    """The best schedule of a search that moves R's like other passes, adds and removes some, and changes levels."""
    schedule, levels = search_with_recompute(plan.problem, plan.schedule, plan.bound.time, budget.seconds, budget.evaluations, seed)
    found = Plan.from_schedule(plan.problem.with_levels(levels), plan.bound, schedule, plan.seconds, plan.how)
    return shorter(found, _reduced(found))


def _reduced(plan: Plan) -> Plan:
    """The plan with less recomputation in the same order, verified and played; unchanged if R's are not optional."""
    assert plan.problem.recomputation is not None
    if not plan.problem.recomputation.is_optional:
        return plan
    problem = _with_cheaper_levels(plan.problem, plan.schedule)
    schedule = _with_plain_forwards(problem, plan.schedule)
    used = {stage for row in schedule.rows for stage, _ in recomputed(row)}
    assert problem.recomputation is not None
    levels = [level if stage in used else NONE for stage, level in enumerate(problem.recomputation.chosen)]
    return Plan.from_schedule(problem.with_levels(levels), plan.bound, schedule, plan.seconds, plan.how)


def _with_cheaper_levels(problem: Problem, schedule: Schedule) -> Problem:
    """The problem with the quickest level with which the schedule fits the limits, chosen stage by stage."""
    assert problem.recomputation is not None
    levels = [level for level in problem.recomputation.offered if level != NONE]
    costs_at = {level.name: problem.costs.with_recompute(level) for level in levels}
    chosen = list(problem.recomputation.chosen)
    for rank, row in enumerate(schedule.rows):
        held, recomputes = held_bytes(row, problem.costs), list(_recomputes(row))
        for stage in sorted({recompute.stage for recompute in recomputes}):
            own = [recompute for recompute in recomputes if recompute.stage == stage]
            for level in sorted(levels, key=lambda level: level.extra_in(stage)):
                if level.extra_in(stage) >= chosen[stage].extra_in(stage):
                    break
                more = [_saved_bytes(problem.costs, recompute) - _saved_bytes(costs_at[level.name], recompute) for recompute in own]
                reduced = _with_more(held, own, more)
                if max(reduced) <= problem.limits.memory[rank]:
                    held, chosen[stage] = reduced, level
                    break
    return problem.with_levels(chosen)


def _with_plain_forwards(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule without the R's that memory makes unnecessary, in order of time saved per byte-time."""
    return replace(schedule, rows=tuple(tuple(_without_free_recomputes(problem, rank, row)) for rank, row in enumerate(schedule.rows)))


def _without_free_recomputes(problem: Problem, rank: int, row: Sequence[Op]) -> Iterator[Op]:
    """A row without the R's whose forwards its rank can hold in full."""
    costs, removed, held = problem.costs, set(), held_bytes(row, problem.costs)

    def price(recompute: Recompute) -> float:
        return (
            (recompute.stop - recompute.start)
            * _saved_bytes(costs, recompute)
            / max(1, costs.time(Kind.R, recompute.stage, recompute.microbatch))
        )

    for recompute in sorted(_recomputes(row), key=price):
        more = _saved_bytes(costs, recompute)
        if max(held[recompute.start : recompute.stop]) + more <= problem.limits.memory[rank]:
            held[recompute.start : recompute.stop] = [number + more for number in held[recompute.start : recompute.stop]]
            removed.add(Op(Kind.R, recompute.stage, recompute.microbatch))
    return (op for op in row if op not in removed)


def _recomputes(row: Sequence[Op]) -> Iterator[Recompute]:
    """The recomputed forwards of a row."""
    begun: dict[tuple[int, int], int] = {}
    for at, (kind, stage, microbatch) in enumerate(row):
        if kind is Kind.F:
            begun[stage, microbatch] = at
        elif kind is Kind.R:
            yield Recompute(stage, microbatch, begun[stage, microbatch], at)


def _saved_bytes(costs: Costs, recompute: Recompute) -> int:
    """The bytes of a forward that its R recomputes."""
    return costs.memory_change(Kind.R, recompute.stage, microbatch=recompute.microbatch)


def _with_more(held: Sequence[int], recomputes: Iterable[Recompute], more: Iterable[int]) -> list[int]:
    """The bytes held if each of these forwards holds `more`."""
    changes = [0] * (len(held) + 1)
    for recompute, size in zip(recomputes, more, strict=True):
        changes[recompute.start] += size
        changes[recompute.stop] -= size
    return [number + extra for number, extra in zip(held, accumulate(changes[:-1]), strict=True)]
