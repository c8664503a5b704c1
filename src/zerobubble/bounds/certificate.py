"""The bounds of a whole placement: what each rank must wait for, and the strongest argument in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from zerobubble.bounds.chain import Home, Window, alone, ends, homes_of, spans_of
from zerobubble.bounds.memory import area, steps
from zerobubble.bounds.reasons import tell_area, tell_room, tell_wait, tell_waits
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement


class Bound(NamedTuple):
    """No schedule takes less than `time` (ns), because of `reason`, in words with figures."""

    time: int
    reason: str


class Bounds(NamedTuple):
    """Lower bounds on the longest span of a rank and on the makespan."""

    span: Bound
    makespan: Bound


def lower_bounds(placement: Placement, num_microbatches: int, costs: Costs, limits: Limits | None) -> Bounds:
    """Times that no schedule of passes one at a time can beat; `limits=None` stands for unlimited memory.

    Where `shortage` finds that nothing fits, the bounds are those of a limit that holds one microbatch.
    Raises `InputError` for parts that do not fit each other, and for a placement of several routes.
    """
    _check(placement, costs, limits)
    if num_microbatches < 1:
        raise InputError(f"a bound needs at least 1 microbatch, got {num_microbatches}")
    chain = alone(placement, costs)
    homes = homes_of(placement, num_microbatches, costs, limits, chain)
    spans = [claim for home in homes for claim in _by_itself(home, home.starts[0])]
    makespans = [claim for home in homes for claim in _by_itself(home, 0)]
    for window in spans_of(homes, chain, costs):
        spans.append(_in_window(homes, window, spans))
    makespans.append(_in_window(homes, Window(None, 0, 0, ends(chain, chain, costs)), spans + makespans))
    return Bounds(_told(spans), _told(spans + makespans))


def shortage(placement: Placement, costs: Costs, limits: Limits | None) -> str:
    """Why no schedule fits the limits, naming every rank that cannot hold one microbatch; empty where one microbatch fits.

    Before a rank can start its first backward of a microbatch it holds what all its stages saved for it.
    """
    _check(placement, costs, limits)
    needed = [0] * placement.num_ranks
    for stage, rank in enumerate(placement.routes[0]):
        needed[rank] += costs.held_after_f[stage]
    memory = limits.memory if limits else needed
    lacks = [
        f"rank {rank} needs {need} bytes for one microbatch, {need - limit} more than its limit of {limit}"
        for rank, (need, limit) in enumerate(zip(needed, memory, strict=True))
        if need > limit
    ]
    return "; ".join(lacks)


def _check(placement: Placement, costs: Costs, limits: Limits | None) -> None:
    if len(placement.routes) > 1:
        raise InputError(f"bounds are known for one route, the placement {placement.name!r} has {len(placement.routes)}")
    if costs.num_stages != placement.num_stages:
        raise InputError(f"the placement has {placement.num_stages} stages, the costs describe {costs.num_stages}")
    if limits is not None and len(limits.memory) != placement.num_ranks:
        raise InputError(f"the placement has {placement.num_ranks} ranks, the limits describe {len(limits.memory)}")


class Claim(NamedTuple):
    """A lower bound (ns) and, when it is asked for, why."""

    time: int
    why: Callable[[], str]


def _told(claims: Sequence[Claim]) -> Bound:
    best = max(claims, key=lambda claim: claim.time)
    return Bound(best.time, best.why())


def _by_itself(home: Home, begin: int) -> Iterator[Claim]:
    """What the rank needs from its first pass to its last, or from time 0 if that is `begin`."""
    load = home.load
    for turn, start in enumerate(home.starts):
        yield Claim(start - begin + load.work - load.before[turn], partial(tell_wait, home, turn, start - begin - load.before[turn]))
    full = area(load, home.starts)
    yield Claim(home.starts[0] - begin + full, partial(tell_area, home, full))


def _in_window(homes: Sequence[Home], window: Window, known: Sequence[Claim]) -> Claim:
    """The strongest claim about `window`, those that are `known` among them."""
    claims = [*known, *(claim for home in homes for claim in _seen_from(home, window))]
    best = max(claims, key=lambda claim: claim.time)
    return max([best, *_for_room(homes, window, best.time)], key=lambda claim: claim.time)


def _seen_from(home: Home, window: Window) -> Iterator[Claim]:
    """What `window` needs so that the rank can do its work between the way of the first microbatch to it and that of the last from it."""
    load, turns = home.load, range(len(home.passes))
    for last in turns:
        back = window.ends[home.places[last]] - home.starts[last]
        if not window.ends[home.places[last]]:
            continue
        for first in turns:
            if home.places[first] >= window.place and load.in_turn[first][last]:
                there = home.starts[first] - window.start
                between = load.work - load.before[first] - load.after[last] - load.turns[last]
                yield Claim(there + max(0, between) + back, partial(tell_waits, home, window, first, last))


def _for_room(homes: Sequence[Home], window: Window, enough: int) -> Iterator[Claim]:
    """What `window` needs so that forwards find room, each claim stronger than `enough` and the one before."""
    for home in homes:
        for turn in range(home.load.num_stages):
            alone = window.ends[home.places[turn]] - window.start
            between = steps(home.load, home.starts, turn, enough - alone) if home.places[turn] >= window.place else 0
            if alone + between > enough:
                enough = alone + between
                yield Claim(enough, partial(tell_room, home, turn, between))
