"""Plays one plan many times with different times, including copies and gathers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerobubble.costs import Costs
from zerobubble.gathers import RankGathers
from zerobubble.graph import play
from zerobubble.ir import Op, Schedule
from zerobubble.lane import Lane, LaneWork, steps_of_ranks
from zerobubble.offload import HostLink, RankOffloads
from zerobubble.offload.copies import copy_works
from zerobubble.planning.problem.problem import Objective
from zerobubble.simulation import metrics_of, pass_times
from zerobubble.verify import checked


class PlanPlayer:
    """Plays the order of a schedule, with offloads over a link and gathers that take `gather_times` ns by stage.

    Raises `ScheduleError` with every fault if the schedule cannot run.
    """

    def __init__(
        self,
        schedule: Schedule,
        offloads: Sequence[RankOffloads] = (),
        link: HostLink | None = None,
        gathers: Sequence[RankGathers] = (),
        gather_times: Sequence[int] = (),
    ) -> None:
        self._schedule, self._offloads, self._link = schedule, offloads, link
        self._graph, self._order = checked(schedule)
        self._steps = steps_of_ranks(self._graph)
        self._gathers = [[LaneWork(one.begins, one.needed, gather_times[one.stage]) for one in plan.gathers] for plan in gathers]

    def time(self, objective: Objective, costs: Costs, *, slower_link: float = 1.0, factors: Mapping[Op, float] | None = None) -> int:
        """The objective in ns, with copies `slower_link` times as long and passes scaled by `factors`, if given."""
        graph = self._graph
        takes, delays = pass_times(graph, costs)
        if factors is not None:
            takes = [max(0, round(time * factors[op])) for time, op in zip(takes, graph.ops, strict=True)]
        lanes = [[Lane(works, steps) for works, steps in zip(rows, self._steps, strict=True)] for rows in self._works(costs, slower_link)]

        def earliest(number: int, end: Sequence[int]) -> int:
            return max((lane[graph.rank[number]].ready(number, end) for lane in lanes), default=0)

        played = play(graph, self._order, takes, delays, earliest=earliest if lanes else None)
        before = [sum(work.duration for work in works if work.needed == 0) for works in self._gathers]
        return objective.measure(metrics_of(graph, played, costs, before))

    def _works(self, costs: Costs, slower_link: float) -> list[Sequence[Sequence[LaneWork]]]:
        """The work on lanes next to the passes: the copies of each rank, and its gathers."""
        works: list[Sequence[Sequence[LaneWork]]] = [self._gathers] if self._gathers else []
        if self._offloads and self._link is not None:
            copies = copy_works(self._schedule, costs, self._offloads, self._link)
            works.append([[work._replace(duration=round(slower_link * work.duration)) for work in row] for row in copies])
        return works
