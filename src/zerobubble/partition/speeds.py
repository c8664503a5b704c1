"""Speeds of ranks and links relative to those on which times were measured, and what layers and messages take at a speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from zerobubble.arguments import NUMBER, as_tuple
from zerobubble.costs import Costs
from zerobubble.errors import InputError, shown
from zerobubble.ir import Placement

Speeds = tuple[float, ...]
"""The speed of each rank: 1 runs passes in the times of the layers, 0.5 takes twice as long. Empty where all ranks have speed 1."""

Links = tuple[float, ...]
"""The speed of each link, from rank r to r + 1 and last from the last rank to the first: at 0.5 messages take twice as long. Empty where
all links have speed 1."""

FASTEST = 1_000_000
"""The largest speed of a rank or link; the smallest is one over it. Beyond, times in ns round to 0 or overflow."""

EACH_RANK = "a list or tuple with a number for each rank"
EACH_LINK = "a list or tuple with a number for each link"


def as_speeds(given: Sequence[float], num_ranks: int) -> Speeds:
    """The speeds `given` for `num_ranks` ranks; empty where all are 1, so that these problems are equal to those without speeds.

    Raises `InputError` for another count of them, and for one that is no number from a millionth to a million.
    """
    speeds = as_tuple("speeds", given, EACH_RANK)
    _require_speeds(speeds, "of rank {}", "to a rank that takes the times of the layers")
    if speeds and len(speeds) != num_ranks:
        raise InputError(f"there are {num_ranks} ranks, and speeds of {len(speeds)} were given, {shown(speeds)}: give one for each rank")
    return () if all(speed == 1 for speed in speeds) else tuple(map(float, speeds))


def as_links(given: Sequence[float], num_ranks: int) -> Links:
    """The speeds `given` for the links of `num_ranks` ranks; empty where all are 1. Raises `InputError` as `as_speeds` does."""
    links = as_tuple("links", given, EACH_LINK)
    _require_speeds(links, "of the link after rank {}", "to a link whose messages take the times given")
    if links and len(links) != num_ranks:
        wanted = f"{num_ranks} ranks have as many links, the last from the last rank to the first"
        raise InputError(f"{wanted}, and speeds of {len(links)} were given, {shown(links)}: give one for each link")
    return () if all(speed == 1 for speed in links) else tuple(map(float, links))


def _require_speeds(speeds: Sequence[float], of: str, normal: str) -> None:
    for place, speed in enumerate(speeds):
        if not NUMBER.accepts(speed) or not 1 / FASTEST <= speed <= FASTEST:
            wanted = f"the speed {of.format(place)} must be a number from {1 / FASTEST:.6f} to {FASTEST:,}, got {shown(speed)}"
            raise InputError(f"{wanted}: give 1 {normal}, 0.5 to one that takes twice as long")


def speed_of(rank: int, speeds: Speeds) -> float:
    """The speed of a rank, 1 where there are none."""
    return speeds[rank] if speeds else 1.0


def at_speed(time: int, speed: float) -> int:
    """The ns that something of `time` ns takes at a speed, rounded."""
    return time if speed == 1 else round(time / speed)


def link_between(here: int, there: int, num_ranks: int) -> int:
    """The link between two ranks: the one after the lower rank, or the last one, which closes the ring."""
    low, high = sorted((here, there))
    return num_ranks - 1 if high - low == num_ranks - 1 and num_ranks > 2 else low


def at_links(costs: Costs, placement: Placement, links: Links) -> Costs:
    """The costs of stages on `placement` with the times of messages over links of these speeds; they are for that placement only."""
    if not links:
        return costs
    over = [links[link_between(here, there, placement.num_ranks)] for here, there in pairwise(placement.routes[0])]
    comm = tuple(at_speed(time, speed) for time, speed in zip(costs.comm, over, strict=True))
    return replace(costs, comm=comm, placement=costs.placement or placement)


def show_speeds(speeds: Speeds) -> str:
    """The speeds with commas between, as the command line takes them."""
    return ",".join(f"{speed:g}" for speed in speeds)
