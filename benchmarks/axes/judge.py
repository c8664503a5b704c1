"""A second simulator, from the rules alone: a plan with all its axes, simulated pass by pass and byte by byte.

It shares only values with the package. A pass starts as soon as its rank is free, its inputs have arrived, its weights are gathered, and
its activations are back from the host. Sums over replicas and overlapped steps are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from zerobubble import Costs, Kind, Op, Placement, Schedule
from zerobubble.planning import Plan

Column = dict[str, tuple[int, ...]]
TIMES = {
    "F": ("forward",),
    "B": ("backward",),
    "W": ("weight",),
    "BW": ("backward", "weight"),
    "R": ("recompute",),
    "S": ("head_forward", "head_backward"),
    "T": ("head_weight",),
    "SL": ("head_forward",),
    "TX": ("head_backward", "head_weight"),
}
"""The columns of costs that each kind of pass takes."""


class Judged(NamedTuple):
    """The longest span of a rank and the makespan in ns, and the most bytes of activations on each device."""

    span: int
    makespan: int
    peaks: tuple[int, ...]


class _Work(NamedTuple):
    """Something next to the passes of a rank: it may begin before step `begins`, and step `needed` waits for it.

    They run in the order of `begins`, and those with the same `begins` in the order of `needed`.
    """

    begins: int
    needed: int
    takes: int


def judged(found: Plan, gathers: Sequence[Any] = ()) -> Judged:
    """The figures of a plan, with its offloads and the gathers of each rank, where some are given."""
    costs, schedule, host = found.costs, found.schedule, found.problem.host
    columns = _columns(costs)
    copies: list[list[_Work]] = [[] for _ in schedule.rows]
    for rank, plan in enumerate(found.offloads):
        assert host is not None
        for one in plan.offloads:
            size = _sized(columns, "held_after_f", one.stage, one.microbatch, costs)
            away, back = (host.latency + round(size * 10**9 / rate) for rate in (host.to_host, host.from_host))
            copies[rank] += [_Work(one.made + 1, one.freed, away), _Work(one.back, one.needed, back)]
    lanes = [[sorted(copies[rank]), []] for rank in range(schedule.num_ranks)]
    if gathers:
        assert found.problem.sharded is not None
        times = found.problem.sharded.times(found.placement)
        for lane, plan in zip(lanes, gathers, strict=True):
            lane[1] = [_Work(one.begins, one.needed, times[one.stage]) for one in plan.gathers]
    starts, ends = _played(schedule, costs, columns, lanes)
    firsts = [sum(times[one.stage] for one in plan.gathers if one.needed == 0) for plan in gathers] or [0] * schedule.num_ranks
    span = max(ends[row[-1]] - starts[row[0]] + first for row, first in zip(schedule.rows, firsts, strict=True))
    begin = 0 if gathers else min(starts[row[0]] for row in schedule.rows)
    return Judged(span, max(ends.values()) - begin, tuple(_peaks(found, columns)))


def _columns(costs: Costs) -> Column:
    names = ("forward", "backward", "weight", "comm", "held_after_f", "held_after_b")
    return {name: getattr(costs, name) for name in names} | dict(costs.further)


def _sized(columns: Column, name: str, stage: int, number: int, costs: Costs) -> int:
    """A value of a column for a microbatch or slice. The share of a fused BW is the mean of those of B and W, weighted by their time."""
    value, count = columns[name][stage], len(costs.slices) or 1
    share = costs.shares[number // count] if costs.shares else 1.0
    if costs.slices:
        tokens, forward, backward, weight = costs.slices[number % count]
        b, w = columns["backward"][stage], columns["weight"][stage]
        of_fused = (backward * b + weight * w) / (b + w) if b + w else tokens
        share *= {"forward": forward, "backward": backward, "weight": weight, "fused": of_fused}.get(name, tokens)
    return round(value * share) if costs.shares or costs.slices else value


def _played(
    schedule: Schedule, costs: Costs, columns: Column, lanes: Sequence[Sequence[Sequence[_Work]]]
) -> tuple[dict[Op, int], dict[Op, int]]:
    """When each pass begins and ends, by trying rank after rank until nothing moves."""
    present = {op for row in schedule.rows for op in row}
    starts: dict[Op, int] = {}
    ends: dict[Op, int] = {}
    heads, free, moved = [0] * schedule.num_ranks, [0] * schedule.num_ranks, True
    ready = [[0] * len(row) for row in schedule.rows]
    over = [[0, 0] for _ in schedule.rows]
    done = [[0, 0] for _ in schedule.rows]
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while heads[rank] < len(row):
                here = heads[rank]
                op = row[here]
                needs = [*_needs(op, schedule, columns, present, costs), *_other_slices(op, schedule, present)]
                if any(need not in ends for need, _ in needs):
                    break
                for which, works in enumerate(lanes[rank]):
                    while done[rank][which] < len(works) and works[done[rank][which]].begins <= here:
                        work = works[done[rank][which]]
                        may = ends[row[work.begins - 1]] if work.begins else 0
                        over[rank][which] = max(may, over[rank][which]) + work.takes
                        ready[rank][work.needed] = max(ready[rank][work.needed], over[rank][which])
                        done[rank][which] += 1
                starts[op] = max([free[rank], ready[rank][here], *(ends[need] + delay for need, delay in needs)])
                names = ("fused",) if op.kind == "BW" and "fused" in columns else TIMES[op.kind]
                takes = sum(_sized(columns, name, op.stage, op.microbatch, costs) for name in names)
                free[rank] = ends[op] = starts[op] + takes
                heads[rank] += 1
                moved = True
    assert len(ends) == len(present), "the schedule cannot run"
    return starts, ends


def _needs(op: Op, schedule: Schedule, columns: Column, present: set[Op], costs: Costs) -> Iterator[tuple[Op, int]]:
    """The passes that must be over before one, each with how long what it leaves is on its way."""
    kind, stage, j = op
    home, last = schedule.placement.routes[0], schedule.num_stages - 1
    parts = sorted({home.index(rank) for rank in home})

    def at(other: str, where: int) -> Op:
        return Op(Kind(other), where, j)

    def link(where: int) -> int:
        time = _sized(columns, "comm", where, j, replace(costs, shares=()))  # messages of unequal microbatches take equally long
        return time if home[where] != home[where + 1] else 0

    def way(where: int, to: int) -> int:
        return columns["collective"][where] if home[where] != home[to] else 0

    def heads(names: Iterable[str]) -> Iterator[tuple[Op, int]]:
        yield from ((at(name, part), way(part, stage)) for name in names for part in parts if at(name, part) in present)

    if kind == "F" and stage > 0:
        yield at("F", stage - 1), link(stage - 1)
    if kind == "R":
        yield at("F", stage), 0
    if kind in ("B", "BW"):
        yield (at("R", stage) if at("R", stage) in present else at("F", stage)), 0
        if stage < last:
            yield next(at(name, stage + 1) for name in ("B", "BW") if at(name, stage + 1) in present), link(stage)
        else:
            yield from heads(("S", "TX"))
    if kind == "W":
        yield at("B", stage), 0
    if kind in ("S", "SL"):
        yield at("F", last), way(last, stage)
    if kind in ("T", "TX"):
        yield from heads(("S",) if kind == "T" else ("SL",))


def _other_slices(op: Op, schedule: Schedule, present: set[Op]) -> Iterator[tuple[Op, int]]:
    """The pass of another slice of the microbatch that must be over before one: F in order, B in reverse order."""
    kind, stage, j = op
    if kind == "F" and j % schedule.slices:
        yield Op(kind, stage, j - 1), 0
    if kind in ("B", "BW") and (j + 1) % schedule.slices:
        yield next(Op(Kind(name), stage, j + 1) for name in ("B", "BW") if Op(Kind(name), stage, j + 1) in present), 0


def _peaks(found: Plan, columns: Column) -> Iterator[int]:
    """The most that each device holds: after each pass, and while it runs what a forward takes from its start."""
    costs, away = found.costs, found.offloads or [None] * found.schedule.num_ranks
    for row, plan in zip(found.schedule.rows, away, strict=True):
        again = {op[1:] for op in row if op.kind == "R"}
        held, before = [], 0
        for op in row:
            now = before + _change(op, columns, costs, op[1:] in again)
            held.append(max(before, now))
            before = now
        for one in plan.offloads if plan else ():
            for step in range(one.freed, one.back):
                held[step] -= _sized(columns, "held_after_f", one.stage, one.microbatch, costs)
        yield max(held, default=0)


def _change(op: Op, columns: Column, costs: Costs, again: bool) -> int:
    def size(name: str) -> int:
        return _sized(columns, name, op.stage, op.microbatch, costs) if name in columns else 0

    saved, pending, kept, head = (size(name) for name in ("held_after_f", "held_after_b", "held_input", "held_head"))
    changes = {
        "F": kept if again else saved,
        "R": saved - kept,
        "B": pending - saved,
        "BW": -saved,
        "W": -pending,
        "S": head,
        "SL": head,
        "T": -head,
        "TX": -head,
    }
    return changes[op.kind]


def rows_of(
    placement: Placement, rank: int, microbatches: int, chains: Sequence[Sequence[str]], head: Sequence[str] = ()
) -> Iterator[tuple[Op, ...]]:
    """Every order of a rank's passes in which those of each stage and microbatch are one of the `chains`, with its passes of the `head`."""
    stages = [stage for stage, home in enumerate(placement.routes[0]) if home == rank]
    units = [(stage, j) for j in range(microbatches) for stage in stages]
    parts = [[Op(Kind(name), stages[0], j) for name in head] for j in range(microbatches)] if head else []
    for chosen in product(chains, repeat=len(units)):
        yield from _merged([*([Op(Kind(name), *unit) for name in chain] for unit, chain in zip(units, chosen, strict=True)), *parts])


def _merged(chains: Sequence[Sequence[Op]]) -> Iterator[tuple[Op, ...]]:
    if not any(chains):
        yield ()
        return
    for place, chain in enumerate(chains):
        if chain:
            for rest in _merged([*chains[:place], chain[1:], *chains[place + 1 :]]):
                yield (chain[0], *rest)


def least_time(found: Plan, chains: Sequence[Sequence[str]] = (("F", "B", "W"),), head: Sequence[str] = ()) -> int:
    """The least objective in ns of every order of the plan's problem that fits, with the costs that it has and nothing on the host."""
    problem, best = found.problem, None
    place, microbatches = problem.placement, problem.num_microbatches
    every = [list(rows_of(place, rank, microbatches, chains, head)) for rank in range(place.num_ranks)]
    for rows in product(*every):
        tried = replace(found, order=replace(found.schedule, rows=rows, overlaps=frozenset()), offloads=())
        try:
            span, makespan, peaks = judged(tried)
        except AssertionError:
            continue
        if all(peak <= limit for peak, limit in zip(peaks, problem.limits.memory, strict=True)):
            time = span if problem.objective == "period" else makespan
            best = time if best is None else min(best, time)
    assert best is not None
    return best
