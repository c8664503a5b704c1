"""What a notebook shows of a value: schedules, timelines and plans draw themselves.

Importing this module installs the drawers; what draws is loaded by the first picture. A value of more passes than a browser likes is
told in its one line of text instead.
"""

from __future__ import annotations

from base64 import b64encode
from html import escape

from zerobubble.costs import Costs
from zerobubble.display import draws
from zerobubble.errors import Fault
from zerobubble.ir import Schedule
from zerobubble.planning import Plan, Solved
from zerobubble.planning.reasons import TITLES, table_row
from zerobubble.simulation import simulate
from zerobubble.timeline import Timeline
from zerobubble.verify import schedule_faults

MOST_SPANS = 8000
"""A picture of so many passes has about 2 MB."""


@draws(Timeline, "svg")
def timeline_picture(timeline: Timeline) -> str | None:
    """The timeline as an SVG; None for one of no spans, or of too many."""
    if not 0 < sum(map(len, timeline.rows)) <= MOST_SPANS:
        return None
    from zerobubble.export import timeline_svg

    return timeline_svg(timeline)


@draws(Schedule, "svg")
def schedule_picture(schedule: Schedule) -> str | None:
    """The schedule at unit times as an SVG; None for one that cannot run, which has its faults listed instead."""
    if sum(map(len, schedule.rows)) > MOST_SPANS or schedule_faults(schedule):
        return None
    return timeline_picture(simulate(schedule, Costs.uniform(schedule.num_stages)))


@draws(Schedule, "html")
def faults_listed(schedule: Schedule) -> str | None:
    """The faults of a schedule that cannot run, as HTML; None for one that can."""
    faults = schedule_faults(schedule)
    if not faults:
        return None
    return f"<p>{escape(repr(schedule))} cannot run:</p><ul>{''.join(map(_item, faults[:20]))}</ul>"


def _item(fault: Fault) -> str:
    return f"<li>{escape(fault.message)}</li>"


@draws(Solved, "svg")
def plan_picture(solved: Solved) -> str | None:
    """What the planned schedule runs when, as an SVG; None where nothing fits."""
    return None if solved.timeline is None else timeline_picture(solved.timeline)


@draws(Plan, "html")
def plan_table(plan: Plan) -> str:
    """The placements tried as a table with the reasons, and the winner's picture below, as HTML."""
    head = "".join(f"<th>{escape(title)}</th>" for title in (*TITLES, "why"))
    rows = "".join(_row((*table_row(choice.name, choice.solved), choice.note)) for choice in plan.choices)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{_image(plan_picture(plan.best))}"


def _row(texts: tuple[str, ...]) -> str:
    numbers = "".join(f"<td>{escape(text)}</td>" for text in texts[:-1])
    return f'<tr>{numbers}<td style="text-align: left">{escape(texts[-1])}</td></tr>'


def _image(svg: str | None) -> str:
    """The SVG as an image: its styles stay its own, and do not reach those of other pictures on the page."""
    if svg is None:
        return ""
    return f'<img alt="the winner\'s timeline" src="data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"/>'
