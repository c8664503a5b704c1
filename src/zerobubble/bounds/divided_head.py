"""Lower bounds with an output head that ranks divide by vocabulary: each rank has a part of the head in addition to its stages.

Removing the passes of the head leaves a schedule of the stages alone. It needs no more memory, and its last stage delays B until all parts
of its input gradient have arrived. So lower bounds for such schedules apply. In addition, every rank begins with a forward, since its part
of the head needs the forwards of all stages. After that, it has to do all its work.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.arguments import takes
from zerobubble.bounds.bound import Bound, Bounds, strongest
from zerobubble.bounds.certificate import bounds_with_delay, check_parts
from zerobubble.bounds.chain import first_starts, total_time
from zerobubble.bounds.overlap import remark_on_savings, saves_time, without_savings
from zerobubble.bounds.reasons import work_reason
from zerobubble.bounds.recompute import bounds_with_recompute
from zerobubble.bounds.sums import with_sums
from zerobubble.costs import MAX_LIMIT, Costs, Level, Limits
from zerobubble.ir import Kind, Placement


@takes()
def bounds_with_divided_head(
    placement: Placement, num_microbatches: int, costs: Costs, limits: Limits | None, levels: Sequence[Level] = ()
) -> Bounds:
    """Computes lower bounds for a head divided over all ranks by algorithm 1 or 2 of Vocabulary Parallelism (arXiv 2411.05288).

    The bounds hold for every schedule of `num_microbatches` microbatches on `placement`. `costs` need the columns of the head's parts.
    `limits=None` stands for unlimited memory. With `levels`, each forward may be recomputed at one of them, as in `bounds_with_recompute`.

    >>> import zerobubble as zb
    >>> stages = zb.Costs.uniform(2, times=(10, 10, 10))
    >>> print(bounds_with_divided_head(zb.Placement.linear(2), 8, stages.with_divided_head((5, 5, 5)), None).makespan)
    at least 370 ms: rank 1 has 360 ms of work and cannot begin before 10 ms, its part of the head included
    """
    check_parts(placement, costs, limits)
    if saves_time(costs):
        shorter = [
            bounds_with_divided_head(placement, num_microbatches, unsaved, limits, levels) for unsaved in without_savings(placement, costs)
        ]
        return strongest(shorter).with_remark(remark_on_savings(costs))
    if levels:  # the delay between the last F and B is dropped, which makes the bound no larger
        headroom = Limits((MAX_LIMIT,) * placement.num_ranks) if limits is None else limits
        alone = bounds_with_recompute(placement, num_microbatches, costs, headroom, levels)
    else:
        alone = bounds_with_delay(placement, num_microbatches, costs, limits, 0 if costs.shares else _head_delay(placement, costs))
    kinds = (Kind.F, Kind.B, Kind.W)
    stages = [sum(total_time(costs, kind, stage, num_microbatches) for kind in kinds) for stage in range(placement.num_stages)]
    works = placement.rank_sums(stages)
    for rank in range(placement.num_ranks):
        part = min(stage for _, stage in placement.stages(rank))
        works[rank] += sum(total_time(costs, kind, part, num_microbatches) for kind in (Kind.S, Kind.T))
    span = max([alone.span, *(_work(rank, work, 0) for rank, work in enumerate(works))])
    starts = first_starts(placement, costs.scaled(min(costs.shares)) if costs.shares else costs)
    begun = [_work(rank, *claim) for rank, claim in enumerate(zip(works, starts, strict=True))]
    return with_sums(Bounds(span, max([alone.makespan, span, *begun])), placement, num_microbatches, costs)


def _head_delay(placement: Placement, costs: Costs) -> int:
    """Returns the least ns from the end of the last stage's F to its B: softmax and input gradient of a part, and its messages.

    This is the time of algorithm 2. Algorithm 1 splits these into two passes with one more collective in between, so it takes no less.
    """
    home, last = placement.routes[0][-1], placement.num_stages - 1
    parts = {rank: min(stage for _, stage in placement.stages(rank)) for rank in range(placement.num_ranks)}
    there = costs.message_time(Kind.F, last)
    return max(costs.time(Kind.S, part) + (0 if rank == home else there + costs.message_time(Kind.S, part)) for rank, part in parts.items())


def _work(rank: int, work: int, begin: int) -> Bound:
    """Returns the bound of a rank that cannot begin before `begin` (ns) and then has `work` ns of passes."""
    return Bound(begin + work, f"{work_reason(rank, work, begin)}, its part of the head included")
