"""Work without backward passes: what it holds, and the bounds on steps of forwards alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from zerobubble.bounds import Bound, Bounds
from zerobubble.costs import Costs
from zerobubble.ir import Kind, Placement
from zerobubble.partition import Layer
from zerobubble.planning.problem.workload import Workload
from zerobubble.units import show_ms

Work = Workload | Costs | Sequence[Layer]


def is_forward_only(work: Work) -> bool:
    """Whether no stage, rank or layer has a B or W that takes time, as in inference."""
    if isinstance(work, (Workload, Costs)):
        return not any((*work.backward, *work.weight)) and any(work.forward)
    return not any(layer.backward or layer.weight for layer in work) and any(layer.forward for layer in work)


def without_held(work: Work) -> Work:
    """The same work, of whose forwards nothing waits for a backward pass."""
    if isinstance(work, (Workload, Costs)):
        nothing = (0,) * len(work.forward)
        return replace(work, held_after_f=nothing, held_after_b=nothing)
    return [replace(layer, held_after_f=0, held_after_b=0) for layer in work]


def bounds_forward(placement: Placement, num_microbatches: int, costs: Costs) -> Bounds:
    """Times that no order of forwards alone beats: the work of a rank, with the least time before its first and after its last.

    >>> import zerobubble as zb
    >>> bounds_forward(zb.Placement.linear(2), 4, zb.Costs.uniform(2, (3, 0, 0), comm=1)).makespan.time
    16000000
    """
    home, microbatches = placement.routes[0], range(num_microbatches)
    hops = [0 if here == there else time for time, (here, there) in zip(costs.comm, pairwise(home), strict=True)]
    each = [[costs.time(Kind.F, stage, microbatch) for stage in range(len(home))] for microbatch in microbatches]
    span = makespan = Bound(0, "no pass takes time")
    for rank in range(placement.num_ranks):
        stages = [stage for stage, owner in enumerate(home) if owner == rank]
        work = sum(times[stage] for times in each for stage in stages)
        before = sum(hops[: stages[0]]) + min(sum(times[: stages[0]]) for times in each)
        after = sum(hops[stages[-1] :]) + min(sum(times[stages[-1] + 1 :]) for times in each)
        reason = f"rank {rank} has {show_ms(work)} of work"
        if work > span.time:
            span = Bound(work, reason)
        if before + work + after > makespan.time:
            makespan = Bound(before + work + after, f"{reason}, {show_ms(before)} before its first F and {show_ms(after)} after its last")
    longest = sum(hops) + max(map(sum, each))
    return Bounds(span, max(makespan, Bound(longest, f"a microbatch takes {show_ms(longest)}"), key=lambda bound: bound.time))
