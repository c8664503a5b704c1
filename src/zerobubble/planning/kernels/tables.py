"""A problem as arrays: times, memory and dependencies of every kind of pass, and schedules as sequences of codes for these kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerobubble.costs import Costs
from zerobubble.errors import InputError
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.kinds import HELD, SENT_BETWEEN_STAGES, makes_if_recomputed, traits_of
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.transforms import fused_for_memory
from zerobubble.rules import used_stages
from zerobubble.schedules.orders import slices_in_reverse

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PLANNED = (Kind.F, Kind.B, Kind.W)
"""The kinds of a plan. A BW is never better than separate B and W if it takes no less time and memory suffices for the bytes that B leaves
to W. Otherwise see `Steps`.
"""

_MAKER = {value_kind: kind for kind in PLANNED for value_kind in traits_of(kind).makes}


CODE = np.dtype([(n, "i8") for n in ("rank", "time", "held", "ahead", "over", "maker", "lag", "user", "predecessor", "successor", "grows")])
"""The properties of a code (the number of a kind of pass on a stage, see `Tables`), in ns and bytes; -1 means no code.

`held` is the change in memory of a rank by a pass. A B whose forward is recomputed has its R right before it: `ahead` is the ns of that R,
which does not wait for the message of B, and `over` the bytes that the rank holds after R beyond those after B. `maker` is the code whose
message a pass waits for, `lag` the time of that message, and `user` the code that waits for the message of this one. `predecessor` is the
code of the same stage that must run before it, and `successor` the next one. `grows` is the number of bytes that a B leaves to W beyond
those that F saved: see `Tables.joins`.
"""

RANK = np.dtype([(name, "i8") for name in ("first", "stop", "limit", "work", "forward", "forward_stop")])
"""The properties of a rank: start and end of its row among all rows, its limit in bytes, its work in ns, its part of `forwards`."""

Records = NDArray[np.void]


class Steps(NamedTuple):
    """What passes that share a step take: B with its own W (a BW, see `Costs.fused`), or F of one microbatch with B or BW of another (an
    overlapped pair, see `Costs.hidden`). By stage unless stated otherwise, in ns.
    """

    fuses: bool
    """Whether some BW takes less time than its B and W separately."""
    pairs: bool
    """Whether some overlapped pair takes less time than its two passes one after the other."""
    fused: Ints
    """The time of BW."""
    hidden: Ints
    """The time that a pair with F of a stage saves."""
    joins: Ints
    """1 if a BW can be better than B followed by W: it takes less time, hides more of an F, or needs less memory."""
    least: Ints
    """For each code, the least that a pass adds to the work of its rank."""


class Choice(NamedTuple):
    """The allowed levels of recomputation, and the level of each stage. `Tables.absent` has the R's that are left out."""

    time: Ints
    """The ns of R of stage s at level l, at `l * stages + s`."""
    kept: Ints
    """The bytes that a recomputed forward keeps, at the same indices."""
    saved: Ints
    """The bytes that a forward of each stage saves."""
    level: Ints
    """The level of each stage."""
    is_optional: bool
    """Whether forwards may skip recomputation."""


class Tables(NamedTuple):
    """A problem as arrays over codes. Code `k * stages + s` is a pass of `PLANNED[k]` on stage s.

    A row is a sequence of codes. The j-th occurrence of a code is for the microbatch in place j, an index of `time` and others. With
    slices, that of a B or W is for another slice: see `play.place_of`. Places are in the order of the numbers; unequal microbatches may
    change places, see `joint_search`.
    """

    microbatches: int
    slices: int
    """Slices of each microbatch, which `microbatches` counts: B and W of a microbatch run its slices in reverse order."""
    from_start: bool
    """Whether the time before a rank's first pass counts (makespan) or not (span)."""
    joins: bool
    """Whether a B with `grows` > 0 that exceeds the memory limit is joined with its W, if that comes next in the row: see `play.joined`."""
    codes: Records
    """A `CODE` per code."""
    ranks: Records
    """A `RANK` per rank."""
    forwards: Ints
    """For each rank in turn, the F codes of its stages, in the order of a microbatch."""
    chain: Ints
    """The codes of F and B of one microbatch in the order in which it runs, F of stage 0 to B of stage 0; W is not among them."""
    time: Ints
    """The ns of a pass: of code c for the microbatch in place j at `c * microbatches + j`."""
    held: Ints
    """The change in memory of the rank by a pass, at the same indices."""
    ahead: Ints
    """The ns of the R right before a pass, 0 if there is none, at the same indices."""
    over: Ints
    """The extra bytes that the rank holds during a pass, compared with after it, at the same indices."""
    absent: Ints
    """1 for a pass that is left out, else 0, at the same indices. Such a pass has no effect and may change places with any other."""
    steps: Any = ()
    """`Steps` if passes may share steps, else empty: kernels are compiled with steps or without them."""
    choice: Any = ()
    """The `Choice` if moves may change what is recomputed, else empty. R is then a pass of its own, with codes after those of W."""

    @property
    def size(self) -> int:
        """The number of passes."""
        return self.microbatches * len(self.codes)


def tables_of(problem: Problem, *, joins: bool = False, steps: bool = False) -> Tables:
    """Returns the arrays of `problem`. With `joins`, schedules may have joined B and W if memory requires it, and with `steps` steps of
    several passes, for equal microbatches.
    """
    ranks_of_stages = problem.placement.routes[0]
    codes = codes_of(problem)
    chain = _chain(codes)
    time, held, ahead, over = _of_passes(problem, codes)
    begins = [code for code in chain if codes["predecessor"][code] < 0]
    shared = _steps(problem, codes) if steps else ()
    least = np.repeat(shared.least, problem.num_microbatches) if shared else time + ahead
    return Tables(
        problem.num_microbatches,
        problem.slices,
        problem.objective is Objective.MAKESPAN,
        joins and bool(codes["grows"].any()),
        codes,
        _ranks(problem, codes, least),
        _ints(sorted(begins, key=lambda code: ranks_of_stages[code % len(ranks_of_stages)])),
        _ints(chain),
        time,
        held,
        ahead,
        over,
        np.zeros_like(over),
        shared,
    )


def _steps(problem: Problem, codes: Records) -> Steps:
    costs, home = problem.costs, problem.placement.routes[0]
    stages = range(len(home))
    whole, apart = ([sum(costs.time(kind, s) for kind in kinds) for s in stages] for kinds in ((Kind.BW,), (Kind.B, Kind.W)))
    hidden = costs.hidden or (0,) * len(home)
    most = [max(time for time, rank in zip(hidden, home, strict=True) if rank == own) for own in home]
    joins = [whole[s] < apart[s] or most[s] > costs.backward[s] or costs.held_after_b[s] > costs.held_after_f[s] for s in stages]
    saved = [*hidden, *(0 for _ in stages), *(max(0, apart[s] - whole[s]) for s in stages)]
    fuses, pairs = any(whole[s] < apart[s] for s in stages), any(hidden)
    return Steps(fuses, pairs, _ints(whole), _ints(hidden), _ints(joins), codes["time"] - _ints(saved))


def _of_passes(problem: Problem, codes: Records) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns the columns of `Tables` for all passes, `time`, `held`, `ahead` and `over`: code after code, microbatches in the order of
    their numbers.
    """
    costs, m = problem.costs, problem.num_microbatches
    if costs.slices:
        return _of_slices(problem)
    if not costs.shares:
        time, held, ahead, over = (np.repeat(codes[name], m) for name in ("time", "held", "ahead", "over"))
        return time, held, ahead, over
    shares, nothing = np.array(costs.shares), np.zeros(m, np.int64)

    def sized(names: Iterable[str], stage: int) -> Ints:
        return sum([np.rint(costs.column(name)[stage] * shares).astype(np.int64) for name in names], start=nothing)

    def change(kind: Kind, stage: int, recompute_kind: Kind | None) -> Ints:
        used = (HELD[value_kind] for value_kind, hop in traits_of(kind).uses if hop == 0 and value_kind in HELD)
        made = (HELD[value_kind] for value_kind in makes_if_recomputed(kind, recompute_kind) if value_kind in HELD)
        return sized(made, stage) - sized(used, stage)

    columns = []
    for kind in PLANNED:
        for stage in range(problem.placement.num_stages):
            recompute_kind = Kind.R if problem.recomputes(stage) else None
            held, ahead, over = change(kind, stage, recompute_kind), nothing, nothing
            if recompute_kind is not None and kind is Kind.B:
                more = change(recompute_kind, stage, None)
                held, ahead = held + more, sized(traits_of(recompute_kind).times, stage)
                over = np.maximum(0, more - held)
            columns.append((sized(traits_of(kind).times, stage), held, ahead, over))
    time, held, ahead, over = map(np.concatenate, zip(*columns, strict=True))
    return time, held, ahead, over


def _of_slices(problem: Problem) -> tuple[Ints, Ints, Ints, Ints]:
    """As `_of_passes`, for slices, whose keys and values stay until the backward of the first slice has run."""
    costs, repeats = problem.costs, problem.whole_microbatches
    codes = [(kind, stage) for kind in PLANNED for stage in range(problem.placement.num_stages)]
    time = np.concatenate([np.tile(_ints(costs.times(*code)), repeats) for code in codes])
    held = np.concatenate([np.tile(_ints(costs.memory_changes(*code)), repeats) for code in codes])
    return time, held, np.zeros_like(time), np.zeros_like(time)


def _change(problem: Problem, costs: Costs, kind: Kind, stage: int) -> int:
    """Returns the change in memory of a rank by a pass; that of B includes its R."""
    if not problem.recomputes(stage):
        return costs.memory_change(kind, stage)
    recompute_bytes = costs.memory_change(Kind.R, stage) if kind is Kind.B else 0
    return recompute_bytes + costs.memory_change(kind, stage, Kind.R)


def codes_of(problem: Problem) -> Records:
    """Returns a `CODE` for each kind and stage, with the mean time and bytes of microbatches of unequal cost."""
    ranks_of_stages, costs = problem.placement.routes[0], problem.costs
    costs = costs.scaled(fmean(costs.shares)) if costs.shares else costs.mean_slice
    stages = len(ranks_of_stages)
    kinds = [(kind, stage) for kind in PLANNED for stage in range(stages)]
    codes = np.full(len(kinds), -1, CODE)
    for code, (kind, stage) in enumerate(kinds):
        one = codes[code]
        one["rank"] = ranks_of_stages[stage]
        one["time"] = costs.time(kind, stage)
        one["held"] = _change(problem, costs, kind, stage)
        one["ahead"], one["over"] = 0, 0
        one["grows"] = max(0, costs.memory_change(kind, stage)) if kind is Kind.B else 0
        if kind is Kind.B and problem.recomputes(stage):
            one["ahead"] = costs.time(Kind.R, stage)
            one["over"] = max(0, costs.memory_change(Kind.R, stage) - one["held"])
        for value_kind, at in used_stages(kind, stage, stages):
            before = PLANNED.index(_MAKER[value_kind]) * stages + at
            if value_kind in SENT_BETWEEN_STAGES:
                is_local = ranks_of_stages[at] == ranks_of_stages[stage]
                one["maker"] = before
                one["lag"] = 0 if is_local else costs.comm[min(at, stage)]
                codes[before]["user"] = code
            else:
                one["predecessor"] = before
                codes[before]["successor"] = code
    return codes


def _ranks(problem: Problem, codes: Records, time: Ints) -> Records:
    """Returns a `RANK` for each rank."""
    m = problem.num_microbatches
    of_codes = time.reshape(len(codes), m).sum(axis=1)
    ranks, row, forward = [], 0, 0
    for rank, limit in enumerate(problem.limits.memory):
        times = of_codes[codes["rank"] == rank]
        row_end = row + m * len(times)
        forward_end = forward + problem.placement.routes[0].count(rank)
        ranks.append((row, row_end, limit, int(times.sum()), forward, forward_end))
        row, forward = row_end, forward_end
    return np.array(ranks, RANK)


def _chain(codes: Records) -> list[int]:
    """Returns the codes of F and B of one microbatch: follows its messages from the F without inputs, and turns to B after the last F."""
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
    """Returns the rows of `schedule` one after another as codes. A BW becomes B and W, and an R is part of its B.

    Raises `InputError` for a schedule that does not train every microbatch on every stage, or has passes of other kinds.
    """
    stages = schedule.num_stages
    first = {kind: k * stages for k, kind in enumerate(PLANNED)}
    pieces = {kind: (first[kind],) for kind in PLANNED} | {Kind.BW: (first[Kind.B], first[Kind.W]), Kind.R: ()}
    foreign = {kind for row in schedule.rows for kind, _, _ in row} - pieces.keys()
    if foreign:
        wrong = ", ".join(sorted(foreign))
        raise InputError(
            "plans are made of {pieces}, but the schedule {name!r} has {wrong} passes",
            pieces=", ".join(pieces),
            name=schedule.name,
            wrong=wrong,
        )
    order = _ints([start + stage for row in schedule.rows for kind, stage, _ in row for start in pieces[kind]])
    if (np.bincount(order, minlength=len(PLANNED) * stages) != schedule.num_microbatches).any():
        raise InputError("the schedule {name!r} lacks passes: see schedule_faults", name=schedule.name)
    return order


def schedule_of_order(name: str, problem: Problem, tables: Tables, order: Ints, assignment: Sequence[int] = ()) -> Schedule:
    """Returns the schedule with the rows `order`, with each R right before its B.

    `assignment[j]` is the microbatch in place j (see `Tables`), by default microbatch j. If `tables` join passes that do not fit
    separately, the schedule has a BW there.
    """
    number, backwards = assignment or range(tables.microbatches), slices_in_reverse(tables.microbatches // tables.slices, tables.slices)
    stages, count = problem.placement.num_stages, [0] * len(tables.codes)
    rows, codes = [], order.tolist()
    for start, end in tables.ranks[["first", "stop"]].tolist():
        row = []
        for code in codes[start:end]:
            place = count[code] if code < stages else backwards[count[code]]
            op = Op(PLANNED[code // stages], code % stages, number[place])
            recomputes = op.kind is Kind.B and problem.recomputes(op.stage)
            row += [op._replace(kind=Kind.R), op] if recomputes else [op]
            count[code] += 1
        rows.append(tuple(row))
    schedule = Schedule(name, problem.placement, problem.num_microbatches, tuple(rows), slices=problem.slices)
    return fused_for_memory(schedule, problem) if tables.joins else schedule
