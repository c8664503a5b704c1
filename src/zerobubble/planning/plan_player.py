"""Plays one plan many times with different times, including copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerobubble.costs import Costs
from zerobubble.graph import play
from zerobubble.ir import Op, Schedule
from zerobubble.lane import Lane, steps_of_ranks
from zerobubble.offload import HostLink, RankOffloads
from zerobubble.offload.copies import copy_works
from zerobubble.planning.problem.problem import Objective
from zerobubble.simulation import metrics_of, pass_times
from zerobubble.verify import checked


class PlanPlayer:
    """Plays the order of a schedule, with offloads over a link.

    Raises `ScheduleError` with every fault if the schedule cannot run.
    """

    def __init__(self, schedule: Schedule, offloads: Sequence[RankOffloads], link: HostLink | None) -> None:
        self._schedule, self._offloads, self._link = schedule, offloads, link
        self._graph, self._order = checked(schedule)
        self._steps = steps_of_ranks(self._graph)

    def time(self, objective: Objective, costs: Costs, *, slower_link: float = 1.0, factors: Mapping[Op, float] | None = None) -> int:
        """The objective in ns, with copies `slower_link` times as long and passes scaled by `factors`, if given."""
        graph = self._graph
        takes, delays = pass_times(graph, costs)
        if factors is not None:
            takes = [max(0, round(time * factors[op])) for time, op in zip(takes, graph.ops, strict=True)]
        lanes = self._copies(costs, slower_link)

        def earliest(number: int, end: Sequence[int]) -> int:
            return lanes[graph.rank[number]].ready(number, end)

        played = play(graph, self._order, takes, delays, earliest=earliest if lanes else None)
        return objective.measure(metrics_of(graph, played, costs))

    def _copies(self, costs: Costs, slower_link: float) -> list[Lane]:
        """The lane of each rank for its copies; empty without offloads."""
        if not self._offloads or self._link is None:
            return []
        rows = copy_works(self._schedule, costs, self._offloads, self._link)
        slowed = [[work._replace(duration=round(slower_link * work.duration)) for work in row] for row in rows]
        return [Lane(works, steps) for works, steps in zip(slowed, self._steps, strict=True)]
