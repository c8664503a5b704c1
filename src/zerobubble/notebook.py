"""Notebook display of schedules, timelines and plans: the interactive viewer, or SVG where HTML is not shown.

Importing this module installs the drawers, which happens with the first value that a notebook shows. The drawing code is loaded with the
first picture. Values with too many passes for a browser are shown as their one line of text.
"""

from __future__ import annotations

from html import escape

from zerobubble.costs import Costs
from zerobubble.display import draws
from zerobubble.ir import Schedule
from zerobubble.planning import Plan
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.planning.table import titles
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.verify import schedule_faults

MOST_SPANS = 8000
"""Most passes in a picture, which then has about 2 MB."""
MOST_VIEWED = 250_000
"""Most passes in the viewer, which then has about 1 MB."""


@draws(Timeline, "html")
def timeline_view(timeline: Timeline) -> str | None:
    """Return the timeline in the viewer, as HTML; None if it has no spans or too many."""
    return _view(timeline)


@draws(Timeline, "svg")
def timeline_picture(timeline: Timeline) -> str | None:
    """Return the timeline as SVG; None if it has no spans or too many."""
    if not 0 < sum(map(len, timeline.rows)) <= MOST_SPANS:
        return None
    from zerobubble.export import timeline_svg

    return timeline_svg(timeline)


@draws(Schedule, "html")
def schedule_view(schedule: Schedule) -> str | None:
    """Return the schedule at unit times in the viewer, as HTML, or its faults if it cannot run; None if it has too many passes."""
    if sum(map(len, schedule.rows)) > MOST_VIEWED:
        return None
    faults = schedule_faults(schedule)
    if faults:
        items = "".join(f"<li>{escape(fault.message)}</li>" for fault in faults[:20])
        return f"<p>{escape(repr(schedule))} cannot run:</p><ul>{items}</ul>"
    costs = Costs.uniform(schedule.num_stages).completed_for(schedule)
    return _view(simulate(schedule, costs), costs, microbatch_bytes(schedule.placement, costs))


@draws(Schedule, "svg")
def schedule_picture(schedule: Schedule) -> str | None:
    """Return the schedule at unit times as SVG; None if it cannot run, since its faults are listed instead."""
    if sum(map(len, schedule.rows)) > MOST_SPANS or schedule_faults(schedule):
        return None
    return timeline_picture(simulate(schedule, Costs.uniform(schedule.num_stages).completed_for(schedule)))


@draws(Plan, "html")
def plan_view(plan: Plan) -> str | None:
    """Return the planned timeline in the viewer below a table of the plan's choices, as HTML; None if the plan has neither."""
    if not plan.choices:
        return _planned(plan)
    head = "".join(f"<th>{escape(title)}</th>" for title in (*titles(plan.problem.objective), "why"))
    rows = "".join(_row((choice.name, *choice.plan.cells, choice.note)) for choice in plan.choices)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{_planned(plan) or ''}"


def _planned(plan: Plan) -> str | None:
    problem = plan.problem
    units = microbatch_bytes(problem.placement, problem.costs) if problem.workload is not None else ()
    return None if plan.timeline is None else _view(plan.timeline, problem.costs, units)


@draws(Plan, "svg")
def plan_picture(plan: Plan) -> str | None:
    """Return the planned timeline as SVG; None if nothing fits."""
    return None if plan.timeline is None else timeline_picture(plan.timeline)


def _row(texts: tuple[str, ...]) -> str:
    numbers = "".join(f"<td>{escape(text)}</td>" for text in texts[:-1])
    return f'<tr>{numbers}<td style="text-align: left">{escape(texts[-1])}</td></tr>'


def _view(timeline: Timeline, costs: Costs | None = None, units: tuple[int, ...] = ()) -> str | None:
    """Return the timeline in the viewer over its picture, as HTML; None if it has no passes or too many."""
    if not 0 < sum(map(len, timeline.rows)) <= MOST_VIEWED:
        return None
    from zerobubble.export.svg import without_tooltips
    from zerobubble.view import Viewed
    from zerobubble.view.page import embedded_viewer

    viewed = Viewed(timeline, costs, microbatch_bytes=units)
    return embedded_viewer(repr(timeline).strip("<>"), [viewed], without_tooltips(timeline_picture(timeline) or ""))
