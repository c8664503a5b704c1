"""Reroutes the microbatches of lost ranks through the replicas that hold the same stages.

The replicas become one pipeline with a route for each of them. Where a rank of a route is lost, the route's microbatches take turns on the
other ranks that hold its stages. Split W passes let these fill idle time with the additional work. After ReCycle (Gandhi et al., arXiv
2405.14009), which finds such schedules with a solver; this is a list scheduler for passes of one time unit each.
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
    """The schedule of `num_microbatches` over all `replicas` of `placement`, each a list of ranks, without the ranks `gone`.

    The ranks of the schedule are the remaining ones, renumbered in order. Raises `InputError` if no remaining rank holds some stage.
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
    """Number of passes on each rank."""
    return [len(row) for row in schedule.rows]


def least_units(schedule: Schedule) -> int:
    """Lower bound on a step, in passes: the first forward reaches a rank, which then runs all its passes."""
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


def _routes(placement: Placement, replicas: Sequence[Sequence[int]], gone: Collection[int]) -> list[tuple[int, ...]]:
    """The routes that microbatches take in turn: those of all replicas, repeated until the work of lost ranks is shared."""
    homes = [tuple(ranks[rank] for rank in route) for ranks in replicas for route in placement.routes]
    left = sorted({rank for ranks in replicas for rank in ranks} - set(gone))
    holders = [sorted({home[stage] for home in homes} - set(gone)) for stage in range(placement.num_stages)]
    lost = [stage for stage, ranks in enumerate(holders) if not ranks]
    if lost:
        stages = f"stage {lost[0]}" if len(lost) == 1 else f"stages {', '.join(map(str, lost))}"
        raise InputError(f"no remaining rank holds {stages}: restart from a checkpoint, or train with more replicas")
    number = {rank: place for place, rank in enumerate(left)}
    rounds = max((len(ranks) for stage, ranks in enumerate(holders) if len(ranks) < len({home[stage] for home in homes})), default=1)
    return [
        tuple(number[home[stage] if home[stage] not in gone else holders[stage][turn % len(holders[stage])]] for stage in range(len(home)))
        for turn in range(rounds)
        for home in homes
    ]


class _ListScheduler:
    """List scheduling: a free rank runs a ready B first, then a ready F if memory allows it, then a ready W.

    `routes` has the ranks of the stages for each microbatch. A stage on a rank holds as many microbatches as in 1F1B, times the number of
    routes that it serves instead of one. The last stage never waits for memory, so by induction the others finish.
    """

    def __init__(self, routes: Sequence[Sequence[int]], num_ranks: int, num_homes: int) -> None:
        self._routes = routes
        num_stages = len(routes[0])
        self._needs = _needs(num_stages)
        self._dependents = {op: [then for then, needs in self._needs.items() if op in needs] for op in self._needs}
        # Unmet dependencies of each pass that has some met and some unmet.
        self._missing: dict[Op, int] = {}
        served = Counter((rank, stage) for route in routes for stage, rank in enumerate(route))
        self._room = {key: ceil((num_stages - key[1]) * max(1.0, count * num_homes / len(routes))) for key, count in served.items()}
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
        running = [op for rank in range(len(self._rows)) if (op := self._next(rank)) is not None]
        while running:
            for op in running:
                self._end(op)
            running = [op for rank in range(len(self._rows)) if (op := self._next(rank)) is not None]
        return tuple(map(tuple, self._rows))

    def _next(self, rank: int) -> Op | None:
        """What `rank` runs in this time unit."""
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
        """Makes the passes ready whose last dependency is `op`."""
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
