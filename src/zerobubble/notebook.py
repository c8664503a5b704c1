"""What a notebook shows of a value: schedules, timelines and plans draw themselves, with the viewer, or where that is left out as SVG.

Importing this module installs the drawers; what draws is loaded by the first picture. A value of more passes than a browser likes is
told in its one line of text instead.
"""

from __future__ import annotations

from html import escape

from zerobubble.costs import Costs
from zerobubble.display import draws
from zerobubble.errors import Fault
from zerobubble.ir import Schedule
from zerobubble.planning import Plan
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.planning.table import TITLES
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.verify import schedule_faults

MOST_SPANS = 8000
"""A picture of so many passes has about 2 MB."""
MOST_VIEWED = 250_000
"""The viewer has about 1 MB for so many."""


@draws(Timeline, "html")
def timeline_view(timeline: Timeline) -> str | None:
    """The timeline in the viewer, as HTML; None for one of no spans, or of too many."""
    return _view(timeline)


@draws(Timeline, "svg")
def timeline_picture(timeline: Timeline) -> str | None:
    """The timeline as an SVG; None for one of no spans, or of too many."""
    if not 0 < sum(map(len, timeline.rows)) <= MOST_SPANS:
        return None
    from zerobubble.export import timeline_svg

    return timeline_svg(timeline)


@draws(Schedule, "html")
def schedule_view(schedule: Schedule) -> str | None:
    """The schedule at unit times in the viewer, as HTML; for one that cannot run its faults; None for one of too many passes."""
    if sum(map(len, schedule.rows)) > MOST_VIEWED:
        return None
    faults = schedule_faults(schedule)
    if faults:
        return f"<p>{escape(repr(schedule))} cannot run:</p><ul>{''.join(map(_item, faults[:20]))}</ul>"
    costs = Costs.uniform(schedule.num_stages).completed_for(schedule)
    return _view(simulate(schedule, costs), costs, microbatch_bytes(schedule.placement, costs))


@draws(Schedule, "svg")
def schedule_picture(schedule: Schedule) -> str | None:
    """The schedule at unit times as an SVG; None for one that cannot run, which has its faults listed instead."""
    if sum(map(len, schedule.rows)) > MOST_SPANS or schedule_faults(schedule):
        return None
    return timeline_picture(simulate(schedule, Costs.uniform(schedule.num_stages).completed_for(schedule)))


def _item(fault: Fault) -> str:
    return f"<li>{escape(fault.message)}</li>"


@draws(Plan, "html")
def plan_view(plan: Plan) -> str | None:
    """What the plan runs when, in the viewer, below a table of its choices if it has some, as HTML; None for one that has neither."""
    if not plan.choices:
        return _planned(plan)
    head = "".join(f"<th>{escape(title)}</th>" for title in (*TITLES, "why"))
    rows = "".join(_row((choice.name, *choice.plan.cells, choice.note)) for choice in plan.choices)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{_planned(plan) or ''}"


def _planned(plan: Plan) -> str | None:
    problem = plan.problem
    units = microbatch_bytes(problem.placement, problem.costs) if problem.workload is not None else ()
    return None if plan.timeline is None else _view(plan.timeline, problem.costs, units)


@draws(Plan, "svg")
def plan_picture(plan: Plan) -> str | None:
    """What the planned schedule runs when, as an SVG; None where nothing fits."""
    return None if plan.timeline is None else timeline_picture(plan.timeline)


def _row(texts: tuple[str, ...]) -> str:
    numbers = "".join(f"<td>{escape(text)}</td>" for text in texts[:-1])
    return f'<tr>{numbers}<td style="text-align: left">{escape(texts[-1])}</td></tr>'


def _view(timeline: Timeline, costs: Costs | None = None, units: tuple[int, ...] = ()) -> str | None:
    """The timeline in the viewer over its picture, as HTML; None for one of no passes, or of too many."""
    if not 0 < sum(map(len, timeline.rows)) <= MOST_VIEWED:
        return None
    from zerobubble.view import Viewed
    from zerobubble.view.embedded import embedded_viewer

    viewed = Viewed(timeline, costs, microbatch_bytes=units)
    return embedded_viewer(repr(timeline).strip("<>"), [viewed], timeline_picture(timeline) or "")
