"""Where no cuts fit the memory: how much more each rank needs, and so what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from zerobubble.partition.descent import descend
from zerobubble.partition.exact import FromTheEnds, faster
from zerobubble.partition.layers import Cuts
from zerobubble.partition.room import Loads, Room
from zerobubble.units import show_bytes

_FINE = 200
"""The bytes that are missing are found out to this part of what a rank may hold."""


def shortage_text(loads: Loads, home: Sequence[int], rooms: Sequence[Room], even: Cuts) -> str:
    """By how much the ranks are too small for any cuts, and what would fit, in a sentence.

    `rooms[r]` is that of rank r. Where a rank has several stages, the cuts that need least are looked for near the `even` ones, with which
    ranks hold about as much as each other.
    """
    missing = _missing_in_turn(loads, home, rooms) if len(home) == len(rooms) else _missing_nearby(loads, home, rooms, even)
    limits = [room.limit for room in rooms if room.limit is not None]
    ends = (min(limits), max(limits))
    given = " to ".join(dict.fromkeys(map(show_bytes, ends)))
    wanted = " to ".join(dict.fromkeys(show_bytes(_rounded_up(limit + missing)) for limit in ends))
    return (
        f"no cuts fit the memory limits of {given} on a rank: with {show_bytes(_rounded_up(missing))} more on each, {wanted}, some do; "
        "give that, use more ranks, or keep fewer microbatches in flight"
    )


def _rounded_up(count: int) -> int:
    """Three digits of a number of bytes, no less than it."""
    step: int = 10 ** max(0, len(str(count)) - 3)
    return -(-count // step) * step


def bytes_as_time(loads: Loads) -> Loads:
    """The loads with what the layers hold, all together, in the place of the time that they take."""
    return replace(loads, time=[kept + saved for kept, saved in zip(loads.parameters, loads.saved, strict=True)])


def _missing_in_turn(loads: Loads, home: Sequence[int], rooms: Sequence[Room]) -> int:
    """The bytes that each rank of one stage lacks, to a small part of the room."""

    def fits(more: int) -> bool:
        chain = FromTheEnds(loads, [_larger(rooms[rank], more) for rank in home], False)
        return faster(chain, loads.time[-1]) is not None

    step = max(1, max(room.limit or 0 for room in rooms) // _FINE)
    least, most = 0, step
    while not fits(most):
        least, most = most, 2 * most
    while most - least > step:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(middle) else (middle, most)
    return most


def _larger(room: Room, more: int) -> Room:
    return room if room.limit is None else replace(room, limit=room.limit + more)


def _missing_nearby(loads: Loads, home: Sequence[int], rooms: Sequence[Room], even: Cuts) -> int:
    """The bytes that the rank that lacks most lacks, with the cuts that lack least."""
    return min(_lacking(loads, home, rooms, cuts) for cuts in (even, descend(loads, home, rooms, even)[1]))


def _lacking(loads: Loads, home: Sequence[int], rooms: Sequence[Room], cuts: Cuts) -> int:
    edges = (0, *cuts, len(loads.time) - 1)
    stages = list(zip(home, pairwise(edges), strict=True))
    return max(room.missing(loads, [piece for rank, piece in stages if rank == here]) for here, room in enumerate(rooms))
