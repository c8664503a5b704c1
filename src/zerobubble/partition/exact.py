"""The best cuts where the ranks take their layers in turn: a dynamic programme, and the chains of one stage a rank and of a vee.

What is left of the model after some ranks have taken theirs is described by two numbers, so a dynamic programme over what is left covers
every cut. Cuts that leave so much that the other ranks cannot be fast enough are dropped, which leaves few.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Protocol

from zerobubble.partition.layers import Cuts
from zerobubble.partition.room import Loads, Pieces, Room
from zerobubble.partition.speeds import at_speed

Left = tuple[int, int]
"""What no rank has taken yet, as two numbers of layers: see `Chain`."""


class Chain(Protocol):
    """Layers to cut for ranks in the order of their `rooms`."""

    @property
    def loads(self) -> Loads: ...

    @property
    def rooms(self) -> Sequence[Room]: ...

    @property
    def start(self) -> Left:
        """What is left before any rank has taken layers: all."""

    def is_done(self, left: Left) -> bool:
        """Whether nothing is left."""

    def takes(self, left: Left, room: Room, limit: int, rest: int) -> Iterator[tuple[Left, Pieces]]:
        """What may be left once a rank has taken stages of at most `limit` ns together that fit its room, and the layers of these.

        What is left then takes `rest` ns at most, at speed 1.
        """


@dataclass(frozen=True)
class FromTheEnds:
    """Each rank takes its layers from the front, and its second stage from the back if `folded`. The layers between are left."""

    loads: Loads
    rooms: Sequence[Room]
    folded: bool

    @property
    def start(self) -> Left:
        return 0, len(self.loads.time) - 1

    def is_done(self, left: Left) -> bool:
        return left[0] == left[1]

    def takes(self, left: Left, room: Room, limit: int, rest: int) -> Iterator[tuple[Left, Pieces]]:
        work, time = self.loads.time, room.time(self.loads)
        begin, end = left
        first = begin + 1 if self.folded else max(begin + 1, bisect_left(work, work[end] - rest))
        for front in range(first, min(end, bisect_right(time, time[begin] + limit) - 1) + 1):
            if room.missing(self.loads, [(begin, front)]):
                return
            if self.folded:
                yield from self._folded((begin, front), end, room, limit, rest)
            else:
                yield (front, end), [(begin, front)]

    def _folded(self, first: Left, end: int, room: Room, limit: int, rest: int) -> Iterator[tuple[Left, Pieces]]:
        work, time, front = self.loads.time, room.time(self.loads), first[1]
        most = limit - (time[front] - time[first[0]])
        highest = min(end - 1, bisect_right(work, work[front] + rest) - 1)
        for back in range(highest, max(front, bisect_left(time, time[end] - most)) - 1, -1):
            pieces = [first, (back, end)]
            if room.missing(self.loads, pieces):
                return
            yield (front, back), pieces


Accumulate = Callable[[int, Sequence[int]], int]
"""The worth of a split so far and the stage times of the next rank make the worth of the split with that rank."""


def exact_cuts(chain: Chain) -> Cuts | None:
    """The cuts with the smallest largest rank time, among them those with the smoothest stage times; None where none fits."""
    slowest = slowest_rank(chain)
    smooth = None if slowest is None else smoothest(chain, slowest)
    return smooth and smooth[1]


def slowest_rank(chain: Chain) -> int | None:
    """The least ns in which the slowest rank can do its work; None where no cuts fit."""
    least, most = at_least(chain.loads, chain.rooms), max(room.time(chain.loads)[-1] for room in chain.rooms)
    limit, slack = least, max(1, least // 256)
    found = faster(chain, limit)
    while found is None and limit < most:
        limit, slack = min(most, least + slack), 2 * slack
        found = faster(chain, limit)
    return found


def faster(chain: Chain, limit: int) -> int | None:
    """The least ns in which the slowest rank can do its work, None where that is not `limit` or less."""
    found = _best(chain, limit, _slowest)
    return found and found[0]


def smoothest(chain: Chain, slowest: int) -> tuple[int, Cuts] | None:
    """The least sum of squared stage times among the cuts whose ranks take `slowest` ns at most, and these cuts; None without any."""
    return _best(chain, slowest, _roughness)


def at_least(loads: Loads, rooms: Sequence[Room]) -> int:
    """The ns that the slowest rank has at least, up to rounding: an equal share of all, or the heaviest layer on the fastest rank."""
    speeds = [room.speed for room in rooms]
    heaviest = max(after - before for before, after in pairwise(loads.time))
    if max(speeds) == min(speeds) == 1:
        return max(heaviest, -(-loads.time[-1] // len(rooms)))
    return max(at_speed(heaviest, max(speeds)), at_speed(loads.time[-1], sum(speeds)))


def left_at_most(limit: int, loads: Loads, rooms: Sequence[Room]) -> int:
    """The ns of layers, at speed 1, that ranks of these rooms can take in `limit` ns each; no less than that."""
    if all(room.speed == 1 for room in rooms):
        return limit * len(rooms)
    speeds = [room.speed for room in rooms]
    # F, B and W of each layer are rounded by half an ns at most; a part in 2^40 more than covers the rounding of the sum of speeds
    rounded = 1.5 * max(speeds) * (len(loads.time) - 1)
    return ceil((limit * sum(speeds) + rounded) * (1 + 2.0**-40))


def _slowest(worth: int, times: Sequence[int]) -> int:
    return max(worth, sum(times))


def _roughness(worth: int, times: Sequence[int]) -> int:
    return worth + sum(time * time for time in times)


Trail = tuple[int, "Trail"] | tuple[()]
"""The numbers of the layers where stages begin or end, the last first."""


def _best(chain: Chain, limit: int, accumulate_worth: Accumulate) -> tuple[int, Cuts] | None:
    """The least worth of a split whose ranks take at most `limit` ns each, and its cuts."""
    loads = chain.loads
    front: dict[Left, tuple[int, Trail]] = {chain.start: (0, ())}
    for rank, room in enumerate(chain.rooms):
        reached: dict[Left, tuple[int, Trail]] = {}
        rest, time = left_at_most(limit, loads, chain.rooms[rank + 1 :]), room.time(loads)
        for left, (worth, trail) in front.items():
            for now, pieces in chain.takes(left, room, limit, rest):
                joined = accumulate_worth(worth, [time[end] - time[first] for first, end in pieces])
                if now not in reached or joined < reached[now][0]:
                    reached[now] = joined, (now[0], (now[1], trail))
        front = reached
    done = [found for left, found in front.items() if chain.is_done(left)]
    if not done:
        return None
    worth, trail = min(done, key=lambda found: found[0])
    ends = {0, len(loads.time) - 1}
    return worth, tuple(sorted({*chain.start, *_numbers(trail)} - ends))


def _numbers(trail: Trail) -> Iterator[int]:
    while trail:
        number, trail = trail
        yield number
