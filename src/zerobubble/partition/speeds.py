"""Speeds of ranks relative to the one on which layers were measured, and what layers take at a speed."""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.arguments import NUMBER, as_tuple
from zerobubble.errors import InputError, shown

Speeds = tuple[float, ...]
"""The speed of each rank: 1 runs passes in the times of the layers, 0.5 takes twice as long. Empty where all ranks have speed 1."""

FASTEST = 1_000_000
"""The largest speed of a rank; the smallest is one over it. Beyond, times in ns round to 0 or overflow."""

EACH_RANK = "a list or tuple with a number for each rank"


def as_speeds(given: Sequence[float], num_ranks: int) -> Speeds:
    """The speeds `given` for `num_ranks` ranks; empty where all are 1, so that these problems are equal to those without speeds.

    Raises `InputError` for another count of them, and for one that is no number from a millionth to a million.
    """
    speeds = as_tuple("speeds", given, EACH_RANK)
    for rank, speed in enumerate(speeds):
        if not NUMBER.accepts(speed) or not 1 / FASTEST <= speed <= FASTEST:
            raise InputError(
                f"the speed of rank {rank} must be a number from {1 / FASTEST:.6f} to {FASTEST:,}, got {shown(speed)}: give 1 to a rank "
                "that takes the times of the layers, 0.5 to one that takes twice as long"
            )
    if speeds and len(speeds) != num_ranks:
        raise InputError(f"there are {num_ranks} ranks, and speeds of {len(speeds)} were given, {shown(speeds)}: give one for each rank")
    return () if all(speed == 1 for speed in speeds) else tuple(map(float, speeds))


def speed_of(rank: int, speeds: Speeds) -> float:
    """The speed of a rank, 1 where there are none."""
    return speeds[rank] if speeds else 1.0


def at_speed(time: int, speed: float) -> int:
    """The ns that something of `time` ns takes at a speed, rounded."""
    return time if speed == 1 else round(time / speed)


def show_speeds(speeds: Speeds) -> str:
    """The speeds with commas between, as the command line takes them."""
    return ",".join(f"{speed:g}" for speed in speeds)
