"""The heading of an SVG picture: its title, and below it the legend, in as many lines as they need at the width of the picture.

SVG does not measure text, and fonts differ between machines. Widths are those of the widest common font, so nothing overlaps in others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

MARGIN, LINE = 16, 18
TITLE_CHARACTER, LEGEND_CHARACTER = 10.4, 6.5
"""Widths of a character of 15 px in bold, and of 11 px, in DejaVu Sans."""
SWATCH = 12


class Entry(NamedTuple):
    """An entry of a legend: its text, and the SVG elements before it, drawn in boxes of 11 by 11 pixels from the origin."""

    text: str
    marks: Sequence[str]


def swatch(paint: str) -> str:
    """Return a filled box; `paint` is its `class` or `fill` attribute."""
    return f'<rect {paint} width="11" height="11" rx="1.5"/>'


class Heading(NamedTuple):
    """The elements of a heading, and the height below which the picture may begin."""

    elements: Sequence[str]
    height: int


def heading(title: str, entries: Iterable[Entry], width: int) -> Heading:
    """Return the heading of a picture of `width` pixels."""
    lines = _title_lines(title, int((width - 2 * MARGIN) / TITLE_CHARACTER))
    elements = [f'<text class="ink title" x="{MARGIN}" y="{28 + LINE * row}">{escape(line)}</text>' for row, line in enumerate(lines)]
    above, x, row = 12 + LINE * len(lines), float(MARGIN), 0
    for text, marks in entries:
        needed = SWATCH * len(marks) + LEGEND_CHARACTER * len(text) + 4
        if x + needed > width and x > MARGIN:
            x, row = float(MARGIN), row + 1
        elements += _entry(text, marks, x, above + LINE * row + 16)
        x += needed + 8
    return Heading(elements, above + LINE * (row + 1) + 6)


def _title_lines(title: str, longest: int) -> list[str]:
    lines: list[str] = []
    for word in title.split():
        if lines and len(lines[-1]) + 1 + len(word) <= longest:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _entry(text: str, marks: Sequence[str], x: float, y: int) -> Iterator[str]:
    """Yield an entry at the left edge `x`, with its text on the line `y`."""
    for mark in marks:
        yield f'<g transform="translate({x:.1f} {y - 9})">{mark}</g>'
        x += SWATCH
    yield f'<text class="soft small" x="{x + 4:.1f}" y="{y}">{escape(text)}</text>'
