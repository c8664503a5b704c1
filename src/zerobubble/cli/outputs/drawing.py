"""A timeline drawn in a terminal: a line per rank, time scaled to the width, dots where a rank is idle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.text import Text

from zerobubble.cli.outputs.density import SHADES, dense_row, is_dense
from zerobubble.export.palette import REDUCTION_COLOUR, ink, num_shades, shade, stage_order
from zerobubble.kinds import KINDS, traits_of
from zerobubble.timeline import Reduction, Span, Timeline, steps_of
from zerobubble.units import ms, ticks

EDGE, DARK = "▏", "#1b1f24"
TICK_WIDTH = 9


class _Scale(NamedTuple):
    """The columns of a picture: `columns` of them stand for `duration` ns from `start` on."""

    start: int
    duration: int
    columns: int

    def column(self, time: int) -> int:
        return round((time - self.start) * self.columns / max(1, self.duration))


def draw(timeline: Timeline, width: int, coloured: bool, duration: int | None = None) -> Text:
    """`timeline` in `width` columns that stand for `duration` ns, its makespan if not given.

    In colour a box starts with a thin line and shows its microbatch; without colour it starts with the kind's letter, in lower case
    on a rank's later stages. Two passes that ran overlapped share one place. Where passes are narrower than a column it shows how busy the
    ranks are instead (`shows_density`). Sums over replicas stand on a line below the rank. Without time there is only a sentence.
    """
    if not timeline.makespan:
        return Text("There is nothing to draw: every pass and message takes 0 ms. Give times above 0.\n")
    label, scale = _label(timeline), _scale(timeline, width, duration)
    shades = num_shades(timeline) if coloured else None
    draw_row = _dense_row if is_dense(timeline, scale.columns, scale.duration) else _row
    picture = Text(no_wrap=True)
    for rank, (row, places) in enumerate(zip(timeline.rows, stage_order(timeline), strict=True)):
        picture.append(f"rank {rank}".ljust(label))
        picture.append_text(draw_row(row, places, scale, shades)[: scale.column(timeline.end)])
        picture.append("\n")
        if timeline.reductions:
            picture.append(" " * label)
            picture.append_text(_sums(timeline.reductions[rank], scale, coloured))
            picture.append("\n")
    picture.append(" " * label + _axis(scale), "dim")
    return picture


def shows_density(timeline: Timeline, width: int, duration: int | None = None) -> bool:
    """Whether `draw` shows how busy the ranks are, since there are more passes than columns to show them in."""
    scale = _scale(timeline, width, duration)
    return is_dense(timeline, scale.columns, scale.duration)


def _label(timeline: Timeline) -> int:
    """Columns of the names of ranks."""
    return len(f"rank {timeline.num_ranks - 1} ")


def _scale(timeline: Timeline, width: int, duration: int | None) -> _Scale:
    return _Scale(timeline.start, timeline.makespan if duration is None else duration, max(10, width - _label(timeline)))


def _dense_row(row: Sequence[Span], places: Mapping[int, int], scale: _Scale, shades: int | None) -> Text:
    return dense_row(row, places, scale.start, scale.duration, scale.columns, shades)


def _row(row: Sequence[Span], places: Mapping[int, int], scale: _Scale, shades: int | None) -> Text:
    """Boxes in so many `shades` of each colour, without colour where that is None; dots to the end of the scale."""
    line = Text()
    for spans, first, last in _boxes(row, scale, shades is not None):
        width = last - max(first, len(line))
        if width > 0:
            line.append("·" * (first - len(line)), "dim")
            held = [places[span.op.stage] for span in spans]
            line.append_text(_plain_box(spans, width, held) if shades is None else _coloured_box(spans[0], width, held[0], shades))
    line.append("·" * (scale.columns - len(line)), "dim")
    return line


def _sums(row: Sequence[Reduction], scale: _Scale, coloured: bool) -> Text:
    """The sums over replicas of a rank, each with the number of its stage where it fits."""
    line = Text()
    for one in row:
        first, last = scale.column(one.start), scale.column(one.end)
        width = last - max(first, len(line))
        if width > 0:
            line.append(" " * (first - len(line)))
            name = f"+{one.stage}" if width >= len(f"+{one.stage}") else "+"
            line.append(name.ljust(width) if coloured else name.ljust(width, "─"), f"#ffffff on {REDUCTION_COLOUR}" if coloured else "")
    return line


def _boxes(row: Sequence[Span], scale: _Scale, coloured: bool) -> Iterator[tuple[tuple[Span, ...], int, int]]:
    """The spans of each box with its first column and the one after its last.

    Two passes that ran overlapped are one box where there is room for both names and no colour to tell, or else share the columns.
    """
    for spans in steps_of(row):
        start, end = spans[0].start, spans[-1].end
        whole = scale.column(start), scale.column(end)
        if not coloured and len(_name(spans, [0] * len(spans))) <= whole[1] - whole[0]:
            yield spans, *whole
        else:
            edges = [scale.column(start + (end - start) * k // len(spans)) for k in range(len(spans) + 1)]
            yield from (((span,), first, last) for span, (first, last) in zip(spans, pairwise(edges), strict=True))


def _coloured_box(span: Span, width: int, place: int, shades: int) -> Text:
    colour = shade(span.op.kind, place, shades)
    number = str(span.op.microbatch)
    if width == len(number):
        return Text(number, f"{ink(colour)} on {colour}")
    box = Text(EDGE, f"{DARK} on {colour}")
    return box.append((number if len(number) < width else "").center(width - 1), f"{ink(colour)} on {colour}")


def _plain_box(spans: tuple[Span, ...], width: int, places: Sequence[int]) -> Text:
    name = _name(spans, places)
    short = name if len(name) <= width else name.rstrip("0123456789")[:width]
    return Text(short.ljust(width, "─"))


def _name(spans: tuple[Span, ...], places: Sequence[int]) -> str:
    """What the passes of a box are called: `F3`, `b0` on a later stage, `F3&bw5` overlapped."""
    letters = [span.op.kind if place == 0 else span.op.kind.lower() for span, place in zip(spans, places, strict=True)]
    return "&".join(f"{letter}{span.op.microbatch}" for letter, span in zip(letters, spans, strict=True))


def _axis(scale: _Scale) -> str:
    line = ""
    for tick in ticks(scale.duration, max(2, scale.columns // TICK_WIDTH)):
        label = f"{ms(tick):g}"
        at = scale.column(scale.start + tick)
        if len(line) <= at and at + len(label) <= scale.columns:
            line = line.ljust(at) + label
    return f"{line} ms" if len(line) + 3 <= scale.columns else line


def legend(*timelines: Timeline, coloured: bool, dense: bool = False) -> Text:
    """What the colours and letters of `draw` stand for, in one line; `dense` where some picture shows how busy ranks are."""
    return Text("   ").join(_entries(timelines, coloured, dense))


def _entries(timelines: Sequence[Timeline], coloured: bool, dense: bool) -> Iterator[Text]:
    present = {span.op.kind for timeline in timelines for _, span in timeline.spans()}
    shades = num_shades(*timelines)
    for kind in (kind for kind in KINDS if kind in present):
        entry = Text()
        for place in range(shades if coloured else 0):
            entry.append("  ", f"on {shade(kind, place, shades)}")
        yield entry.append(f"{' ' if coloured else ''}{kind} {traits_of(kind).phrase}")
    if shades > 1:
        yield Text("lighter: later stages of the rank" if coloured else "lower case: later stages of the rank")
    if any(timeline.reductions for timeline in timelines):
        yield Text("+ sum of a stage over replicas")
    if dense:
        several = "passes, colours mixed" if coloured else "passes of several kinds"
        yield Text(f"{SHADES} {several}: the darker, the more of the time that a column stands for")
    yield Text("· idle")
