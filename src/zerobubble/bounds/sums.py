"""Sums of gradients over replicas in the bounds: what a rank must sum after its last pass, and after its first complete stage.

The last pass of a rank adds to the gradients of a stage, so that stage, or its last bucket, is summed after all passes of the rank. And
the sums of a rank run one after another, the first of them only after all passes of its stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerobubble.bounds.bound import Bound, Bounds
from zerobubble.bounds.chain import first_starts, total_time
from zerobubble.bounds.overlap import saves_time
from zerobubble.bounds.reasons import work_reason
from zerobubble.costs import Costs
from zerobubble.ir import Kind, Placement
from zerobubble.kinds import traits_of
from zerobubble.units import show_ms


def with_sums(passes: Bounds, placement: Placement, num_microbatches: int, costs: Costs) -> Bounds:
    """The bounds of `passes` alone, raised by what the sums over replicas add.

    >>> import zerobubble as zb
    >>> placement, costs = zb.Placement.linear(2), zb.Costs.uniform(2, times=(10, 10, 10), reduce=100)
    >>> zb.bounds.lower_bounds(placement, 8, costs, None).span.time / 1e6
    340.0
    """
    if not any(costs.reduce):
        return passes
    after = sums_after_passes(placement, costs)
    if saves_time(costs):  # the shortened W of fused or overlapped passes are no times of single stages
        return Bounds(*(after_sums(bound, after) for bound in passes))
    starts = first_starts(placement, costs.scaled(min(costs.shares)) if costs.shares else costs)
    bounds = [after_sums(bound, after) for bound in passes]
    for at, begins in enumerate(([0] * placement.num_ranks, starts)):
        claims = [*_claims(placement, num_microbatches, costs, begins, after), bounds[0]]
        bounds[at] = max([bounds[at], *claims], key=lambda bound: bound.time)
    return Bounds(*bounds)


def after_sums(passes: Bound, after: Sequence[int]) -> Bound:
    """A bound of passes alone, plus the least time of sums `after` the last pass of a rank."""
    least = min(after)
    return Bound(passes.time + least, f"{passes.reason}, and sums over replicas take {show_ms(least)} after them") if least else passes


def sums_after_passes(placement: Placement, costs: Costs) -> list[int]:
    """The least ns that each rank sums after its last pass: one stage, or its last bucket.

    It is 0 with a divided head, because the last pass of a rank may be one of the head.
    """
    if any(name in dict(costs.further) for name in traits_of(Kind.T).times):  # a divided head
        return [0] * placement.num_ranks
    last = [time - time * (count - 1) // count if count > 1 else time for time, count in zip(costs.reduce, costs.buckets, strict=True)]
    return [min(last[stage] for _, stage in placement.stages(rank)) for rank in range(placement.num_ranks)]


def _claims(placement: Placement, num_microbatches: int, costs: Costs, begins: Sequence[int], after: Sequence[int]) -> Iterator[Bound]:
    """For each rank that begins after `begins` ns: all its work and the sums after it, and its first complete stage and all its sums."""
    kinds = (Kind.F, Kind.B, Kind.W)
    stages = [[total_time(costs, kind, stage, num_microbatches) for kind in kinds] for stage in range(placement.num_stages)]
    complete = [sum(times[:2] if count > 1 else times) for times, count in zip(stages, costs.buckets, strict=True)]
    works, sums = placement.rank_sums([sum(times) for times in stages]), placement.rank_sums(costs.reduce)
    for rank, begin in enumerate(begins):
        reason = f"{work_reason(rank, works[rank], begin)}, and {show_ms(after[rank])} of sums over replicas after it"
        yield Bound(begin + works[rank] + after[rank], reason)
        first = min((complete[stage] for _, stage in placement.stages(rank) if costs.reduce[stage]), default=0)
        reason = f"rank {rank} has {show_ms(sums[rank])} of sums over replicas and cannot begin them before {show_ms(begin + first)}"
        yield Bound(begin + first + sums[rank], reason)
