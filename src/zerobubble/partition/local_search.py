"""Cuts for any placement by local search: simulated annealing that moves runs of cuts by a layer, then descent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import exp
from random import Random

from zerobubble.partition.capacity import Capacity, Loads
from zerobubble.partition.layers import Cuts

Score = tuple[int, int, int, int]
"""Bytes over the memory limits, the largest rank time in ns, and the sums of squared times of ranks and of stages."""
LONGEST_RUN = 2
"""The most cuts that descent moves at once; annealing moves longer runs."""
MOST_MOVES = 40_000
"""The most moves to try; they take some tenths of a second."""
MOVES_PER_PLACE = 60
"""Moves to try per stage and layer."""
HOT, COLD = 0.3, 0.0005
"""First and last temperature, as fractions of the cost of a rank with an even share of the work."""
STEEPNESS = 12
"""The power of the load of a rank in its cost, so that the slowest rank dominates."""


def descend(loads: Loads, home: Sequence[int], capacities: Sequence[Capacity], cuts: Cuts) -> tuple[Score, Cuts]:
    """Returns the local optimum reached from `cuts` with stages on the ranks `home`. `capacities[r]` is the capacity of rank r."""
    best = score(loads, home, capacities, cuts)
    improved = True
    while improved:
        improved = False
        for moved in moves(cuts, len(loads.time) - 1, LONGEST_RUN):
            now = score(loads, home, capacities, moved)
            if now < best:
                best, cuts, improved = now, moved, True
                break
    return best, cuts


def moves(cuts: Cuts, num_layers: int, longest: int | None = None) -> Iterator[Cuts]:
    """Yields `cuts` with a run of at most `longest` cuts moved by one layer, forwards or back, without empty stages."""
    for first in range(len(cuts)):
        for end in range(first + 1, min(len(cuts), first + (longest or len(cuts))) + 1):
            for step in (-1, 1):
                moved = (*cuts[:first], *(cut + step for cut in cuts[first:end]), *cuts[end:])
                if all(before < after for before, after in pairwise((0, *moved, num_layers))):
                    yield moved


def score(loads: Loads, home: Sequence[int], capacities: Sequence[Capacity], cuts: Cuts) -> Score:
    """Returns the score of the cuts; less is better."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in capacities]
    squares = 0
    for rank, (begin, end) in zip(home, pairwise((0, *cuts, len(loads.time) - 1)), strict=True):
        pieces[rank].append((begin, end))
        squares += capacities[rank].work(loads, [(begin, end)]) ** 2
    busy = [capacity.work(loads, stages) for capacity, stages in zip(capacities, pieces, strict=True)]
    over = sum(capacity.missing(loads, stages) for capacity, stages in zip(capacities, pieces, strict=True))
    return over, max(busy), sum(time * time for time in busy), squares


def _num_moves(num_stages: int, num_layers: int) -> int:
    return min(MOST_MOVES, MOVES_PER_PLACE * num_stages * num_layers)


def runs_within_moves(num_stages: int, num_layers: int) -> int:
    """The number of runs, with different seeds, that together try as many moves as one run for a large model."""
    return MOST_MOVES // _num_moves(num_stages, num_layers)


class Annealing:
    """Simulated annealing of cuts. `home[s]` is the rank of stage s, and `capacities[r]` the capacity of rank r."""

    def __init__(self, loads: Loads, home: Sequence[int], capacities: Sequence[Capacity], cuts: Cuts) -> None:
        self._home, self._limits = home, [capacity.limit for capacity in capacities]
        self._first_edges = [[edge for edge, rank in enumerate(home) if rank == here] for here in range(len(capacities))]
        self._times = [capacity.time(loads) for capacity in capacities]
        self._bytes = [
            [] if capacity.limit is None else [list(zip(edges, moment, strict=True)) for moment in capacity.prefix_sums(loads)]
            for edges, capacity in zip(self._first_edges, capacities, strict=True)
        ]
        self._edges = [0, *cuts, len(loads.time) - 1]
        self._share = loads.time[-1] / sum(capacity.speed for capacity in capacities) or 1.0
        self._costs = [self._cost(rank) for rank in range(len(capacities))]

    def run(self, seed: int = 0) -> Cuts:
        """Returns the best cuts found."""
        rng, moves = Random(seed), _num_moves(len(self._home), self._edges[-1])
        best, least, now = tuple(self._edges[1:-1]), sum(self._costs), sum(self._costs)
        cooling = (COLD / HOT) ** (1 / moves)
        heat = HOT
        for _ in range(moves):
            heat *= cooling
            now += self._move(rng, heat)
            if now < least - 1e-12:
                best, least = tuple(self._edges[1:-1]), now
        return best

    def _move(self, rng: Random, heat: float) -> float:
        """Moves a random run of cuts by a layer. Returns the increase in cost, 0 if the move is rejected."""
        edges, last = self._edges, len(self._edges) - 1
        first = rng.randrange(1, last)
        end = min(last, first + 1 + int(rng.expovariate(0.7)))
        step = 1 if rng.random() < 0.5 else -1
        if edges[first] + step <= edges[first - 1] or edges[end - 1] + step >= edges[end]:
            return 0.0
        self._shift(first, end, step)
        ranks = {self._home[stage] for stage in range(first - 1, end)}
        costs = {rank: self._cost(rank) for rank in ranks}
        worse = sum(costs[rank] - self._costs[rank] for rank in ranks)
        if worse > 0 and rng.random() >= exp(-worse / heat):
            self._shift(first, end, -step)
            return 0.0
        for rank, cost in costs.items():
            self._costs[rank] = cost
        return worse

    def _shift(self, first: int, end: int, step: int) -> None:
        for cut in range(first, end):
            self._edges[cut] += step

    def _cost(self, rank: int) -> float:
        """Returns the cost of a rank: 1 with an even share of the work, far more with a larger one, most if its memory is exceeded."""
        edges, time, limit = self._edges, self._times[rank], self._limits[rank]
        busy = 0
        for edge in self._first_edges[rank]:
            busy += time[edges[edge + 1]] - time[edges[edge]]
        cost: float = (busy / self._share) ** STEEPNESS
        if limit is None:
            return cost
        most = limit
        for moment in self._bytes[rank]:
            held = 0
            for edge, before in moment:
                held += before[edges[edge + 1]] - before[edges[edge]]
            most = held if held > most else most
        return cost + 100 + 1e4 * ((most - limit) / limit) if most > limit else cost
