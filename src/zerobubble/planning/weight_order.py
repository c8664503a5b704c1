"""The order of a rank's W passes, chosen so that sums over replicas hide: the sum of a stage may begin when its last W is over.

W sends no message, so ranks are free to run the W of one stage before those of another. The slots of W in a row stay where they are, and
with them all other passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations

from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.answer import Plan
from zerobubble.planning.problem.problem import Problem
from zerobubble.simulation import memory_faults, simulate
from zerobubble.timeline import Timeline

MOST_BUCKETS = 64
"""Buckets of a stage with which orders are compared: with more of them, sums end at nearly the same time and take long to play."""

MOST_ORDERS = 24
"""Orders of its stages that are tried for a rank: all of up to four stages."""


def with_weights_ordered(solved: Plan) -> Plan:
    """The answer with W in an order in which sums over replicas end earlier, itself where none is shorter within the limits.

    >>> import zerobubble as zb
    >>> costs = zb.Costs.uniform(8, (20, 20, 20), stages_per_rank=2, reduce=80)
    >>> schedule = zb.make("zb-v", 4, 8)
    >>> problem = zb.planning.Problem(schedule.placement, 8, costs, zb.Limits((99_000_000,) * 4), zb.planning.Objective.MAKESPAN)
    >>> solved = zb.planning.Plan.of(problem, problem.bound(), schedule, 0.0, "zb-v")
    >>> [each.time / 1e6 for each in (solved, with_weights_ordered(solved))]  # ms; without sums 510
    [580.0, 550.0]
    """
    problem = solved.problem
    if solved.order is None or not any(problem.costs.reduce):
        return solved
    found = _weights_ordered(solved.schedule, problem)
    if found.rows == solved.schedule.rows or memory_faults(found, problem.costs, problem.limits):
        return solved
    better = Plan.of(problem, solved.bound, found, solved.seconds, f"{solved.how}, W in the order of sums")
    return better if better.time is not None and solved.time is not None and better.time < solved.time else solved


def _weights_ordered(schedule: Schedule, problem: Problem) -> Schedule:
    """Each rank with the order of its stages with which it ends first, as far as that is for itself to decide."""
    found, costs = schedule, replace(problem.costs, buckets=tuple(min(MOST_BUCKETS, count) for count in problem.costs.buckets))
    for rank in range(schedule.num_ranks):
        rows = (_with_row(schedule, rank, row) for row in _orders(schedule.rows[rank]))
        best = min([schedule, *rows], key=lambda each: _end_of(simulate(each, costs), rank))
        found = _with_row(found, rank, best.rows[rank])
    return found


def _end_of(timeline: Timeline, rank: int) -> int:
    """When the last pass and the last sum of a rank are over, after the first pass of all."""
    figures = timeline.ranks[rank]
    return figures.lead + figures.span


def _with_row(schedule: Schedule, rank: int, row: Iterable[Op]) -> Schedule:
    rows = [*schedule.rows]
    rows[rank] = tuple(row)
    return replace(schedule, rows=tuple(rows))


def _orders(row: Sequence[Op]) -> Iterator[list[Op]]:
    """The row with the W of one stage before those of another, for each order of its stages."""
    stages = sorted({op.stage for op in row if op.kind is Kind.W})
    for order in islice(permutations(stages), MOST_ORDERS):
        yield _in_order(row, order)


def _in_order(row: Sequence[Op], stages: Sequence[int]) -> list[Op]:
    """The row with, in each slot of W, one that is ready of the first of `stages` that has one; those of a stage stay in their order."""
    waiting: dict[int, list[Op]] = {stage: [op for op in row if op.kind is Kind.W and op.stage == stage] for stage in stages}
    ran: set[Op] = set()
    ordered = []
    for op in row:
        if op.kind is Kind.W:
            ready = (stage for stage in stages if waiting[stage] and waiting[stage][0]._replace(kind=Kind.B) in ran)
            op = waiting[next(ready)].pop(0)
        ran.add(op)
        ordered.append(op)
    return ordered
