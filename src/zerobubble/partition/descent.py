"""Cuts for any placement, by descent: move a layer along a short run of stages as long as that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from zerobubble.partition.layers import Cuts
from zerobubble.partition.room import Loads, Room

Score = tuple[int, int, int, int]
"""Bytes over the memory, the largest rank time in ns, and how rough the ranks and the stages are (sums of squares)."""


LONGEST_RUN = 2
"""Cuts that a descent moves at once, at most; longer runs are left to the annealing."""


def descend(loads: Loads, home: Sequence[int], rooms: Sequence[Room], cuts: Cuts) -> tuple[Score, Cuts]:
    """The cuts reached from `cuts` for stages on the ranks `home`, where no move makes the score less. `rooms[r]` is that of rank r."""
    best = score(loads, home, rooms, cuts)
    improved = True
    while improved:
        improved = False
        for moved in moves(cuts, len(loads.time) - 1, LONGEST_RUN):
            now = score(loads, home, rooms, moved)
            if now < best:
                best, cuts, improved = now, moved, True
                break
    return best, cuts


def moves(cuts: Cuts, num_layers: int, longest: int | None = None) -> Iterator[Cuts]:
    """The cuts with one layer moved across each cut of a run, forwards or back, no stage left empty; runs have `longest` cuts at most."""
    for first in range(len(cuts)):
        for end in range(first + 1, min(len(cuts), first + (longest or len(cuts))) + 1):
            for step in (-1, 1):
                moved = (*cuts[:first], *(cut + step for cut in cuts[first:end]), *cuts[end:])
                if all(before < after for before, after in pairwise((0, *moved, num_layers))):
                    yield moved


def score(loads: Loads, home: Sequence[int], rooms: Sequence[Room], cuts: Cuts) -> Score:
    """How good the cuts are; less is better."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in rooms]
    rough = 0
    for rank, (begin, end) in zip(home, pairwise((0, *cuts, len(loads.time) - 1)), strict=True):
        pieces[rank].append((begin, end))
        rough += rooms[rank].work(loads, [(begin, end)]) ** 2
    busy = [room.work(loads, stages) for room, stages in zip(rooms, pieces, strict=True)]
    over = sum(room.missing(loads, stages) for room, stages in zip(rooms, pieces, strict=True))
    return over, max(busy), sum(time * time for time in busy), rough
