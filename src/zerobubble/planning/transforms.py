"""Transformations of schedules that keep the order of their passes: splitting and fusing backward passes, and inserting R."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from zerobubble.costs import Costs, Limits
from zerobubble.ir import Op, Schedule
from zerobubble.kinds import Kind, ValueKind, kinds_making
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.recomputation import costs_with_recompute_in_backward
from zerobubble.rules import recomputed
from zerobubble.simulation import held_bytes, memory_faults


def with_recompute_passes(schedule: Schedule, problem: Problem) -> Schedule:
    """Inserts an R before each backward of recomputing stages, unless `schedule` has R's already. It must not have overlapped steps."""
    recomputing = {stage for stage in range(problem.placement.num_stages) if problem.recomputes(stage)}
    if not recomputing or any(map(recomputed, schedule.rows)):
        return schedule

    def parts(op: Op) -> tuple[Op, ...]:
        return (op._replace(kind=Kind.R), op) if op.kind in kinds_making(ValueKind.GRADIENT) and op.stage in recomputing else (op,)

    return replace(schedule, rows=tuple(tuple(part for op in row for part in parts(op)) for row in schedule.rows))


def with_recompute_in_backward(problem: Problem) -> Problem:
    """Returns the problem with R as a part of B and only the inputs held after F, for algorithms that do not support R."""
    if problem.recomputation is None:
        return problem
    costs = costs_with_recompute_in_backward(problem.costs)
    return replace(problem, costs=costs, workload=None, recomputation=None, cut=None)


def with_memory_for_recompute(problem: Problem) -> Problem:
    """Returns `with_recompute_in_backward` with lower limits, so that every rank can hold one recomputed forward in addition."""
    reduced = with_recompute_in_backward(problem)
    more = [0] * problem.placement.num_ranks
    for stage, rank in enumerate(problem.placement.routes[0]):
        more[rank] = max(more[rank], problem.costs.held_after_f[stage] - reduced.costs.held_after_f[stage])
    return replace(reduced, limits=Limits(tuple(max(1, limit - size) for limit, size in zip(problem.limits.memory, more, strict=True))))


def with_row(schedule: Schedule, rank: int, row: Iterable[Op]) -> Schedule:
    """Returns the schedule with another row of a rank."""
    rows = [*schedule.rows]
    rows[rank] = tuple(row)
    return replace(schedule, rows=tuple(rows))


def fits_memory(schedule: Schedule, problem: Problem) -> bool:
    """Returns whether no rank exceeds its limit."""
    return not memory_faults(schedule, problem.costs, problem.limits)


def split(schedule: Schedule) -> Schedule:
    """Splits each BW into B and W, in the same order: gradients are sent earlier, and no pass is delayed."""
    rows = tuple(tuple(part for op in row for part in _parts(op)) for row in schedule.rows)
    return replace(schedule, rows=rows, overlaps=frozenset())


def split_in_memory(schedule: Schedule, problem: Problem) -> Schedule:
    """As `split`, but a BW stays fused if its rank cannot hold what B keeps for W."""
    costs, everywhere = problem.costs, split(schedule)
    if all(after_b <= after_f for after_b, after_f in zip(costs.held_after_b, costs.held_after_f, strict=True)):
        return everywhere
    rows = (_row_in_memory(row, costs, limit) for row, limit in zip(schedule.rows, problem.limits.memory, strict=True))
    return replace(everywhere, rows=tuple(rows))


def _row_in_memory(row: Sequence[Op], costs: Costs, limit: int) -> tuple[Op, ...]:
    passes: list[Op] = []
    for op, held in zip(row, held_bytes(row, costs), strict=True):
        pending = -costs.memory_change(Kind.W, op.stage, microbatch=op.microbatch)
        passes += _parts(op) if held + pending <= limit else [op]
    return tuple(passes)


def fused_for_memory(schedule: Schedule, problem: Problem) -> Schedule:
    """Fuses, as the reverse of `split_in_memory`, a B and the W right after it if the rank cannot hold what B keeps for W."""
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


def fused_variants(schedule: Schedule, problem: Problem) -> Iterator[Schedule]:
    """Yields `schedule` with B and W split, with all fused, and with adjacent ones fused; only those that fit, without duplicates."""
    divided = split(schedule)
    every = [{op for op in row if op.kind is Kind.B} for row in divided.rows]
    adjacent = [{op for op, other in pairwise(row) if op.kind is Kind.B and other == op._replace(kind=Kind.W)} for row in divided.rows]
    known = []
    for name, fused in (
        ("B and W split", [set()] * len(every)),
        ("B and W fused", every),
        ("some B and W fused", adjacent),
    ):
        rows = tuple(tuple(_joined(*pair)) for pair in zip(divided.rows, fused, strict=True))
        made = replace(divided, name=name, rows=rows)
        if rows not in known and fits_memory(made, problem):
            known.append(rows)
            yield made


def _joined(row: Iterable[Op], fused: set[Op]) -> Iterator[Op]:
    """Yields the row with each B of `fused` fused with its W."""
    for op in row:
        if op in fused:
            yield op._replace(kind=Kind.BW)
        elif not (op.kind is Kind.W and op._replace(kind=Kind.B) in fused):
            yield op


def _parts(op: Op) -> tuple[Op, ...]:
    kind, stage, microbatch = op
    return (Op(Kind.B, stage, microbatch), Op(Kind.W, stage, microbatch)) if kind is Kind.BW else (op,)
