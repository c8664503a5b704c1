"""The heading of an SVG picture: its title, and below it the legend, in as many lines as they need at the width of the picture.

SVG does not measure text, and fonts differ between machines. A title has the width of the widest common font, so nothing overlaps in
others. An entry of the legend has a fixed width, that of Arial, to which other fonts are fitted, so the gaps between entries are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

MARGIN, LINE = 16, 18
TITLE_CHARACTER = 10.4
"""Width of a character of 15 px in bold, in DejaVu Sans."""
SWATCH, BETWEEN = 12, 18
"""Width of a swatch, and of the gap between entries."""
_SIZE = 11
_WIDTHS = {"ijl'": 0.222, " ft.,:;/I": 0.278, "r()-": 0.333, "ckvxyzsJ": 0.5, "FTZ": 0.611, "ABEKPSVXY": 0.667}
_WIDTHS |= {"CDHNRUw": 0.722, "GOQ": 0.778, "mM": 0.833, "W": 0.944}
_ADVANCES = {character: width for characters, width in _WIDTHS.items() for character in characters}
"""Widths of characters in Arial, in ems; digits and other letters have `_USUAL`."""
_USUAL = 0.556


class LegendEntry(NamedTuple):
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


def text_width(text: str) -> float:
    """Return the width of a text of 11 px in Arial, in pixels."""
    return _SIZE * sum(_ADVANCES.get(character, _USUAL) for character in text)


def heading(title: str, entries: Iterable[LegendEntry], width: int) -> Heading:
    """Return the heading of a picture of `width` pixels."""
    lines = _title_lines(title, int((width - 2 * MARGIN) / TITLE_CHARACTER))
    elements = [f'<text class="ink title" x="{MARGIN}" y="{28 + LINE * row}">{escape(line)}</text>' for row, line in enumerate(lines)]
    above, x, row = 12 + LINE * len(lines), float(MARGIN), 0
    for text, marks in entries:
        needed = SWATCH * len(marks) + 4 * bool(marks) + text_width(text)
        if x + needed > width - MARGIN and x > MARGIN:
            x, row = float(MARGIN), row + 1
        elements += _entry(text, marks, x, above + LINE * row + 16)
        x += needed + BETWEEN
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
    fitted = f'textLength="{text_width(text):.1f}" lengthAdjust="spacingAndGlyphs"'
    yield f'<text class="soft small" x="{x + 4 * bool(marks):.1f}" y="{y}" {fitted}>{escape(text)}</text>'
