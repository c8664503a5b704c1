"""The front of memory against bubble as a page that opens offline: a chart whose points open their schedules in the viewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Any, Generic, TypeVar

from zerobubble.export.front import NOTE, knee, placement_colors, points_with_schedules
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Choice, Plan, Status
from zerobubble.planning.pareto import Front, Point
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.view.columns import Viewed
from zerobubble.view.page import header, page, section, table, viewer

MOST_PASSES = 2_000_000
"""Passes of all timelines that a page holds, some 3 MB: beyond them, only the best plan of each limit has a schedule to open."""


Value = TypeVar("Value")


def front_html(front: Front, title: str) -> str:
    """The page: the chart, the schedule of the point that was chosen, and a row of figures for each limit.

    Raises `InputError` when no point has a schedule.
    """
    points = points_with_schedules(front)
    kept = OpenedPlans(points, _viewed, MOST_PASSES)
    body = (
        header(title),
        '<div id="front"></div>\n',
        section("schedule", "The schedule of a point", viewer(), '<span id="opened" role="status"></span>'),
        section("figures", "Every limit", table(front.titles, front.rows())),
    )
    return page(escape(title), body, kept.values, front=front_data(points, kept))


def _viewed(plan: Plan) -> Viewed:
    assert plan.timeline is not None
    problem = plan.problem
    unit = () if problem.workload is None else microbatch_bytes(problem.placement, problem.costs)
    return Viewed(replace(plan.timeline, name=problem.placement.name), problem.costs, microbatch_bytes=unit)


class OpenedPlans(Generic[Value]):
    """What a chart's points open, by `make`: each schedule once, however many limits it is the answer to.

    The winners of all limits are kept, and others while there are fewer than `most_passes`.
    """

    def __init__(self, points: Sequence[Point], make: Callable[[Plan], Value], most_passes: int) -> None:
        self.values: list[Value] = []
        self._make, self._passes = make, 0
        self._places: dict[Schedule, int] = {}
        for point in points:
            self._keep(point.plan.choices[0].plan)
        for choice in (choice for point in points for choice in point.plan.choices[1:]):
            if self._passes < most_passes:
                self._keep(choice.plan)

    def _keep(self, plan: Plan) -> None:
        if plan.timeline is None or plan.order is None or plan.schedule in self._places:
            return
        self._places[plan.schedule] = len(self.values)
        self._passes += sum(map(len, plan.timeline.rows))
        self.values.append(self._make(plan))

    def place(self, plan: Plan) -> int | None:
        """The place of an answer among the values; None if it was left out."""
        return None if plan.order is None else self._places.get(plan.schedule)


def front_data(points: Sequence[Point], kept: OpenedPlans[Any]) -> dict[str, Any]:
    """The data of the chart: for each limit its bound and its answers, best first, each with the index of the page that it opens."""
    colors = placement_colors(points)
    return {
        "objective": points[0].plan.problem.objective,
        "knee": knee(points),
        "note": NOTE,
        "points": [
            {"memory": point.memory, "bound": point.plan.lower_bound, "answers": list(_answers(point, colors, kept))} for point in points
        ],
    }


def _answers(point: Point, colors: dict[str, str], kept: OpenedPlans[Any]) -> Iterator[dict[str, Any]]:
    for choice in point.plan.choices:
        if choice.plan.bubble is not None:
            yield _answer(choice, colors[choice.name], kept)


def _answer(choice: Choice, color: str, kept: OpenedPlans[Any]) -> dict[str, Any]:
    plan = choice.plan
    answer = {"placement": choice.name, "bubble": plan.bubble, "how": plan.how, "optimal": plan.status is Status.OPTIMAL}
    return answer | {"color": color, "opens": kept.place(plan)}
