"""A timeline drawn in a terminal: a line per rank, time scaled to the width, dots where a rank is idle."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from zerobubble.export.palette import ink, num_shades, shade, stage_order
from zerobubble.export.units import ms, ticks
from zerobubble.rules import RULES
from zerobubble.timeline import Span, Timeline

EDGE, DARK = "▏", "#1b1f24"
TICK_WIDTH = 9


def draw(timeline: Timeline, width: int, coloured: bool) -> Text:
    """`timeline` in `width` columns. In colour a box starts with a thin line and shows its microbatch; without colour it starts
    with the kind's letter, in lower case on a rank's later stages."""
    label = len(f"rank {timeline.num_ranks - 1} ")
    columns = max(10, width - label)
    picture = Text(no_wrap=True)
    for rank in range(timeline.num_ranks):
        picture.append(f"rank {rank}".ljust(label))
        picture.append_text(_row(timeline, rank, columns, coloured))
        picture.append("\n")
    picture.append(" " * label + _axis(timeline, columns), "dim")
    return picture


def _row(timeline: Timeline, rank: int, columns: int, coloured: bool) -> Text:
    row = Text()
    places, shades = stage_order(timeline)[rank], num_shades(timeline)
    for span in timeline.rows[rank]:
        first, last = (_column(timeline, time, columns) for time in (span.start, span.end))
        if last > first:
            row.append("·" * (first - len(row)), "dim")
            place = places[span.op.stage]
            row.append_text(_coloured_box(span, last - first, place, shades) if coloured else Text(_plain_box(span, last - first, place)))
    row.append("·" * (columns - len(row)), "dim")
    return row


def _column(timeline: Timeline, time: int, columns: int) -> int:
    return round((time - timeline.start) * columns / max(1, timeline.makespan))


def _coloured_box(span: Span, width: int, place: int, shades: int) -> Text:
    colour = shade(span.op.kind, place, shades)
    number = str(span.op.microbatch)
    if width == len(number):
        return Text(number, f"{ink(colour)} on {colour}")
    box = Text(EDGE, f"{DARK} on {colour}")
    return box.append((number if len(number) < width else "").center(width - 1), f"{ink(colour)} on {colour}")


def _plain_box(span: Span, width: int, place: int) -> str:
    letters = span.op.kind.value if place == 0 else span.op.kind.value.lower()
    name = f"{letters}{span.op.microbatch}"
    return (name if len(name) <= width else letters[:width]).ljust(width, "─")


def _axis(timeline: Timeline, columns: int) -> str:
    line = ""
    for tick in ticks(timeline.makespan, max(2, columns // TICK_WIDTH)):
        label = f"{ms(tick):g}"
        at = _column(timeline, timeline.start + tick, columns)
        if len(line) <= at and at + len(label) <= columns:
            line = line.ljust(at) + label
    return f"{line} ms" if len(line) + 3 <= columns else line


def legend(timeline: Timeline, coloured: bool) -> Text:
    """What the colours and letters of `draw` stand for, in one line."""
    return Text("   ").join(_entries(timeline, coloured))


def _entries(timeline: Timeline, coloured: bool) -> Iterator[Text]:
    present = {span.op.kind for _, span in timeline.spans()}
    shades = num_shades(timeline)
    for kind in (kind for kind in RULES if kind in present):
        entry = Text()
        for place in range(shades if coloured else 0):
            entry.append("  ", f"on {shade(kind, place, shades)}")
        yield entry.append(f"{' ' if coloured else ''}{kind} {RULES[kind].phrase}")
    if shades > 1:
        yield Text("lighter: later stages of the rank" if coloured else "lower case: later stages of the rank")
    yield Text("· idle")
