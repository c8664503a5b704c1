"""The bounds of a whole placement: a claim for each rank and pair of visits, and the strongest of them in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from zerobubble.arguments import WHOLE, optional, takes
from zerobubble.bounds.chain import RankPasses, Window, earliest_starts, ends, passes_by_rank, spans_of
from zerobubble.bounds.memory import memory_energy, memory_wait
from zerobubble.bounds.reasons import energy_reason, head_and_tail_reason, head_reason, memory_wait_reason
from zerobubble.costs import Costs, Limits
from zerobubble.display import clipped
from zerobubble.errors import InputError
from zerobubble.ir import Placement
from zerobubble.units import show_ms


class Bound(NamedTuple):
    """No schedule takes less than `time` (ns), because of `reason`, in words with figures."""

    time: int
    reason: str

    def __repr__(self) -> str:
        return clipped(f"<Bound at least {show_ms(self.time)}: {self.reason}>", ">")

    def __str__(self) -> str:
        return f"at least {show_ms(self.time)}: {self.reason}"


class Bounds(NamedTuple):
    """Lower bounds on the longest span of a rank and on the makespan."""

    span: Bound
    makespan: Bound

    def __repr__(self) -> str:
        return f"<Bounds span at least {show_ms(self.span.time)}, makespan at least {show_ms(self.makespan.time)}>"

    def __str__(self) -> str:
        return f"span {self.span}\nmakespan {self.makespan}"


@takes(placement=Placement, num_microbatches=WHOLE, costs=Costs, limits=optional(Limits))
def lower_bounds(placement: Placement, num_microbatches: int, costs: Costs, limits: Limits | None) -> Bounds:
    """Times that no schedule of passes one at a time can beat; `limits=None` stands for unlimited memory.

    Where `shortage` finds that nothing fits, the bounds are those of a limit that holds one microbatch.
    Raises `InputError` for parts that do not fit each other, and for a placement of several routes.
    """
    _check(placement, costs, limits)
    if num_microbatches < 1:
        raise InputError(f"a bound needs at least 1 microbatch, got {num_microbatches}")
    chain = earliest_starts(placement, costs)
    by_rank = passes_by_rank(placement, num_microbatches, costs, limits, chain)
    spans = [claim for here in by_rank for claim in _rank_alone(here, here.starts[0])]
    makespans = [claim for here in by_rank for claim in _rank_alone(here, 0)]
    for window in spans_of(by_rank, chain, costs):
        spans.append(_in_window(by_rank, window, spans))
    makespans.append(_in_window(by_rank, Window(None, 0, 0, ends(chain, chain, costs)), spans + makespans))
    return Bounds(_strongest(spans), _strongest(spans + makespans))


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


def _strongest(claims: Sequence[Claim]) -> Bound:
    best = max(claims, key=lambda claim: claim.time)
    return Bound(best.time, best.why())


def _rank_alone(here: RankPasses, begin: int) -> Iterator[Claim]:
    """What the rank needs from its first pass to its last, or from time 0 if that is `begin`."""
    load = here.load
    for visit, start in enumerate(here.starts):
        yield Claim(start - begin + load.work - load.before[visit], partial(head_reason, here, visit, start - begin - load.before[visit]))
    full = memory_energy(load, here.starts)
    yield Claim(here.starts[0] - begin + full, partial(energy_reason, here, full))


def _in_window(by_rank: Sequence[RankPasses], window: Window, known: Sequence[Claim]) -> Claim:
    """The strongest claim about `window`, those that are `known` among them."""
    claims = [*known, *(claim for here in by_rank for claim in _head_and_tail(here, window))]
    best = max(claims, key=lambda claim: claim.time)
    return max([best, *_waits_for_memory(by_rank, window, best.time)], key=lambda claim: claim.time)


def _head_and_tail(here: RankPasses, window: Window) -> Iterator[Claim]:
    """Head and tail: what `window` needs for the first microbatch to reach the rank, for its work, and for the last to return."""
    load, visits = here.load, range(len(here.passes))
    for last in visits:
        back = window.ends[here.places[last]] - here.starts[last]
        if not window.ends[here.places[last]]:
            continue
        for first in visits:
            if here.places[first] >= window.place and load.in_order[first][last]:
                there = here.starts[first] - window.start
                between = load.work - load.before[first] - load.after[last] - load.pass_times[last]
                yield Claim(there + max(0, between) + back, partial(head_and_tail_reason, here, window, first, last))


def _waits_for_memory(by_rank: Sequence[RankPasses], window: Window, enough: int) -> Iterator[Claim]:
    """What `window` needs so that forwards find room, each claim stronger than `enough` and the one before."""
    for here in by_rank:
        for visit in range(here.load.num_stages):
            unhindered = window.ends[here.places[visit]] - window.start
            between = memory_wait(here.load, here.starts, visit, enough - unhindered) if here.places[visit] >= window.place else 0
            if unhindered + between > enough:
                enough = unhindered + between
                yield Claim(enough, partial(memory_wait_reason, here, visit, between))
