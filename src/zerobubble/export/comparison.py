"""Schedules side by side as one HTML page that opens offline: a table of figures over the timelines on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from zerobubble.errors import InputError
from zerobubble.export.svg import timeline_svg
from zerobubble.timeline import Timeline


def comparison_html(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], timelines: Sequence[Timeline], note: str) -> str:
    """The page: one row of figures per timeline under the titles `columns`, `note` below the table, then the picture.

    Raises `InputError` unless there is a row for each timeline.
    """
    if len(rows) != len(timelines):
        raise InputError(f"a comparison has a row of figures for each timeline, got {len(rows)} rows for {len(timelines)} timelines")
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in ("schedule", *columns))
    body = "".join(_row(timeline.name, row) for timeline, row in zip(timelines, rows, strict=True))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n"
        f'<div class="scroll"><table class="speeds"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n'
        f'<p class="hint">{escape(note)}</p>\n<div class="scroll">{timeline_svg(*timelines)}</div>\n</main>\n</body>\n</html>\n'
    )


def _row(name: str, figures: Sequence[str]) -> str:
    cells = "".join(f"<td>{escape(text)}</td>" for text in figures)
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
