"""Cuts for any placement, by descent: move a layer along a run of stages as long as that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from zerobubble.partition.exact import Loads
from zerobubble.partition.layers import Cuts

Score = tuple[int, int, int, int]
"""Bytes over the memory, the largest rank time in ns, and how rough the ranks and the stages are (sums of squares)."""


def descend(loads: Loads, home: Sequence[int], memory_limits: Sequence[int] | None, cuts: Cuts) -> tuple[Score, Cuts]:
    """The cuts reached from `cuts` for stages on the ranks `home`, where no move makes the score less.

    `memory_limits[r]` is what rank r may hold in bytes; None for no limits.
    """
    best = score(loads, home, memory_limits, cuts)
    improved = True
    while improved:
        improved = False
        for moved in moves(cuts, len(loads.time) - 1):
            now = score(loads, home, memory_limits, moved)
            if now < best:
                best, cuts, improved = now, moved, True
                break
    return best, cuts


def moves(cuts: Cuts, num_layers: int) -> Iterator[Cuts]:
    """The cuts with one layer moved across each cut of a run, forwards or back, no stage left empty."""
    for first in range(len(cuts)):
        for end in range(first + 1, len(cuts) + 1):
            for step in (-1, 1):
                moved = (*cuts[:first], *(cut + step for cut in cuts[first:end]), *cuts[end:])
                if all(before < after for before, after in pairwise((0, *moved, num_layers))):
                    yield moved


def score(loads: Loads, home: Sequence[int], memory_limits: Sequence[int] | None, cuts: Cuts) -> Score:
    """How good the cuts are; less is better."""
    edges = (0, *cuts, len(loads.time) - 1)
    busy, held, rough = [0] * (max(home) + 1), [0] * (max(home) + 1), 0
    for rank, (begin, end) in zip(home, pairwise(edges), strict=True):
        time = loads.time[end] - loads.time[begin]
        busy[rank] += time
        held[rank] += loads.memory[end] - loads.memory[begin]
        rough += time * time
    over = 0 if memory_limits is None else sum(max(0, have - cap) for have, cap in zip(held, memory_limits, strict=True))
    return over, max(busy), sum(time * time for time in busy), rough
