"""Gathers played in time: communication beside the passes of a rank, for which passes wait that compute with what is gathered.

The gathers of a rank run one after another. Each begins when the step before it has made room, and the step that needs it waits for its
end. Sums of gradients over replicas or shards run beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from zerobubble.costs import Costs
from zerobubble.gathers.residency import Gather, RankGathers
from zerobubble.graph import play
from zerobubble.ir import Schedule
from zerobubble.lane import Lane, LaneWork, steps_of_ranks
from zerobubble.reductions import planned_sums, play_sums
from zerobubble.simulation import Metrics, pass_times
from zerobubble.verify import checked


class GatherTimes(NamedTuple):
    """How long a schedule takes with its gathers, in ns, and when those of each rank begin and end, from the beginning of the step.

    The makespan begins with the step, and the span of a rank when it has to begin with the gathers of its first pass.
    """

    metrics: Metrics
    lanes: tuple[tuple[tuple[Gather, int, int], ...], ...]


def play_gathers(
    schedule: Schedule,
    costs: Costs,
    plans: Sequence[RankGathers],
    takes: Sequence[int],
    beside: Sequence[Sequence[LaneWork]] = (),
) -> GatherTimes:
    """`schedule` under `costs`, in which ranks gather as `plans` say and the weights of each stage take `takes[stage]` ns.

    `beside` are works of each rank on a lane of their own, such as copies to the host. Raises as `simulate` does.

    >>> import zerobubble as zb
    >>> schedule, costs = zb.make("1f1b", 2, 2), zb.Costs.uniform(2)  # passes of 1 ms
    >>> play_gathers(schedule, costs, zb.lowering.plan_gathers(schedule, [6, 6]), [500_000] * 2).metrics
    Metrics(span=9500000, makespan=9500000)
    """
    costs.require_schedule(schedule)
    graph, order = checked(schedule)
    lanes = [
        Lane([LaneWork(gather.begins, gather.needed, takes[gather.stage]) for gather in plan.gathers], steps)
        for plan, steps in zip(plans, steps_of_ranks(graph), strict=True)
    ]
    others = [Lane(works, steps) for works, steps in zip(beside, steps_of_ranks(graph), strict=True)] if beside else lanes

    def earliest(number: int, end: Sequence[int]) -> int:
        rank = graph.rank[number]
        return max(lanes[rank].ready(number, end), others[rank].ready(number, end))

    begin, end, _ = play(graph, order, *pass_times(graph, costs), earliest=earliest)
    spans, makespan = [], 0
    for plan, (first, stop), sums in zip(plans, pairwise(graph.first), play_sums(planned_sums(graph, costs), end), strict=True):
        if first < stop:
            over = max([*end[first:stop], *(one.end for one in sums)])
            makespan = max(makespan, over)
            spans.append(over - begin[first] + sum(takes[gather.stage] for gather in plan.gathers if gather.needed == 0))
    played = tuple(
        tuple((gather, *times) for gather, times in zip(plan.gathers, lane.played, strict=True))
        for plan, lane in zip(plans, lanes, strict=True)
    )
    return GatherTimes(Metrics(max(spans, default=0), makespan), played)
