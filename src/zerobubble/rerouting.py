"""Reroutes the microbatches of lost ranks through the replicas that hold the same stages.

The replicas become one pipeline with a route for each of them. If a rank of a route is lost, the route's microbatches take turns on the
other ranks that hold its stages. As W is split from B, these do some of the additional work in idle time. After ReCycle (Gandhi et al.,
arXiv 2405.14009), which finds such schedules with a solver; this is a list scheduler for passes of one time unit each.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import cycle, islice
from math import ceil
from typing import NamedTuple

from zerobubble.costs import NS_PER_MS, Costs
from zerobubble.errors import InputError
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.rules import makes, uses
from zerobubble.simulation import simulate
from zerobubble.units import named

NAME = "rerouted"


def rerouted(placement: Placement, replicas: Sequence[Sequence[int]], lost: Collection[int], num_microbatches: int) -> Schedule:
    """The schedule of `num_microbatches` over all `replicas` of `placement`, each a list of ranks, without the ranks `lost`.

    The ranks of the schedule are the remaining ones, renumbered in order. Raises `InputError` if a stage has no remaining rank.
    """
    routes = _routes(placement, replicas, lost)
    distinct = tuple(dict.fromkeys(routes))
    taken = tuple(islice(cycle(map(distinct.index, routes)), num_microbatches))
    num_ranks = len(_remaining(replicas, lost))
    joined = Placement(NAME, num_ranks, distinct)
    num_originals = len(replicas) * len(placement.routes)
    rows = _ListScheduler([distinct[route] for route in taken], num_ranks, num_originals).rows()
    return Schedule(NAME, joined, num_microbatches, rows, taken)


def least_units(schedule: Schedule) -> int:
    """Lower bound on a step, in passes: the forwards before the first stage of a rank, then all its passes; maximum over ranks."""
    return max(min(op.stage for op in row) + len(row) for row in schedule.rows)


class Slowdown(NamedTuple):
    """Slowdown of steps after losing ranks, if all passes take equally long: as scheduled, and a lower bound."""

    planned: float
    least: float


def slowdown_of(before: Schedule, now: Schedule) -> Slowdown:
    """Slowdown of `now`, in which the remaining ranks run the batch of all replicas, over `before`, in which each replica runs its own."""
    costs = Costs.unit(before.num_stages)
    step = simulate(before, costs).makespan
    return Slowdown(simulate(now, costs).makespan / step, least_units(now) * NS_PER_MS / step)


def _routes(placement: Placement, replicas: Sequence[Sequence[int]], lost: Collection[int]) -> list[tuple[int, ...]]:
    """The routes that microbatches take in turn: the routes of all replicas, repeated so that the holders of a lost stage take turns."""
    originals = [tuple(ranks[rank] for rank in route) for ranks in replicas for route in placement.routes]
    before = [{original[stage] for original in originals} for stage in range(placement.num_stages)]
    holders = [sorted(ranks - set(lost)) for ranks in before]
    _refuse_without_rank(holders)
    number = {rank: place for place, rank in enumerate(_remaining(replicas, lost))}
    rounds = max((len(left) for left, ranks in zip(holders, before, strict=True) if len(left) < len(ranks)), default=1)

    def holder(stage: int, rank: int, turn: int) -> int:
        return number[rank if rank not in lost else holders[stage][turn % len(holders[stage])]]

    return [tuple(holder(*place, turn) for place in enumerate(original)) for turn in range(rounds) for original in originals]


def _remaining(replicas: Sequence[Sequence[int]], lost: Collection[int]) -> list[int]:
    return sorted({rank for ranks in replicas for rank in ranks} - set(lost))


def _refuse_without_rank(holders: Sequence[Sequence[int]]) -> None:
    """Raises `InputError` for stages without `holders`."""
    without_rank = [stage for stage, ranks in enumerate(holders) if not ranks]
    if without_rank:
        remedy = "restart from a checkpoint, or train with more replicas"
        raise InputError("no remaining rank holds {stages}", stages=named("stage", without_rank), remedy=remedy)


class _ListScheduler:
    """List scheduling: a free rank runs a ready B first, then a ready F if memory allows it, then a ready W.

    `routes` has the ranks of the stages for each microbatch. A stage on a rank may hold as many microbatches as in 1F1B, times its share
    of all microbatches relative to the original one, at least 1. The last stage never waits for memory, so by induction the others finish.
    """

    def __init__(self, routes: Sequence[Sequence[int]], num_ranks: int, num_originals: int) -> None:
        self._routes = routes
        num_stages = len(routes[0])
        self._needs = _needs(num_stages)
        self._dependents = {op: [then for then, needs in self._needs.items() if op in needs] for op in self._needs}
        # The number of unmet dependencies of each pass for which at least one is met.
        self._missing: dict[Op, int] = {}
        served = Counter((rank, stage) for route in routes for stage, rank in enumerate(route))
        self._free = {key: ceil((num_stages - key[1]) * max(1.0, count * num_originals / len(routes))) for key, count in served.items()}
        # For each rank, the microbatches that are ready for F, B and W of each of its stages.
        self._ready: list[dict[Kind, dict[int, list[int]]]] = [
            {kind: defaultdict(list) for kind in (Kind.F, Kind.B, Kind.W)} for _ in range(num_ranks)
        ]
        self._rows: list[list[Op]] = [[] for _ in range(num_ranks)]

    def rows(self) -> tuple[tuple[Op, ...], ...]:
        """The passes of each rank in order."""
        for microbatch in range(len(self._routes)):
            for first in (op for op, needs in self._needs.items() if not needs):
                self._add(first._replace(microbatch=microbatch))
        while running := [op for rank in range(len(self._rows)) if (op := self._next(rank)) is not None]:
            for op in running:
                self._end(op)
        return tuple(map(tuple, self._rows))

    def _next(self, rank: int) -> Op | None:
        """Returns the pass that `rank` runs in this time unit, if any, and appends it to its row."""
        for kind in (Kind.B, Kind.F, Kind.W):
            ready = self._ready[rank][kind]
            for stage in sorted(ready, reverse=True):
                if ready[stage] and (kind is not Kind.F or self._free[rank, stage] > 0):
                    op = Op(kind, stage, heapq.heappop(ready[stage]))
                    self._free[rank, stage] += {Kind.F: -1, Kind.W: 1}.get(kind, 0)
                    self._rows[rank].append(op)
                    return op
        return None

    def _end(self, op: Op) -> None:
        """Marks the passes as ready for which `op` was the last unmet dependency."""
        for kind, stage, _ in self._dependents[op._replace(microbatch=0)]:
            then = Op(kind, stage, op.microbatch)
            self._missing[then] = self._missing.get(then, len(self._needs[then._replace(microbatch=0)])) - 1
            if not self._missing[then]:
                del self._missing[then]
                self._add(then)

    def _add(self, op: Op) -> None:
        heapq.heappush(self._ready[self._routes[op.microbatch][op.stage]][op.kind][op.stage], op.microbatch)


def _needs(num_stages: int) -> dict[Op, set[Op]]:
    """For each pass of a microbatch, the passes whose output it uses."""
    passes = [Op(kind, stage, 0) for kind in (Kind.F, Kind.B, Kind.W) for stage in range(num_stages)]
    maker = {value: op for op in passes for value in makes(op, num_stages)}
    return {op: {maker[value] for value in uses(op, num_stages)} for op in passes}
