"""The best cuts for a loop of two rounds, where each rank has a stage of the first half of the model and one of the second.

Where the second half begins is tried out: with that known, what is left after some ranks is described by two numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerobubble.partition.exact import Left, faster, slowest_rank, smoothest
from zerobubble.partition.layers import Cuts
from zerobubble.partition.room import Loads, Pieces, Room

MOST_CUTS = 600
"""Up to how many layers times ranks every cut is covered, which takes about a second."""


@dataclass(frozen=True)
class TwoRounds:
    """Each rank takes a stage of the layers before `middle`, and one of those behind it. Left are the layers from two numbers on."""

    loads: Loads
    rooms: Sequence[Room]
    middle: int

    @property
    def start(self) -> Left:
        return 0, self.middle

    def is_done(self, left: Left) -> bool:
        return left == (self.middle, len(self.loads.time) - 1)

    def takes(self, left: Left, room: Room, limit: int, rest: int) -> Iterator[tuple[Left, Pieces]]:
        work, time, (here, there), last = self.loads.time, room.time(self.loads), left, len(self.loads.time) - 1
        for front in range(here + 1, min(self.middle, bisect_right(time, time[here] + limit) - 1) + 1):
            most = limit - (time[front] - time[here])
            lowest = max(there + 1, bisect_left(work, work[self.middle] - work[front] + work[last] - rest))
            if room.missing(self.loads, [(here, front)]):
                return
            for back in range(lowest, min(last, bisect_right(time, time[there] + most) - 1) + 1):
                pieces = [(here, front), (there, back)]
                if room.missing(self.loads, pieces):
                    break
                yield (front, back), pieces


def two_rounds(loads: Loads, rooms: Sequence[Room], enough: int) -> tuple[Cuts, bool] | None:
    """Cuts with the fastest slowest rank, and that they are the best; None where none fits, and where there are too many to cover all.

    `rooms` are those of the ranks in the order of a round. Cuts whose slowest rank takes `enough` ns are known to be the best.
    """
    ranks, layers = len(rooms), len(loads.time) - 1
    if ranks * layers > MOST_CUTS:
        return None
    middles = sorted(range(ranks, layers - ranks + 1), key=lambda middle: abs(2 * loads.time[middle] - loads.time[-1]))
    chains = [TwoRounds(loads, rooms, middle) for middle in middles]
    slowest = None
    for chain in chains:
        found = slowest_rank(chain) if slowest is None else faster(chain, slowest - 1)
        slowest = slowest if found is None else found
        if slowest == enough:
            break
    if slowest is None:
        return None
    _, cuts = min(smooth for chain in chains if (smooth := smoothest(chain, slowest)) is not None)
    return cuts, True
