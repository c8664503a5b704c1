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
from zerobubble.planning import Plan, Solved
from zerobubble.planning.problem.problem import microbatch_bytes
from zerobubble.planning.reasons import table_row, titles
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


@draws(Solved, "html")
def plan_view(solved: Solved) -> str | None:
    """What the planned schedule runs when, in the viewer, as HTML; None where nothing fits."""
    if solved.timeline is None:
        return None
    problem = solved.problem
    units = microbatch_bytes(problem.placement, problem.costs) if problem.workload is not None else ()
    return _view(solved.timeline, problem.costs, units)


@draws(Solved, "svg")
def plan_picture(solved: Solved) -> str | None:
    """What the planned schedule runs when, as an SVG; None where nothing fits."""
    return None if solved.timeline is None else timeline_picture(solved.timeline)


@draws(Plan, "html")
def plan_table(plan: Plan) -> str:
    """The placements tried as a table with the reasons, and the winner in the viewer below, as HTML."""
    head = "".join(f"<th>{escape(title)}</th>" for title in (*titles(plan.best.problem.objective), "why"))
    rows = "".join(_row((*table_row(choice.name, choice.solved), choice.note)) for choice in plan.choices)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{plan_view(plan.best) or ''}"


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
