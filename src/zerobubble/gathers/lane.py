"""Simulation of gathers: communication in parallel with the passes of a rank, which wait for the weights that they use.

The gathers of a rank run one after another. Each begins after the steps before its step `begins`, which free its memory, and the step
`needed` waits for its end. Sums of gradients over replicas or shards run in parallel with them.
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
    """Duration of a schedule with its gathers, in ns, and the begin and end of each gather by rank, from the beginning of the step.

    The makespan begins with the step. The span of a rank includes the gathers of its first pass.
    """

    metrics: Metrics
    lanes: tuple[tuple[tuple[Gather, int, int], ...], ...]


def play_gathers(
    schedule: Schedule,
    costs: Costs,
    plans: Sequence[RankGathers],
    takes: Sequence[int],
    other_lanes: Sequence[Sequence[LaneWork]] = (),
) -> GatherTimes:
    """Simulate `schedule` under `costs` with the gathers of `plans`, each of which takes `takes[stage]` ns.

    `other_lanes` are operations of each rank on a second lane, such as copies to the host. Raises as `simulate` does.

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
    others = [Lane(works, steps) for works, steps in zip(other_lanes, steps_of_ranks(graph), strict=True)] if other_lanes else lanes

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
