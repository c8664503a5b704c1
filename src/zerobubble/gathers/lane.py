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
from zerobubble.graph import Graph, play
from zerobubble.ir import Schedule
from zerobubble.reductions import planned_sums, play_sums
from zerobubble.simulation import Metrics, pass_times
from zerobubble.verify import checked


class GatherTimes(NamedTuple):
    """How long a schedule takes with its gathers, in ns, and when those of each rank begin and end, from the beginning of the step.

    The makespan begins with the step, and the span of a rank when it has to begin with the gathers of its first pass.
    """

    metrics: Metrics
    lanes: tuple[tuple[tuple[Gather, int, int], ...], ...]


def play_gathers(schedule: Schedule, costs: Costs, plans: Sequence[RankGathers], takes: Sequence[int]) -> GatherTimes:
    """`schedule` under `costs`, in which ranks gather as `plans` say and the weights of each stage take `takes[stage]` ns.

    Raises as `simulate` does.

    >>> import zerobubble as zb
    >>> schedule, costs = zb.make("1f1b", 2, 2), zb.Costs.uniform(2)  # passes of 1 ms
    >>> play_gathers(schedule, costs, zb.lowering.plan_gathers(schedule, [6, 6]), [500_000] * 2).metrics
    Metrics(span=9500000, makespan=9500000)
    """
    costs.require_schedule(schedule)
    graph, order = checked(schedule)
    lanes = [_Lane(plan.gathers, steps, takes) for plan, steps in zip(plans, _steps_of_ranks(graph), strict=True)]

    def earliest(number: int, end: Sequence[int]) -> int:
        return lanes[graph.rank[number]].ready(number, end)

    begin, end, _ = play(graph, order, *pass_times(graph, costs), earliest=earliest)
    spans, makespan = [], 0
    for lane, (first, stop), sums in zip(lanes, pairwise(graph.first), play_sums(planned_sums(graph, costs), end), strict=True):
        if first < stop:
            over = max([*end[first:stop], *(one.end for one in sums)])
            makespan = max(makespan, over)
            spans.append(over - begin[first] + lane.before_first_pass)
    return GatherTimes(Metrics(max(spans, default=0), makespan), tuple(tuple(lane.played) for lane in lanes))


def _steps_of_ranks(graph: Graph) -> list[list[tuple[int, ...]]]:
    """The numbers of the passes of each step, for each rank."""
    rows: list[list[tuple[int, ...]]] = [[] for _ in graph.first[1:]]
    for step in graph.steps():
        rows[graph.rank[step[0]]].append(step)
    return rows


class _Lane:
    """The gathers of a rank, which are played as far as its passes have come."""

    def __init__(self, gathers: Sequence[Gather], steps: Sequence[tuple[int, ...]], takes: Sequence[int]) -> None:
        self.played: list[tuple[Gather, int, int]] = []
        self.before_first_pass = sum(takes[gather.stage] for gather in gathers if gather.needed == 0)
        self._coming = list(gathers[::-1])
        self._steps, self._takes = steps, takes
        self._place = {numbers[0]: place for place, numbers in enumerate(steps)}
        self._ready = [0] * len(steps)

    def ready(self, number: int, end: Sequence[int]) -> int:
        """When what the step that begins with pass `number` waits for is gathered; all steps before it have ended as `end` says."""
        place = self._place.get(number)
        if place is None:  # the second pass of an overlapped step
            return 0
        while self._coming and self._coming[-1].begins <= place:
            self._play(self._coming.pop(), end)
        return self._ready[place]

    def _play(self, gather: Gather, end: Sequence[int]) -> None:
        room = max(end[number] for number in self._steps[gather.begins - 1]) if gather.begins else 0
        begin = max(room, self.played[-1][2] if self.played else 0)
        over = begin + self._takes[gather.stage]
        self._ready[gather.needed] = max(self._ready[gather.needed], over)
        self.played.append((gather, begin, over))
