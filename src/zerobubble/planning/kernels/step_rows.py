"""Rows whose passes may share a step, and their compiled simulator.

A step is one pass, or neighbors of a row that run as one: B with its own W (a BW, see `Costs.fused`), or F of one microbatch with B or BW
of another (an overlapped pair, see `Costs.hidden`). `play` handles one pass at a time; here each position has a flag whether the next one
shares its step. All passes of a step wait for the inputs of each, and their outputs leave when the step ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.tables import PLANNED, Ints, codes_of
from zerobubble.planning.problem.problem import Objective, Problem

FORWARD, BACKWARD, WEIGHT = range(len(PLANNED))
"""The kinds of codes: `k * stages + s` is a pass of `PLANNED[k]` on stage s, as in `tables`."""


SMALL = 1000
"""Passes of a small problem."""

SHORT_REACH, REACH = 12, 40
"""The most steps that a move crosses, in small problems and in others."""


class StepTables(NamedTuple):
    """A problem with equal microbatches as arrays, by stage unless stated otherwise, in ns and bytes."""

    microbatches: int
    stages: int
    from_start: bool
    """Whether the time before a rank's first pass counts (makespan) or not (span)."""
    fuses: bool
    """Whether some BW takes less time than its B and W separately."""
    pairs: bool
    """Whether some overlapped pair takes less time than its two passes one after the other."""
    reach: int
    """The most steps that a move crosses."""
    rank: Ints
    maker: Ints
    """For each code, the code whose message a pass waits for, -1 for none."""
    lag: Ints
    """For each code, the time of that message, 0 within a rank."""
    reader: Ints
    """For each code, the rank that waits for the message of a pass, -1 for none."""
    time: Ints
    """By code."""
    fused: Ints
    """The time of BW."""
    hidden: Ints
    joins: Ints
    """1 if a BW can be better than B followed by W: it takes less time, hides more of an F, or needs less memory."""
    saved: Ints
    pending: Ints
    first: Ints
    """The start of each rank's row, then the end of all rows."""
    limit: Ints
    """By rank."""


class StepRows(NamedTuple):
    """The rows of a schedule, by position in the concatenation of all rows, with the times of their steps."""

    code: Ints
    microbatch: Ints
    glued: Ints
    """1 if the pass shares its step with the next pass, else 0."""
    where: Ints
    """The position of code c for microbatch j, at `c * microbatches + j`."""
    begin: Ints
    end: Ints
    """Start and end of the step of each pass, in ns."""


class StepPlay(NamedTuple):
    """The progress of a play, by rank: the position of the next step, the pass that it waits for or -1, and scratch space for a stack."""

    head: Ints
    blocked: Ints
    stack: Ints


def step_tables(problem: Problem) -> StepTables:
    """Returns the arrays of `problem`, which has equal microbatches."""
    costs, home = problem.costs, problem.placement.routes[0]
    stages, m = len(home), problem.num_microbatches
    fused = [costs.time(Kind.BW, stage) for stage in range(stages)]
    codes = codes_of(problem)
    readers = np.where(codes["user"] >= 0, codes["rank"][codes["user"]], -1)
    hidden = costs.hidden or (0,) * stages
    most = [max(time for time, rank in zip(hidden, home, strict=True) if rank == own) for own in home]
    joins = [
        fused[s] < costs.backward[s] + costs.weight[s] or most[s] > costs.backward[s] or costs.held_after_b[s] > costs.held_after_f[s]
        for s in range(stages)
    ]
    counts = [len(PLANNED) * m * home.count(rank) for rank in range(problem.placement.num_ranks)]
    return StepTables(
        m,
        stages,
        problem.objective is Objective.MAKESPAN,
        any(whole < b + w for whole, b, w in zip(fused, costs.backward, costs.weight, strict=True)),
        any(costs.hidden),
        REACH if problem.num_passes > SMALL else SHORT_REACH,
        *map(_ints, (home, codes["maker"], np.maximum(codes["lag"], 0), readers)),
        *map(_ints, ([costs.time(kind, s) for kind in PLANNED for s in range(stages)], fused, costs.hidden, joins)),
        *map(_ints, (costs.held_after_f, costs.held_after_b, np.cumsum([0, *counts]), problem.limits.memory)),
    )


def step_rows(tables: StepTables, schedule: Schedule) -> StepRows:
    """Returns the rows of `schedule`, not played yet. A pair that is not F with B or BW of another microbatch is split."""
    code, microbatch, glued = [], [], []
    first = {kind: k * tables.stages for k, kind in enumerate(PLANNED)}
    for row in schedule.rows:
        for op, follower in zip(row, (*row[1:], None), strict=True):
            parts = (Kind.B, Kind.W) if op.kind is Kind.BW else (op.kind,)
            code += [first[kind] + op.stage for kind in parts]
            microbatch += [op.microbatch] * len(parts)
            pair = follower is not None and (op, follower) in schedule.overlaps and can_overlap(op, follower)
            glued += [1] * (len(parts) - 1) + [int(pair)]
    where, nothing = np.zeros(len(code), np.int64), np.zeros(len(code), np.int64)
    numbers, places = _ints(microbatch), _ints(code)
    where[places * tables.microbatches + numbers] = np.arange(len(code))
    return StepRows(places, numbers, _ints(glued), where, nothing, nothing.copy())


def can_overlap(one: Op, other: Op) -> bool:
    """Whether these two passes may share a step, in this order."""
    return one.kind is Kind.F and other.kind in (Kind.B, Kind.BW) and one.microbatch != other.microbatch


def schedule_of_steps(name: str, problem: Problem, tables: StepTables, rows: StepRows) -> Schedule:
    """The schedule whose rows are `rows`."""
    ops = [Op(PLANNED[code // tables.stages], code % tables.stages, j) for code, j in zip(*(c.tolist() for c in rows[:2]), strict=True)]
    made, overlaps = [], set()
    for start, stop in zip(tables.first[:-1].tolist(), tables.first[1:].tolist(), strict=True):
        row: list[Op] = []
        for at in range(start, stop):
            shares = at > start and bool(rows.glued[at - 1])
            if shares and ops[at].kind is Kind.W:
                row[-1] = row[-1]._replace(kind=Kind.BW)
            else:
                row.append(ops[at])
            if shares and ops[at].kind is Kind.B:
                whole = bool(rows.glued[at])
                overlaps.add((row[-2], row[-1]._replace(kind=Kind.BW) if whole else row[-1]))
        made.append(tuple(row))
    return Schedule(name, problem.placement, problem.num_microbatches, tuple(made), overlaps=frozenset(overlaps))


def new_play(tables: StepTables) -> StepPlay:
    """Returns scratch space for plays."""
    head = tables.first[:-1].copy()
    return StepPlay(head, np.zeros_like(head), np.zeros_like(head))


@inlined
def step_stop(rows: StepRows, start: int) -> int:
    """Returns the end of the step that begins at a position."""
    at = start
    while rows.glued[at]:
        at += 1
    return at + 1


@inlined
def step_time(tables: StepTables, rows: StepRows, start: int, stop: int) -> int:
    """The ns of a step."""
    total, longest, parts, at = 0, 0, 0, start
    while at < stop:
        code = rows.code[at]
        time = tables.time[code]
        if code // tables.stages == BACKWARD and at + 1 < stop:
            time = tables.fused[code - tables.stages]
            at += 1
        total += time
        longest = max(longest, time)
        parts += 1
        at += 1
    return max(longest, total - tables.hidden[rows.code[start] % tables.stages]) if parts > 1 else total


@inlined
def maker_of(tables: StepTables, rows: StepRows, at: int) -> tuple[int, int]:
    """Returns the position of the pass whose message the one at a position waits for, -1 for none, and the ns of the message."""
    maker = tables.maker[rows.code[at]]
    return (rows.where[maker * tables.microbatches + rows.microbatch[at]] if maker >= 0 else -1), tables.lag[rows.code[at]]


@compiled
def fits(tables: StepTables, rows: StepRows, rank: int) -> bool:
    """Whether a rank stays within its limit, as `peak_memory` counts, in the order of its row, with BW as one pass."""
    held, stages = 0, tables.stages
    for at in range(tables.first[rank], tables.first[rank + 1]):
        kind, stage = rows.code[at] // stages, rows.code[at] % stages
        if kind == FORWARD:
            held += tables.saved[stage]
        elif kind == BACKWARD:
            held -= tables.saved[stage]
            if not rows.glued[at]:
                held += tables.pending[stage]
        elif at == tables.first[rank] or not rows.glued[at - 1]:
            held -= tables.pending[stage]
        if held > tables.limit[rank]:
            return False
    return True


@compiled
def play_steps(tables: StepTables, rows: StepRows, play: StepPlay, share: float, cutoff: float) -> tuple[int, float]:
    """Plays every row from the head of its rank, with earlier steps already played, and moves the heads.

    Returns the time of the longest rank in ns and the cost: that time plus `share` times the sum over ranks. Returns (-1, inf) if the rows
    stop, or if the cost exceeds `cutoff`.
    """
    ranks, head, blocked, stack = len(tables.limit), play.head, play.blocked, play.stack
    for r in range(ranks):
        blocked[r] = -1
        stack[ranks - 1 - r] = r
    depth = ranks
    while depth > 0:
        depth -= 1
        r = stack[depth]
        first, last = tables.first[r], tables.first[r + 1]
        at = head[r]
        free = rows.end[at - 1] if at > first else 0
        while at < last:
            head[r] = at
            stop, start = step_stop(rows, at), free
            for k in range(at, stop):
                need, lag = maker_of(tables, rows, k)
                if need >= 0:
                    if need >= head[tables.rank[rows.code[need] % tables.stages]]:
                        blocked[r] = need
                        break
                    start = max(start, rows.end[need] + lag)
            if blocked[r] >= 0:
                break
            free = start + step_time(tables, rows, at, stop)
            for k in range(at, stop):
                rows.begin[k] = start
                rows.end[k] = free
                reader = tables.reader[rows.code[k]]
                if reader >= 0 and blocked[reader] == k:
                    blocked[reader] = -1
                    stack[depth] = reader
                    depth += 1
            at = stop
            head[r] = at
        if at == last and free - (0 if tables.from_start else rows.begin[first]) > cutoff:
            return -1, np.inf
    longest, total = 0, 0
    for r in range(ranks):
        if head[r] < tables.first[r + 1]:
            return -1, np.inf
        time = time_of_row(tables, rows, r)
        longest = max(longest, time)
        total += time
    cost = longest + share * total
    return (longest, cost) if cost <= cutoff else (-1, np.inf)


@inlined
def time_of_row(tables: StepTables, rows: StepRows, rank: int) -> int:
    """Returns the time of a rank in the objective, in ns."""
    begin = 0 if tables.from_start else rows.begin[tables.first[rank]]
    return rows.end[tables.first[rank + 1] - 1] - begin


def _ints(values: Any) -> Ints:
    return np.array(values, np.int64)
