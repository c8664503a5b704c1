"""Optimal cuts by dynamic programming, for one stage per rank, a vee, and a loop of two rounds.

Ranks take their layers in turn. Two numbers describe the remaining layers, so a dynamic program over them covers every cut. Cuts that leave
too much work for the other ranks are pruned.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Protocol

from zerobubble.partition.capacity import Capacity, Loads, Pieces
from zerobubble.partition.layers import Cuts
from zerobubble.partition.speeds import at_speed

MOST_LAYERS_TIMES_RANKS = 600
"""The largest product of layers and ranks for which the search covers all cuts of two rounds. It then takes about a second."""

Remaining = tuple[int, int]
"""The remaining layers as two numbers; see `FromTheEnds` and `TwoRounds`."""


class LayerChain(Protocol):
    """A cut problem in which the ranks take their layers one after another, in the order of `capacities`."""

    @property
    def loads(self) -> Loads: ...

    @property
    def capacities(self) -> Sequence[Capacity]: ...

    @property
    def start(self) -> Remaining:
        """All layers."""

    def is_done(self, left: Remaining) -> bool:
        """Whether no layers remain."""

    def choices(self, left: Remaining, capacity: Capacity, limit: int, rest: int) -> Iterator[tuple[Remaining, Pieces]]:
        """Yields each choice of stages for the next rank within its capacity and `limit` ns, with the layers that remain.

        The remaining layers take at most `rest` ns at speed 1.
        """


@dataclass(frozen=True)
class FromTheEnds:
    """Each rank takes layers from the front, and if `folded` its second stage from the back. The layers between remain."""

    loads: Loads
    capacities: Sequence[Capacity]
    folded: bool

    @property
    def start(self) -> Remaining:
        return 0, len(self.loads.time) - 1

    def is_done(self, left: Remaining) -> bool:
        return left[0] == left[1]

    def choices(self, left: Remaining, capacity: Capacity, limit: int, rest: int) -> Iterator[tuple[Remaining, Pieces]]:
        work, time = self.loads.time, capacity.time(self.loads)
        begin, end = left
        first = begin + 1 if self.folded else max(begin + 1, bisect_left(work, work[end] - rest))
        for front in range(first, min(end, bisect_right(time, time[begin] + limit) - 1) + 1):
            if capacity.missing(self.loads, [(begin, front)]):
                return
            if self.folded:
                yield from self._folded((begin, front), end, capacity, limit, rest)
            else:
                yield (front, end), [(begin, front)]

    def _folded(self, first: Remaining, end: int, capacity: Capacity, limit: int, rest: int) -> Iterator[tuple[Remaining, Pieces]]:
        work, time, front = self.loads.time, capacity.time(self.loads), first[1]
        most = limit - (time[front] - time[first[0]])
        highest = min(end - 1, bisect_right(work, work[front] + rest) - 1)
        for back in range(highest, max(front, bisect_left(time, time[end] - most)) - 1, -1):
            pieces = [first, (back, end)]
            if capacity.missing(self.loads, pieces):
                return
            yield (front, back), pieces


Accumulate = Callable[[int, Sequence[int]], int]
"""Combines the cost of a partial cut and the stage times of the next rank."""


def exact_cuts(chain: LayerChain) -> Cuts | None:
    """Returns the cuts that minimize the largest rank time, then the sum of squared stage times; None if none fits."""
    slowest = slowest_rank(chain)
    smooth = None if slowest is None else smoothest(chain, slowest)
    return smooth and smooth[1]


def slowest_rank(chain: LayerChain) -> int | None:
    """Returns the minimum time of the slowest rank in ns; None if no cuts fit."""
    least, most = slowest_rank_bound(chain.loads, chain.capacities), max(capacity.time(chain.loads)[-1] for capacity in chain.capacities)
    # Starts at the lower bound and doubles the slack, because a tight limit prunes most cuts.
    limit, slack = least, max(1, least // 256)
    slowest = faster(chain, limit)
    while slowest is None and limit < most:
        limit, slack = min(most, least + slack), 2 * slack
        slowest = faster(chain, limit)
    return slowest


def faster(chain: LayerChain, limit: int) -> int | None:
    """Returns the minimum time of the slowest rank in ns; None if it exceeds `limit`."""
    best = _best(chain, limit, _slowest)
    return best and best[0]


def smoothest(chain: LayerChain, slowest: int) -> tuple[int, Cuts] | None:
    """Returns the minimum sum of squared stage times if no rank takes more than `slowest` ns, and its cuts; None if there are none."""
    return _best(chain, slowest, _roughness)


def slowest_rank_bound(loads: Loads, capacities: Sequence[Capacity]) -> int:
    """Returns a lower bound in ns on the slowest rank, up to rounding: an even share or the heaviest layer on the fastest rank."""
    speeds = [capacity.speed for capacity in capacities]
    heaviest = max(after - before for before, after in pairwise(loads.time))
    if max(speeds) == min(speeds) == 1:
        return max(heaviest, -(-loads.time[-1] // len(capacities)))
    return max(at_speed(heaviest, max(speeds)), at_speed(loads.time[-1], sum(speeds)))


def most_work(limit: int, loads: Loads, capacities: Sequence[Capacity]) -> int:
    """Returns an upper bound on the ns of layers, at speed 1, that ranks of these capacities can take in `limit` ns each."""
    if all(capacity.speed == 1 for capacity in capacities):
        return limit * len(capacities)
    speeds = [capacity.speed for capacity in capacities]
    # F, B and W of a layer are each rounded by at most half an ns. The sum of speeds has a relative error far below 2^-40.
    rounded = 1.5 * max(speeds) * (len(loads.time) - 1)
    return ceil((limit * sum(speeds) + rounded) * (1 + 2.0**-40))


def _slowest(cost: int, times: Sequence[int]) -> int:
    return max(cost, sum(times))


def _roughness(cost: int, times: Sequence[int]) -> int:
    return cost + sum(time * time for time in times)


Trail = tuple[int, "Trail"] | tuple[()]
"""The layers where stages begin or end, last first, as a linked list that shares its tail with other cuts."""


def _best(chain: LayerChain, limit: int, add_cost: Accumulate) -> tuple[int, Cuts] | None:
    """Returns the minimum cost if no rank takes more than `limit` ns, and its cuts. `states` has the best cut for each `Remaining`."""
    loads = chain.loads
    states: dict[Remaining, tuple[int, Trail]] = {chain.start: (0, ())}
    for rank, capacity in enumerate(chain.capacities):
        reached: dict[Remaining, tuple[int, Trail]] = {}
        rest, time = most_work(limit, loads, chain.capacities[rank + 1 :]), capacity.time(loads)
        for left, (cost, trail) in states.items():
            for now, pieces in chain.choices(left, capacity, limit, rest):
                total = add_cost(cost, [time[end] - time[first] for first, end in pieces])
                if now not in reached or total < reached[now][0]:
                    reached[now] = total, (now[0], (now[1], trail))
        states = reached
    done = [state for left, state in states.items() if chain.is_done(left)]
    if not done:
        return None
    cost, trail = min(done, key=lambda state: state[0])
    ends = {0, len(loads.time) - 1}
    return cost, tuple(sorted({*chain.start, *_numbers(trail)} - ends))


def _numbers(trail: Trail) -> Iterator[int]:
    while trail:
        number, trail = trail
        yield number


@dataclass(frozen=True)
class TwoRounds:
    """Each rank takes a stage of the layers before `middle` and one of those after it. `Remaining`: the first layer left in each half."""

    loads: Loads
    capacities: Sequence[Capacity]
    middle: int

    @property
    def start(self) -> Remaining:
        return 0, self.middle

    def is_done(self, left: Remaining) -> bool:
        return left == (self.middle, len(self.loads.time) - 1)

    def choices(self, left: Remaining, capacity: Capacity, limit: int, rest: int) -> Iterator[tuple[Remaining, Pieces]]:
        work, time, (here, there), last = self.loads.time, capacity.time(self.loads), left, len(self.loads.time) - 1
        for front in range(here + 1, min(self.middle, bisect_right(time, time[here] + limit) - 1) + 1):
            most = limit - (time[front] - time[here])
            lowest = max(there + 1, bisect_left(work, work[self.middle] - work[front] + work[last] - rest))
            if capacity.missing(self.loads, [(here, front)]):
                return
            for back in range(lowest, min(last, bisect_right(time, time[there] + most) - 1) + 1):
                pieces = [(here, front), (there, back)]
                if capacity.missing(self.loads, pieces):
                    break
                yield (front, back), pieces


def cuts_of_two_rounds(loads: Loads, capacities: Sequence[Capacity], enough: int) -> Cuts | None:
    """Returns the optimal cuts; None if none fits, or if there are too many to cover.

    `capacities` are in the order of a round. The search stops if the slowest rank takes `enough` ns, a lower bound.
    """
    ranks, layers = len(capacities), len(loads.time) - 1
    if ranks * layers > MOST_LAYERS_TIMES_RANKS:
        return None
    middles = sorted(range(ranks, layers - ranks + 1), key=lambda middle: abs(2 * loads.time[middle] - loads.time[-1]))
    chains = [TwoRounds(loads, capacities, middle) for middle in middles]
    slowest = None
    for chain in chains:
        time = slowest_rank(chain) if slowest is None else faster(chain, slowest - 1)
        slowest = slowest if time is None else time
        if slowest == enough:
            break
    if slowest is None:
        return None
    _, cuts = min(smooth for chain in chains if (smooth := smoothest(chain, slowest)) is not None)
    return cuts
