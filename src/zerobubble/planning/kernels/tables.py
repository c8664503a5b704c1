"""A problem as arrays: what every kind of pass takes, holds and waits for, and schedules as sequences of codes for those kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerobubble.errors import InputError
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.kinds import MOVES, traits_of
from zerobubble.planning.problem import Objective, Problem
from zerobubble.rules import used_stages

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PLANNED = (Kind.F, Kind.B, Kind.W)
"""The kinds a plan is made of: a backward in one piece is never better than B and W side by side."""

_MAKER = {stuff: kind for kind in PLANNED for stuff in traits_of(kind).makes}


CODE = np.dtype([(name, "i8") for name in ("rank", "time", "held", "maker", "lag", "user", "predecessor", "successor")])
"""What is known of a code, in ns and bytes; -1 stands for no code.

`held` is by how many bytes a pass changes what its rank holds. `maker` is the code whose message it waits for, which takes `lag` ns, and
`user` the code that waits for its own message. `predecessor` is the code of the same stage that must have run before it, and
`successor` the one that comes next on the same stage.
"""

RANK = np.dtype([(name, "i8") for name in ("first", "stop", "limit", "work", "forward", "forward_stop")])
"""What is known of a rank: where its row starts and ends among all rows, its limit in bytes, the ns it is busy, its part of `forwards`."""

Records = NDArray[np.void]


class Tables(NamedTuple):
    """A problem as arrays over codes, where code `k * stages + s` stands for the passes of `PLANNED[k]` and stage s.

    Microbatches are alike, so a row is a sequence of codes, and the j-th time a code stands in it is microbatch j.
    """

    microbatches: int
    from_start: bool
    """Whether the time before a rank's first pass counts (makespan) or not (span)."""
    codes: Records
    """A `CODE` per code."""
    ranks: Records
    """A `RANK` per rank."""
    forwards: Ints
    """Rank after rank, the codes that begin its stages, in the order a microbatch comes by."""
    chain: Ints
    """The codes one microbatch passes from the first message to the last."""

    @property
    def size(self) -> int:
        """The number of passes."""
        return self.microbatches * len(self.codes)


def tables_of(problem: Problem) -> Tables:
    """The arrays of `problem`."""
    ranks_of_stages = problem.placement.routes[0]
    codes = _codes(problem)
    chain = _chain(codes)
    begins = [code for code in chain if codes["predecessor"][code] < 0]
    return Tables(
        problem.num_microbatches,
        problem.objective is Objective.MAKESPAN,
        codes,
        _ranks(problem, codes),
        _ints(sorted(begins, key=lambda code: ranks_of_stages[code % len(ranks_of_stages)])),
        _ints(chain),
    )


def _codes(problem: Problem) -> Records:
    """A `CODE` for each kind and stage."""
    ranks_of_stages, costs = problem.placement.routes[0], problem.costs
    stages = len(ranks_of_stages)
    kinds = [(kind, stage) for kind in PLANNED for stage in range(stages)]
    codes = np.full(len(kinds), -1, CODE)
    for code, (kind, stage) in enumerate(kinds):
        one = codes[code]
        one["rank"] = ranks_of_stages[stage]
        one["time"] = costs.time(kind, stage)
        one["held"] = costs.memory_change(kind, stage)
        for stuff, at in used_stages(kind, stage, stages):
            before = PLANNED.index(_MAKER[stuff]) * stages + at
            if stuff in MOVES:
                is_local = ranks_of_stages[at] == ranks_of_stages[stage]
                one["maker"] = before
                one["lag"] = 0 if is_local else costs.comm[min(at, stage)]
                codes[before]["user"] = code
            else:
                one["predecessor"] = before
                codes[before]["successor"] = code
    return codes


def _ranks(problem: Problem, codes: Records) -> Records:
    """A `RANK` for each rank."""
    m = problem.num_microbatches
    ranks, row, forward = [], 0, 0
    for rank, limit in enumerate(problem.limits.memory):
        times = codes["time"][codes["rank"] == rank]
        row_end = row + m * len(times)
        forward_end = forward + problem.placement.routes[0].count(rank)
        ranks.append((row, row_end, limit, m * int(times.sum()), forward, forward_end))
        row, forward = row_end, forward_end
    return np.array(ranks, RANK)


def _chain(codes: Records) -> list[int]:
    """Follow the messages of one microbatch from the code that needs nothing, and turn where the last reader's result stays."""
    maker, predecessor = codes["maker"].tolist(), codes["predecessor"].tolist()
    user, successor = codes["user"].tolist(), codes["successor"].tolist()
    code = next(code for code in range(len(maker)) if maker[code] < 0 and predecessor[code] < 0)
    chain = []
    while user[code] >= 0 or successor[code] >= 0:
        chain.append(code)
        code = user[code] if user[code] >= 0 else successor[code]
    return chain


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)


def order_of(schedule: Schedule) -> Ints:
    """The rows of `schedule` one after another as codes; a backward in one piece becomes B and W.

    Raises `InputError` for a schedule that does not train every microbatch on every stage, or has passes of other kinds.
    """
    stages = schedule.num_stages
    first = {kind: k * stages for k, kind in enumerate(PLANNED)}
    pieces = {kind: (first[kind],) for kind in PLANNED} | {Kind.BW: (first[Kind.B], first[Kind.W])}
    foreign = {kind for row in schedule.rows for kind, _, _ in row} - pieces.keys()
    if foreign:
        wrong = ", ".join(sorted(foreign))
        raise InputError(f"plans are made of {', '.join(pieces)}, but the schedule {schedule.name!r} has {wrong} passes")
    order = _ints([start + stage for row in schedule.rows for kind, stage, _ in row for start in pieces[kind]])
    if (np.bincount(order, minlength=len(PLANNED) * stages) != schedule.num_microbatches).any():
        raise InputError(f"the schedule {schedule.name!r} lacks passes: see schedule_faults")
    return order


def schedule_of_order(name: str, problem: Problem, tables: Tables, order: Ints) -> Schedule:
    """The schedule whose rows are `order`."""
    stages, count = problem.placement.num_stages, [0] * len(tables.codes)
    rows, letters = [], order.tolist()
    for start, end in tables.ranks[["first", "stop"]].tolist():
        row = []
        for code in letters[start:end]:
            row.append(Op(PLANNED[code // stages], code % stages, count[code]))
            count[code] += 1
        rows.append(tuple(row))
    return Schedule(name, problem.placement, problem.num_microbatches, tuple(rows))
