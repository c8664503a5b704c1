"""Less computed again than a schedule has: cheaper levels, and forwards left alone, wherever the memory has room for what they keep.

The order of passes stays, and a pass that is gone or shorter delays no other, so nothing gets longer. From there a search goes on that
moves R's like other passes, adds and leaves out some, and gives stages other levels.
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
from zerobubble.planning.search import search_again
from zerobubble.rules import recomputed
from zerobubble.simulation import held_bytes

MOST_OTHERS = 6
"""How many other schedules are tried, and the share of the seconds for them."""

FOR_OTHERS = 0.15

WHERE_IT_PAYS = ", R where it pays"
"""What the answers are called, behind the name of what they were made from."""


class Stay(NamedTuple):
    """A forward that is computed again: from position `start` of its row up to `stop`, that of its R, its rank holds what it keeps."""

    stage: int
    microbatch: int
    start: int
    stop: int


def lightened(solved: Plan, budget: Budget, seed: int = 0, others: Sequence[Schedule] = ()) -> Plan:
    """The answer with less computed again and, within `budget`, an order that suits it; itself where nothing gets shorter.

    `others` are longer schedules within the limits that may be shorter with less computed again, if there is a budget to try them.
    The problem of the answer then has other levels, of those that may be chosen.
    """
    again = solved.problem.recomputation
    if solved.order is None or again is None:
        return solved
    started = perf_counter()
    best = shorter(solved, _light(solved))
    for other in () if budget.is_empty else others[:MOST_OTHERS]:
        best = shorter(best, _light(Plan.of(solved.problem, solved.bound, other, solved.seconds, other.name)))
        if budget.evaluations is None and perf_counter() - started > FOR_OTHERS * budget.seconds:
            break
    if not budget.is_empty:
        best = shorter(best, _searched(best, budget._replace(seconds=budget.seconds + started - perf_counter()), seed))
    if best is solved:
        return solved
    name = best.how if best.how.endswith(WHERE_IT_PAYS) else f"{best.how}{WHERE_IT_PAYS}"
    return replace(best, how=name, order=replace(best.schedule, name=name), seconds=solved.seconds + perf_counter() - started)


def _searched(solved: Plan, budget: Budget, seed: int) -> Plan:
    """The best that a search leads to which moves R's like other passes, adds and leaves out some, and changes levels."""
    schedule, levels = search_again(solved.problem, solved.schedule, solved.bound.time, budget.seconds, budget.evaluations, seed)
    found = Plan.of(solved.problem.with_levels(levels), solved.bound, schedule, solved.seconds, solved.how)
    return shorter(found, _light(found))


def _light(solved: Plan) -> Plan:
    """The answer with less computed again in the same order, checked and played anew; itself where nothing may be left out."""
    assert solved.problem.recomputation is not None
    if not solved.problem.recomputation.may_leave_out:
        return solved
    problem = _with_cheaper_levels(solved.problem, solved.schedule)
    schedule = _with_plain_forwards(problem, solved.schedule)
    used = {stage for row in schedule.rows for stage, _ in recomputed(row)}
    assert problem.recomputation is not None
    levels = [level if stage in used else NONE for stage, level in enumerate(problem.recomputation.chosen)]
    return Plan.of(problem.with_levels(levels), solved.bound, schedule, solved.seconds, solved.how)


def _with_cheaper_levels(problem: Problem, schedule: Schedule) -> Problem:
    """The problem with, for one stage after the other, the quickest level with which the schedule fits the limits."""
    assert problem.recomputation is not None
    levels = [level for level in problem.recomputation.offered if level != NONE]
    costs_at = {level.name: problem.costs.with_recompute(level) for level in levels}
    chosen = list(problem.recomputation.chosen)
    for rank, row in enumerate(schedule.rows):
        held, stays = held_bytes(row, problem.costs), list(_stays(row))
        for stage in sorted({stay.stage for stay in stays}):
            own = [stay for stay in stays if stay.stage == stage]
            for level in sorted(levels, key=lambda level: level.extra_in(stage)):
                if level.extra_in(stage) >= chosen[stage].extra_in(stage):
                    break
                more = [_left_out(problem.costs, stay) - _left_out(costs_at[level.name], stay) for stay in own]
                lighter = _with_more(held, own, more)
                if max(lighter) <= problem.limits.memory[rank]:
                    held, chosen[stage] = lighter, level
                    break
    return problem.with_levels(chosen)


def _with_plain_forwards(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule without the R of forwards that may keep all they save, first those that save most time for their bytes over time."""
    return replace(schedule, rows=tuple(tuple(_without(problem, rank, row)) for rank, row in enumerate(schedule.rows)))


def _without(problem: Problem, rank: int, row: Sequence[Op]) -> Iterator[Op]:
    """A row without the R's for whose stays its rank has room."""
    costs, gone, held = problem.costs, set(), held_bytes(row, problem.costs)

    def price(stay: Stay) -> float:
        return (stay.stop - stay.start) * _left_out(costs, stay) / max(1, costs.time(Kind.R, stay.stage, stay.microbatch))

    for stay in sorted(_stays(row), key=price):
        more = _left_out(costs, stay)
        if max(held[stay.start : stay.stop]) + more <= problem.limits.memory[rank]:
            held[stay.start : stay.stop] = [number + more for number in held[stay.start : stay.stop]]
            gone.add(Op(Kind.R, stay.stage, stay.microbatch))
    return (op for op in row if op not in gone)


def _stays(row: Sequence[Op]) -> Iterator[Stay]:
    """The forwards of a row that are computed again."""
    begun: dict[tuple[int, int], int] = {}
    for at, (kind, stage, microbatch) in enumerate(row):
        if kind is Kind.F:
            begun[stage, microbatch] = at
        elif kind is Kind.R:
            yield Stay(stage, microbatch, begun[stage, microbatch], at)


def _left_out(costs: Costs, stay: Stay) -> int:
    """The bytes that a forward leaves for its R to make."""
    return costs.memory_change(Kind.R, stay.stage, microbatch=stay.microbatch)


def _with_more(held: Sequence[int], stays: Iterable[Stay], more: Iterable[int]) -> list[int]:
    """The bytes held where each of `stays` holds so many more."""
    changes = [0] * (len(held) + 1)
    for stay, size in zip(stays, more, strict=True):
        changes[stay.start] += size
        changes[stay.stop] -= size
    return [number + extra for number, extra in zip(held, accumulate(changes[:-1]), strict=True)]
