"""Cuts for any placement, by simulated annealing: move a cut, or a run of them, by a layer, at first also where that is worse."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random

from zerobubble.partition.layers import Cuts
from zerobubble.partition.room import Loads, Room

MOST_MOVES = 40_000
"""Moves that are tried at most, which take some tenths of a second."""
MOVES_PER_PLACE = 60
"""Moves that are tried for each stage and layer."""
HOT, COLD = 0.3, 0.0005
"""The temperature at the beginning and at the end, as a share of what a rank costs that has an even share of the work."""
STEEPNESS = 12
"""The power to which the load of a rank counts, so that the slowest one counts most."""


def _moves(num_stages: int, num_layers: int) -> int:
    return min(MOST_MOVES, MOVES_PER_PLACE * num_stages * num_layers)


def runs_within_moves(num_stages: int, num_layers: int) -> int:
    """How many runs, each with another seed, try as many moves together as one run for a large model."""
    return MOST_MOVES // _moves(num_stages, num_layers)


class Annealing:
    """Cuts that move. `home[s]` is the rank of stage s, and `rooms[r]` the room of rank r."""

    def __init__(self, loads: Loads, home: Sequence[int], rooms: Sequence[Room], cuts: Cuts) -> None:
        self._home, self._limits = home, [room.limit for room in rooms]
        self._first_edges = [[edge for edge, rank in enumerate(home) if rank == here] for here in range(len(rooms))]
        self._times = [room.time(loads) for room in rooms]
        self._bytes = [
            [] if room.limit is None else [list(zip(edges, moment, strict=True)) for moment in room.before(loads)]
            for edges, room in zip(self._first_edges, rooms, strict=True)
        ]
        self._edges = [0, *cuts, len(loads.time) - 1]
        self._share = loads.time[-1] / sum(room.speed for room in rooms) or 1.0
        self._worths = [self._worth(rank) for rank in range(len(rooms))]

    def run(self, seed: int = 0) -> Cuts:
        """The best cuts that were met."""
        dice, moves = Random(seed), _moves(len(self._home), self._edges[-1])
        best, least, now = tuple(self._edges[1:-1]), sum(self._worths), sum(self._worths)
        cooling = (COLD / HOT) ** (1 / moves)
        heat = HOT
        for _ in range(moves):
            heat *= cooling
            now += self._move(dice, heat)
            if now < least - 1e-12:
                best, least = tuple(self._edges[1:-1]), now
        return best

    def _move(self, dice: Random, heat: float) -> float:
        """Move a run of cuts by a layer, by chance, and give by how much that is worse; 0 where it is not done."""
        edges, last = self._edges, len(self._edges) - 1
        first = dice.randrange(1, last)
        end = min(last, first + 1 + int(dice.expovariate(0.7)))
        step = 1 if dice.random() < 0.5 else -1
        if edges[first] + step <= edges[first - 1] or edges[end - 1] + step >= edges[end]:
            return 0.0
        self._shift(first, end, step)
        ranks = {self._home[stage] for stage in range(first - 1, end)}
        worths = {rank: self._worth(rank) for rank in ranks}
        worse = sum(worths[rank] - self._worths[rank] for rank in ranks)
        if worse > 0 and dice.random() >= exp(-worse / heat):
            self._shift(first, end, -step)
            return 0.0
        for rank, worth in worths.items():
            self._worths[rank] = worth
        return worse

    def _shift(self, first: int, end: int, step: int) -> None:
        for cut in range(first, end):
            self._edges[cut] += step

    def _worth(self, rank: int) -> float:
        """What a rank costs: 1 with an even share of the work, far more with more of it, and most where its memory is too small."""
        edges, time, limit = self._edges, self._times[rank], self._limits[rank]
        busy = 0
        for edge in self._first_edges[rank]:
            busy += time[edges[edge + 1]] - time[edges[edge]]
        worth: float = (busy / self._share) ** STEEPNESS
        if limit is None:
            return worth
        most = limit
        for moment in self._bytes[rank]:
            held = 0
            for edge, before in moment:
                held += before[edges[edge + 1]] - before[edges[edge]]
            most = held if held > most else most
        return worth + 100 + 1e4 * ((most - limit) / limit) if most > limit else worth
