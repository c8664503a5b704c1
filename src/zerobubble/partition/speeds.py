"""Relative speeds of ranks and links, and the times of layers and messages at a speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from zerobubble.arguments import NUMBER, as_tuple
from zerobubble.costs import Costs
from zerobubble.errors import InputError, shown
from zerobubble.ir import Placement

Speeds = tuple[float, ...]
"""The speed of each rank relative to the times of the layers: 0.5 takes twice as long. Empty if all are 1."""

Links = tuple[float, ...]
"""The speed of the link from each rank to the next; the last link goes from the last rank to the first. Empty if all are 1."""

FASTEST = 1_000_000
"""The largest speed of a rank or link, and the inverse of the smallest. Outside this range, times in ns round to 0 or overflow."""

EACH_RANK = "a list or tuple with a number for each rank"
EACH_LINK = "a list or tuple with a number for each link: between neighbors, and from the last rank to the first"


def as_speeds(speeds: Sequence[float], num_ranks: int) -> Speeds:
    """Returns the relative `speeds` of `num_ranks` ranks as floats; empty if all are 1, so that such problems equal those without speeds.

    Raises `InputError` for a wrong number of speeds, and for a speed that is not a number from 1e-6 to 1e6.
    """
    return _relative("speeds", speeds, num_ranks, EACH_RANK, "of rank", "for the times of the layers")


def as_links(speeds: Sequence[float], num_ranks: int) -> Links:
    """Returns the relative `speeds` of the links of `num_ranks` ranks, checked like those of ranks by `as_speeds`; empty if all are 1."""
    return _relative("links", speeds, num_ranks, EACH_LINK, "of the link after rank", "for the times given")


def _relative(argument: str, values: Sequence[float], num_ranks: int, words: str, owner: str, normal: str) -> tuple[float, ...]:
    speeds = as_tuple(argument, values, words)
    for rank, speed in enumerate(speeds):
        if not NUMBER.accepts(speed) or not 1 / FASTEST <= speed <= FASTEST:
            wanted = f"the speed {owner} {rank} must be a number from {1 / FASTEST:.6f} to {FASTEST:,}, got {shown(speed)}"
            raise InputError("{wanted}", wanted=wanted, remedy=f"give 1 {normal}, 0.5 for twice as long")
    if speeds and len(speeds) != num_ranks:
        sentence = f"there are {{expected}} ranks, but {{count}} {argument} were given, {{got!v}}"
        raise InputError(sentence, expected=num_ranks, count=len(speeds), got=speeds, remedy=f"give {words}")
    return () if all(speed == 1 for speed in speeds) else tuple(map(float, speeds))


def speed_of(rank: int, speeds: Speeds) -> float:
    """Returns the speed of a rank; 1 if `speeds` is empty."""
    return speeds[rank] if speeds else 1.0


def at_speed(time: int, speed: float) -> int:
    """Returns the ns that work of `time` ns takes at this speed, rounded."""
    return time if speed == 1 else round(time / speed)


def link_between(here: int, there: int, num_ranks: int) -> int:
    """Returns the link between two ranks: the one after the lower rank, or the last one, which closes the ring."""
    low, high = sorted((here, there))
    return num_ranks - 1 if high - low == num_ranks - 1 and num_ranks > 2 else low


def at_links(costs: Costs, placement: Placement, links: Links) -> Costs:
    """Returns the costs with the times of messages at these link speeds. They are valid on `placement` only."""
    if not links:
        return costs
    speeds = [links[link_between(here, there, placement.num_ranks)] for here, there in pairwise(placement.routes[0])]
    comm = tuple(at_speed(time, speed) for time, speed in zip(costs.comm, speeds, strict=True))
    return replace(costs, comm=comm, placement=costs.placement or placement)
