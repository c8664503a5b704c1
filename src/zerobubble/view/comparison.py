"""Schedules side by side as one HTML page that opens offline: a table of figures over the timelines on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from zerobubble.errors import InputError
from zerobubble.timeline import Timeline
from zerobubble.view.columns import Viewed
from zerobubble.view.page import header, page, table, viewer


def comparison_html(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    viewed: Sequence[Viewed],
    note: str,
    sections: Sequence[str] = (),
) -> str:
    """The page: one row of figures per timeline under the titles `columns`, `note` below the table, then the viewer and `sections` of HTML.

    Raises `InputError` unless there is a row for each timeline.
    """
    if len(rows) != len(viewed):
        raise InputError(f"a comparison has a row of figures for each timeline, got {len(rows)} rows for {len(viewed)} timelines")
    first = viewed[0].timeline
    titles = ("schedule", *columns, *([f"against {first.name}"] if len(viewed) > 1 else []))
    figures = [row if len(viewed) == 1 else [*row, _difference(each.timeline, first)] for each, row in zip(viewed, rows, strict=True)]
    rows = table(titles, ([each.timeline.name, *row] for each, row in zip(viewed, figures, strict=True)))
    return page(escape(title), (header(title), rows, f'<p class="hint">{escape(note)}</p>\n', viewer(), *sections), viewed)


def _difference(timeline: Timeline, reference: Timeline) -> str:
    """How much longer or shorter the makespan is than that of the first timeline, in percent."""
    if timeline is reference or not reference.makespan:
        return "–"
    return f"{100 * (timeline.makespan / reference.makespan - 1):+.1f} %"
