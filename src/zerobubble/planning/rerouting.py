"""The schedule of several replicas some of whose ranks are gone: their microbatches go through the ranks that hold the same stages.

The replicas become one pipeline with a route for each of them. Where a rank of a route is gone, the microbatches of the route pass through
the others that hold its stages, in turn. W apart from B lets these fill with the additional work what would be idle time. After ReCycle
(Gandhi et al., arXiv 2405.14009), which finds such schedules with a solver; this is a list scheduler for passes of one time unit each.
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

NAME = "rerouted"


def rerouted(placement: Placement, replicas: Sequence[Sequence[int]], gone: Collection[int], num_microbatches: int) -> Schedule:
    """The schedule of `num_microbatches` over all `replicas` of `placement`, each with its ranks, without those that are `gone`.

    The ranks of the schedule are those that are left, counted anew in their order. Raises `InputError` where nobody holds a stage any more.
    """
    routes = _routes(placement, replicas, gone)
    distinct = tuple(dict.fromkeys(routes))
    taken = tuple(islice(cycle(map(distinct.index, routes)), num_microbatches))
    num_ranks = len({rank for ranks in replicas for rank in ranks} - set(gone))
    joined = Placement(NAME, num_ranks, distinct)
    held = len(replicas) * len(placement.routes)
    rows = _ListScheduler([distinct[route] for route in taken], num_ranks, held).rows()
    return Schedule(NAME, joined, num_microbatches, rows, taken)


def load(schedule: Schedule) -> list[int]:
    """How many passes each rank of a schedule runs."""
    return [len(row) for row in schedule.rows]


def least_units(schedule: Schedule) -> int:
    """How long a step takes at least, in passes: a rank begins when a forward has come to the first of its stages, and runs all its own."""
    return max(min(op.stage for op in row) + len(row) for row in schedule.rows)


class Slowdown(NamedTuple):
    """How many times as long steps take without ranks that are gone, where all passes take equally long: as planned, and at least."""

    planned: float
    least: float


def slowdown_of(before: Schedule, now: Schedule) -> Slowdown:
    """That of `now`, in which those that are left play the batch of all replicas, over `before`, in which each replica played its own."""
    costs = Costs.unit(before.num_stages)
    step = simulate(before, costs).makespan
    return Slowdown(simulate(now, costs).makespan / step, least_units(now) * NS_PER_MS / step)


def _routes(placement: Placement, replicas: Sequence[Sequence[int]], gone: Collection[int]) -> list[tuple[int, ...]]:
    """The routes that microbatches take in turn: those of all replicas, as often as it takes to share the work of who is gone."""
    homes = [tuple(ranks[rank] for rank in route) for ranks in replicas for route in placement.routes]
    left = sorted({rank for ranks in replicas for rank in ranks} - set(gone))
    holders = [sorted({home[stage] for home in homes} - set(gone)) for stage in range(placement.num_stages)]
    lost = [stage for stage, ranks in enumerate(holders) if not ranks]
    if lost:
        stages = f"stage {lost[0]}" if len(lost) == 1 else f"stages {', '.join(map(str, lost))}"
        raise InputError(f"no rank that is left holds {stages}: start again from a checkpoint, or train with more replicas")
    number = {rank: place for place, rank in enumerate(left)}
    rounds = max((len(ranks) for stage, ranks in enumerate(holders) if len(ranks) < len({home[stage] for home in homes})), default=1)
    return [
        tuple(number[home[stage] if home[stage] not in gone else holders[stage][turn % len(holders[stage])]] for stage in range(len(home)))
        for turn in range(rounds)
        for home in homes
    ]


class _ListScheduler:
    """Each rank, whenever it is free, runs of the passes that are ready B first, then F where it may hold another microbatch, then W.

    `routes` has the ranks of the stages for each microbatch. A stage on a rank holds as many microbatches as in 1F1B, as often as there
    are routes that it serves in the place of one; those of the last stage end by themselves, so those before it do in turn.
    """

    def __init__(self, routes: Sequence[Sequence[int]], num_ranks: int, num_homes: int) -> None:
        self._routes = routes
        num_stages = len(routes[0])
        self._needs = _needs(num_stages)
        self._dependents = {op: [then for then, needs in self._needs.items() if op in needs] for op in self._needs}
        # How many of the passes that it needs have not run, for each pass some of which have.
        self._missing: dict[Op, int] = {}
        served = Counter((rank, stage) for route in routes for stage, rank in enumerate(route))
        self._room = {key: ceil((num_stages - key[1]) * max(1.0, count * num_homes / len(routes))) for key, count in served.items()}
        # For each rank, the microbatches that are ready for F, B and W of each of its stages.
        self._ready: list[dict[Kind, dict[int, list[int]]]] = [
            {kind: defaultdict(list) for kind in (Kind.F, Kind.B, Kind.W)} for _ in range(num_ranks)
        ]
        self._rows: list[list[Op]] = [[] for _ in range(num_ranks)]

    def rows(self) -> tuple[tuple[Op, ...], ...]:
        """What each rank runs, in order."""
        for microbatch in range(len(self._routes)):
            for first in (op for op, needs in self._needs.items() if not needs):
                self._add(first._replace(microbatch=microbatch))
        running = [op for rank in range(len(self._rows)) if (op := self._next(rank)) is not None]
        while running:
            for op in running:
                self._end(op)
            running = [op for rank in range(len(self._rows)) if (op := self._next(rank)) is not None]
        return tuple(map(tuple, self._rows))

    def _next(self, rank: int) -> Op | None:
        """What `rank` runs in this unit of time."""
        for kind in (Kind.B, Kind.F, Kind.W):
            ready = self._ready[rank][kind]
            for stage in sorted(ready, reverse=True):
                if ready[stage] and (kind is not Kind.F or self._room[rank, stage] > 0):
                    op = Op(kind, stage, heapq.heappop(ready[stage]))
                    self._room[rank, stage] += {Kind.F: -1, Kind.W: 1}.get(kind, 0)
                    self._rows[rank].append(op)
                    return op
        return None

    def _end(self, op: Op) -> None:
        """Make ready what waited for `op` last."""
        for kind, stage, _ in self._dependents[op._replace(microbatch=0)]:
            then = Op(kind, stage, op.microbatch)
            self._missing[then] = self._missing.get(then, len(self._needs[then._replace(microbatch=0)])) - 1
            if not self._missing[then]:
                del self._missing[then]
                self._add(then)

    def _add(self, op: Op) -> None:
        heapq.heappush(self._ready[self._routes[op.microbatch][op.stage]][op.kind][op.stage], op.microbatch)


def _needs(num_stages: int) -> dict[Op, set[Op]]:
    """For each pass of a microbatch, those of which it uses what they make."""
    passes = [Op(kind, stage, 0) for kind in (Kind.F, Kind.B, Kind.W) for stage in range(num_stages)]
    maker = {value: op for op in passes for value in makes(op, num_stages)}
    return {op: {maker[value] for value in uses(op, num_stages)} for op in passes}
