"""Bounds of a whole placement: claims for every rank, the strongest of which becomes the bound.

A claim about a rank is the sum of three times: for a microbatch to reach the rank (the head), for the rank's work, and for a microbatch to
return from it (the tail). Memory limits the work that overlaps with head and tail, and may delay forwards. Each claim is valid for every
legal schedule, so their maximum is a lower bound.

A visit is one pass, F or B, of a microbatch on a rank, numbered in the order in which a microbatch makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from zerobubble.arguments import takes
from zerobubble.bounds.bound import Bound, Bounds, strongest
from zerobubble.bounds.chain import (
    BoundedTime,
    ChainNeeds,
    RankPasses,
    chain_needs,
    first_starts,
    passes_by_rank,
    spans_of,
    starts_of,
    whole_step,
)
from zerobubble.bounds.memory import memory_energy, memory_wait
from zerobubble.bounds.microbatch_starts import MicrobatchStarts
from zerobubble.bounds.one_machine import busy_ranks
from zerobubble.bounds.overlap import remark_on_savings, saves_time, without_savings
from zerobubble.bounds.reasons import (
    busy_reason,
    full_memory_reason,
    head_and_tail_reason,
    head_reason,
    memory_wait_reason,
    starts_reason,
    work_reason,
)
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Kind, Placement
from zerobubble.units import counted, show_bytes

WORK = (Kind.F, Kind.B, Kind.W)
"""The kinds of passes that every rank runs for each microbatch and stage."""

MOST_THRESHOLDS = 8
"""Thresholds on the share for which a bound is computed."""


def bounds_with_delay(placement: Placement, num_microbatches: int, costs: Costs, limits: Limits | None, delay: int) -> Bounds:
    """Like `lower_bounds` for whole microbatches, with `delay` ns between the last stage's F and its B, and without sums over replicas.

    With shares, the delay is ignored.
    """
    check_parts(placement, costs, limits)
    costs.require_whole("a bound")
    if num_microbatches < 1:
        raise InputError("a bound needs at least 1 microbatch, got {num_microbatches}", num_microbatches=num_microbatches)
    if costs.shares and len(costs.shares) != num_microbatches:
        message = "a bound for {num_microbatches} microbatches needs as many shares, the costs have {num_shares}"
        raise InputError(message, num_microbatches=num_microbatches, num_shares=len(costs.shares))
    if saves_time(costs):
        alone = [bounds_with_delay(placement, num_microbatches, unsaved, limits, delay) for unsaved in without_savings(placement, costs)]
        return strongest(alone).with_remark(remark_on_savings(costs))
    if not costs.shares:
        return _bounds_of_equal(placement, num_microbatches, costs, limits, delay)
    return bounds_with_shares(placement, costs, WORK, lambda count, share: _bounds_of_equal(placement, count, costs.scaled(share), limits))


def _bounds_of_equal(placement: Placement, num_microbatches: int, costs: Costs, limits: Limits | None, delay: int = 0) -> Bounds:
    """Bounds for microbatches of equal cost."""
    needs = chain_needs(placement, costs, delay)
    chain = starts_of(needs)
    by_rank = passes_by_rank(placement, num_microbatches, costs, limits, chain)
    spans = [claim for here in by_rank for claim in _claims_of_rank(here, here.starts[0])]
    makespans = [claim for here in by_rank for claim in _claims_of_rank(here, 0)]
    rank_spans = spans_of(by_rank, chain, costs)
    for window in rank_spans:
        spans.append(_strongest_within(window, by_rank, spans))
    makespan = whole_step(chain, costs)
    makespans.append(_strongest_within(makespan, by_rank, spans + makespans))
    starts = MicrobatchStarts(needs, num_microbatches, by_rank)
    for claims, windows in ((spans, [window for window in rank_spans if window.place == 0]), (makespans, [makespan])):
        claims += [claim for window in windows for claim in _claims_from_starts(needs, starts, by_rank, window)]
    return Bounds(_strongest(spans), _strongest(spans + makespans))


def bounds_with_shares(
    placement: Placement, costs: Costs, kinds: Sequence[Kind], bounds_of_equal: Callable[[int, float], Bounds]
) -> Bounds:
    """Bounds for microbatches with shares, in any order; `bounds_of_equal(count, share)` bounds equal microbatches.

    The work of each rank, passes of these `kinds`, counts in full. Microbatches of at least some share take at least as long as the same
    number of exactly that share.
    """
    starts = first_starts(placement, costs.scaled(min(costs.shares)))
    spans, makespans = (_work_claims(placement, costs, kinds, begins) for begins in ([0] * placement.num_ranks, starts))
    for share in _thresholds(costs.shares):
        count = sum(other >= share for other in costs.shares)
        which = f"{counted(count, 'microbatch')} of share {share:g} or more"
        bounds = bounds_of_equal(count, share)
        spans.append(Claim(bounds.span.time, partial("{}: {}".format, which, bounds.span.reason)))
        makespans.append(Claim(bounds.makespan.time, partial("{}: {}".format, which, bounds.makespan.reason)))
    return Bounds(_strongest(spans), _strongest(spans + makespans))


def _work_claims(placement: Placement, costs: Costs, kinds: Sequence[Kind], begins: Sequence[int]) -> list[Claim]:
    """For each rank, the earliest time at which it can begin plus the time of all its passes of these kinds, in ns."""
    works = placement.rank_sums([sum(sum(costs.times(kind, stage)) for kind in kinds) for stage in range(placement.num_stages)])
    times = enumerate(zip(works, begins, strict=True))
    return [Claim(begin + work, partial(work_reason, rank, work, begin)) for rank, (work, begin) in times]


def _thresholds(shares: Sequence[float]) -> list[float]:
    """Up to `MOST_THRESHOLDS` of the shares, including the smallest and the largest."""
    distinct = sorted(set(shares))
    step = max(1, (len(distinct) - 1) / (MOST_THRESHOLDS - 1))
    return [distinct[round(place * step)] for place in range(min(len(distinct), MOST_THRESHOLDS))]


@takes()
def shortage(placement: Placement, costs: Costs, limits: Limits | None, sizes: Sequence[int] = ()) -> str:
    """Names every rank of `placement` that cannot hold one microbatch within `limits`, with the missing memory; empty if one fits.

    `costs` give the bytes that stages hold; `limits=None` stands for unlimited memory. Before a rank can start the first backward of a
    microbatch, it holds what all its stages saved for it. If microbatches are of unequal cost, the largest one counts. With `sizes`, the
    bytes of a microbatch on each rank, figures are in microbatches.
    """
    check_parts(placement, costs, limits)
    which = "the largest" if costs.shares else "one"
    costs = costs.scaled(max(costs.shares)) if costs.shares else costs
    needed = placement.rank_sums(costs.held_after_f)
    return shortage_text(needed, limits.memory if limits else needed, sizes, which)


def shortage_text(needed: Sequence[int], memory: Sequence[int], sizes: Sequence[int], which: str = "one") -> str:
    """Names the ranks that need more bytes for one microbatch than they have; in microbatches if `sizes` are given."""
    lacks = [(rank, need, limit) for rank, (need, limit) in enumerate(zip(needed, memory, strict=True)) if need > limit]
    ranks_by_lack: dict[str, list[int]] = {}
    for rank, need, limit in lacks:
        if sizes:
            has = counted(limit / sizes[rank], "microbatch")
            lack = f"has memory for {has} and needs memory for {need / sizes[rank]:.4g} to run {which} alone"
        else:
            show = partial(counted, noun="byte") if show_bytes(need) == show_bytes(limit) else show_bytes
            lack = f"needs {show(need)} for one microbatch, {show(need - limit)} more than its limit of {show(limit)}"
        ranks_by_lack.setdefault(lack, []).append(rank)
    return "; ".join(f"{_named(ranks, len(needed))} {lack}" for lack, ranks in ranks_by_lack.items())


def _named(ranks: Sequence[int], num_ranks: int) -> str:
    """The ranks as a singular subject of a sentence."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == num_ranks:
        return "every rank"
    is_run = ranks[-1] - ranks[0] == len(ranks) - 1 and len(ranks) > 2
    return f"each of ranks {f'{ranks[0]} to {ranks[-1]}' if is_run else ', '.join(map(str, ranks))}"


def check_parts(placement: Placement, costs: Costs, limits: Limits | None) -> None:
    """Raises `InputError` for arguments that do not match, and for a placement of several routes."""
    if len(placement.routes) > 1:
        message = "bounds are known for one route, the placement {placement!r} has {placement_routes}"
        raise InputError(message, placement=placement.name, placement_routes=len(placement.routes))
    costs.require_fit(placement, "the placement")
    if limits is not None:
        limits.require_ranks(placement.num_ranks, "the placement")


class Claim(NamedTuple):
    """A lower bound in ns, and a function that gives its reason."""

    time: int
    why: Callable[[], str]


def _strongest(claims: Sequence[Claim]) -> Bound:
    best = max(claims, key=_time_of)
    return Bound(best.time, best.why())


def _time_of(claim: Claim) -> int:
    return claim.time


def _claims_of_rank(here: RankPasses, begin: int) -> Iterator[Claim]:
    """Bounds the ns from `begin` to the end of the rank's last pass by the rank's own work.

    `begin` is the earliest start of the rank's first pass for its span, and 0 for the makespan.
    """
    load = here.load
    for visit, start in enumerate(here.starts):
        idle = start - begin - load.before[visit]
        yield Claim(idle + load.work, partial(head_reason, here, visit, idle))
    full = memory_energy(load, here.starts)
    yield Claim(here.starts[0] - begin + full, partial(full_memory_reason, here, full))


def _strongest_within(window: BoundedTime, by_rank: Sequence[RankPasses], claims: Sequence[Claim]) -> Claim:
    """Returns the strongest claim about the length of `window`, among `claims` and the claims of each rank."""
    claims = [*claims, *(claim for here in by_rank for claim in _claims_of_head_and_tail(here, window))]
    best = max(claims, key=_time_of)
    return max([best, *_claims_of_memory_wait(by_rank, window, best.time)], key=_time_of)


def _claims_of_head_and_tail(here: RankPasses, window: BoundedTime) -> Iterator[Claim]:
    """For each pair of visits: the time until the `first`, the work that lies between, and the time from the `last` to the end.

    A claim holds if some microbatch makes the `first` visit before the last microbatch makes the `last`.
    """
    load, visits = here.load, range(len(here.passes))
    for last in visits:
        end = window.ends[here.places[last]]
        if not end:  # no W inside the window follows this visit
            continue
        tail = end - here.starts[last]
        for first in visits:
            if here.places[first] >= window.place and load.in_order[first][last]:
                head = here.starts[first] - window.start
                between = load.work - load.before[first] - load.after[last] - load.pass_times[last]
                yield Claim(head + max(0, between) + tail, partial(head_and_tail_reason, here, window, first, last))


def _claims_from_starts(needs: ChainNeeds, starts: MicrobatchStarts, by_rank: Sequence[RankPasses], window: BoundedTime) -> Iterator[Claim]:
    """Claims from the earliest starts of the last microbatch and from busy ranks, for a window that begins with the first pass of all
    ranks.
    """
    event = "all ranks end" if window.rank is None else f"rank {window.rank} ends"
    for here in by_rank:
        after: dict[int | None, int] = {
            visit: window.ends[place] - here.starts[visit] for visit, place in enumerate(here.places) if window.ends[place]
        }
        if window.rank in (None, here.rank):
            after[None] = 0
        for visit, tail in after.items():
            why = partial(starts_reason, starts, here.rank, visit, tail, event)
            yield Claim(starts.last(here.rank, visit) + tail, why)
    for busy in busy_ranks(needs, starts, by_rank, window):
        yield Claim(busy.time, partial(busy_reason, busy, event))


def _claims_of_memory_wait(by_rank: Sequence[RankPasses], window: BoundedTime, threshold: int) -> Iterator[Claim]:
    """Claims that the forwards of a visit wait for memory, each stronger than `threshold` (ns) and than the claim before.

    Weaker ones are skipped because they are expensive to compute.
    """
    strongest = threshold
    for here in by_rank:
        for visit in range(here.load.num_stages):
            if here.places[visit] < window.place:
                continue
            one_microbatch = window.ends[here.places[visit]] - window.start
            wait = memory_wait(here.load, here.starts, visit, strongest - one_microbatch)
            if one_microbatch + wait > strongest:
                strongest = one_microbatch + wait
                yield Claim(strongest, partial(memory_wait_reason, here, visit, wait))
