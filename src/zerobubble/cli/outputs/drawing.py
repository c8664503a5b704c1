"""A timeline drawn in a terminal: a line per rank, time scaled to the width, dots for idle time.

If the names of passes do not fit in one line, the picture continues below itself. If that takes too many lines, the columns show how busy
the rank is, and with which kinds of passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from string import ascii_uppercase
from typing import NamedTuple

from rich.text import Text

from zerobubble.export.palette import LATER_STAGES, REDUCTION_COLOR, ink, num_shades, shade, shades_drawn, stage_order
from zerobubble.kinds import KINDS, Kind, traits_of
from zerobubble.timeline import ReplicaSum, Span, Timeline, steps_of
from zerobubble.units import ms, ticks

EDGE, DARK = "▏", "#1b1f24"
TICK_WIDTH = 9
Load = Mapping[tuple[Kind, int], float]
"""The fraction of a column that passes take, by their kind and by the place of their stage on the rank (0 for its first stage)."""

SHADES = "█▓▒░"
"""Characters for columns that are busy all the time, three quarters, half, and a quarter of it."""

MOST_ROWS = 40
"""The most rows of ranks in a picture that continues below itself."""

MOSTLY = 0.85
"""The fraction of a column that passes of one kind must take to show their letter."""


class _Scale(NamedTuple):
    """The time axis of a picture: `columns` columns for `duration` ns from `start`."""

    start: int
    duration: int
    columns: int

    def column(self, time: int) -> int:
        return round((time - self.start) * self.columns / max(1, self.duration))


def draw(timeline: Timeline, width: int, colored: bool, duration: int | None = None) -> Text:
    """Draws `timeline` in `width` columns for `duration` ns, its makespan if not given.

    A colored box starts with a thin line and shows its microbatch. Without color it starts with the letter of the kind, in lower case for
    later stages of the rank. Overlapped passes share one box. If passes are narrower than a column, columns show how busy the ranks are.
    Gradient sums over replicas are on a line below the rank. If a timeline takes no time, the
    result is a sentence that says so.
    """
    return _drawn(timeline, width, colored, duration, bands=1)


def draw_in_bands(timeline: Timeline, width: int, colored: bool) -> Text:
    """Draws `timeline` as `draw` does, but continues below if the names of most passes do not fit in `width` columns."""
    return _drawn(timeline, width, colored, None, bands=_num_bands(timeline, max(10, width - _label(timeline))))


def _num_bands(timeline: Timeline, columns: int) -> int:
    """Returns into how many parts of `columns` columns to divide the picture; 1 if passes would be too narrow for names anyway."""
    durations = sorted(spans[-1].end - spans[0].start for row in timeline.rows for spans in steps_of(row))
    usual = durations[len(durations) // 5] if durations else 0  # four in five are at least as long
    if not usual:
        return 1
    name = 1 + len(str(max(span.op.microbatch for row in timeline.rows for span in row)))
    needed = -(-name * timeline.makespan // (usual * columns))
    bands = min(needed, max(1, MOST_ROWS // timeline.num_ranks))
    return 1 if is_dense(timeline, bands * columns // 2, timeline.makespan) else bands


def _drawn(timeline: Timeline, width: int, colored: bool, duration: int | None, bands: int) -> Text:
    if not timeline.makespan:
        return Text("Nothing to draw: every pass and message takes 0 ms. Give times above 0.\n")
    label = _label(timeline)
    columns = max(10, width - label)
    scale = _Scale(timeline.start, timeline.makespan if duration is None else duration, bands * columns)
    shades = num_shades(timeline) if colored else None
    draw_row = _dense_row if is_dense(timeline, scale.columns, scale.duration) else _row
    lines: list[tuple[str, Text]] = []
    for rank, (row, places) in enumerate(zip(timeline.rows, stage_order(timeline), strict=True)):
        lines.append((f"rank {timeline.number_of(rank)}", draw_row(row, places, scale, shades)[: scale.column(timeline.end)]))
        if timeline.reductions:
            lines.append(("", _sums(timeline.reductions[rank], scale, colored)))
    picture = Text(no_wrap=True)
    for first in range(0, scale.columns, columns):
        picture.append("\n\n" if first else "")
        for name, line in lines:
            picture.append(name.ljust(label)).append_text(line[first : first + columns]).append("\n")
        picture.append(" " * label + _axis(scale, first, columns), "dim")
    return picture


def _label(timeline: Timeline) -> int:
    """Returns the width of the names of ranks."""
    return len(f"rank {timeline.number_of(timeline.num_ranks - 1)} ")


def _dense_row(row: Sequence[Span], places: Mapping[int, int], scale: _Scale, shades: int | None) -> Text:
    return dense_row(row, places, scale.start, scale.duration, scale.columns, shades)


def _row(row: Sequence[Span], places: Mapping[int, int], scale: _Scale, shades: int | None) -> Text:
    """Draws the passes as boxes, in `shades` shades per color or without color if None, and idle time as dots."""
    line = Text()
    for spans, first, last in _boxes(row, scale, shades is not None):
        width = last - max(first, len(line))
        if width > 0:
            line.append("·" * (first - len(line)), "dim")
            held = [places[span.op.stage] for span in spans]
            line.append_text(_plain_box(spans, width, held) if shades is None else _colored_box(spans[0], width, held[0], shades))
    line.append("·" * (scale.columns - len(line)), "dim")
    return line


def _sums(row: Sequence[ReplicaSum], scale: _Scale, colored: bool) -> Text:
    """Draws the sums over replicas of a rank, each with the number of its stage if it fits."""
    line = Text()
    for replica_sum in row:
        first, last = scale.column(replica_sum.start), scale.column(replica_sum.end)
        width = last - max(first, len(line))
        if width > 0:
            line.append(" " * (first - len(line)))
            name = f"+{replica_sum.stage}" if width >= len(f"+{replica_sum.stage}") else "+"
            line.append(name.ljust(width) if colored else name.ljust(width, "─"), f"#ffffff on {REDUCTION_COLOR}" if colored else "")
    return line


def _boxes(row: Sequence[Span], scale: _Scale, colored: bool) -> Iterator[tuple[tuple[Span, ...], int, int]]:
    """Yields the spans of each box with its first column and the one after its last.

    Overlapped passes are one box if both names fit and there is no color. Otherwise they divide its columns.
    """
    for spans in steps_of(row):
        start, end = spans[0].start, spans[-1].end
        whole = scale.column(start), scale.column(end)
        if not colored and len(_name(spans, [0] * len(spans))) <= whole[1] - whole[0]:
            yield spans, *whole
        else:
            edges = [scale.column(start + (end - start) * k // len(spans)) for k in range(len(spans) + 1)]
            yield from (((span,), first, last) for span, (first, last) in zip(spans, pairwise(edges), strict=True))


def _colored_box(span: Span, width: int, place: int, shades: int) -> Text:
    color = shade(span.op.kind, place, shades)
    number = str(span.op.microbatch)
    if width == len(number):
        return Text(number, f"{ink(color)} on {color}")
    box = Text(EDGE, f"{DARK} on {color}")
    return box.append((number if len(number) < width else "").center(width - 1), f"{ink(color)} on {color}")


def _plain_box(spans: tuple[Span, ...], width: int, places: Sequence[int]) -> Text:
    name = _name(spans, places)
    if len(name) > width:
        name = name.rstrip("0123456789")
    return Text((name if len(name) <= width else _letter_of(spans[0].op.kind, places[0])).ljust(width, "─"))


@cache
def _letters(kinds: tuple[Kind, ...]) -> Mapping[Kind, str]:
    """Returns the letter of each kind in a single column: its first, or a free one if that is a kind of another color, as B is for BW."""
    free = (letter for letter in "XYZ" + ascii_uppercase if letter not in kinds)
    first = {str(kind): traits_of(kind).color for kind in kinds}
    return {kind: kind[0] if first.get(kind[0], traits_of(kind).color) == traits_of(kind).color else next(free) for kind in kinds}


def _letter_of(kind: Kind, place: int) -> str:
    letter = _letters(tuple(KINDS))[kind]
    return letter.lower() if place > 0 else letter


def _name(spans: tuple[Span, ...], places: Sequence[int]) -> str:
    """Returns the label of a box: `F3`, `b0` on a later stage, `F3&bw5` overlapped."""
    letters = [span.op.kind if place == 0 else span.op.kind.lower() for span, place in zip(spans, places, strict=True)]
    return "&".join(f"{letter}{span.op.microbatch}" for letter, span in zip(letters, spans, strict=True))


def _axis(scale: _Scale, first: int, columns: int) -> str:
    """Returns the times below `columns` columns from the column `first`, with their unit at the end."""
    line, unit = "", " ms"
    for tick in ticks(scale.duration, max(2, scale.columns // TICK_WIDTH)):
        label = f"{ms(tick):g}"
        at = scale.column(scale.start + tick) - first
        if len(line) <= at and at + len(label) + len(unit) <= columns:
            line = line.ljust(at) + label
    return line + unit


def legend(*timelines: Timeline, colored: bool, drawn: Sequence[Text]) -> Text:
    """Explains in one line the colors, letters and signs of `drawn`, the pictures of the timelines by `draw`."""
    return Text("   ").join(_entries(timelines, colored, "".join(text.plain for text in drawn)))


def _entries(timelines: Sequence[Timeline], colored: bool, drawn: str) -> Iterator[Text]:
    yield from _kind_entries(timelines, colored, drawn)
    if num_shades(*timelines) > 1:
        yield Text(LATER_STAGES if colored else "lower case: later stages of the rank")
    if "─" in drawn:
        yield Text("─ rest of a pass")
    if any(timeline.reductions for timeline in timelines):
        yield Text("+ sum of a stage over replicas")
    if any(sign in drawn for sign in SHADES):
        several = "busy in part: darker is busier" if colored else "passes of several kinds: darker is busier"
        yield Text(f"{SHADES[1:] if colored else SHADES} {several}")
    yield Text("· idle")


def _kind_entries(timelines: Sequence[Timeline], colored: bool, drawn: str) -> Iterator[Text]:
    shades = num_shades(*timelines)
    for kind, places in shades_drawn(*timelines).items():
        entry = Text()
        for place in places if colored else ():
            entry.append("  ", f"on {shade(kind, place, shades)}")
        letter = _letter_of(kind, 0)
        narrow = not colored and letter != kind[0] and (letter in drawn or letter.lower() in drawn)
        yield entry.append(f"{' ' if colored else ''}{kind} {traits_of(kind).phrase}{f' ({letter} in one column)' if narrow else ''}")


def is_dense(timeline: Timeline, columns: int, duration: int) -> bool:
    """Returns whether the passes of the rank with the most are on average narrower than one of `columns` columns for `duration` ns."""
    steps = max(sum(1 for _ in steps_of(row)) for row in timeline.rows)
    return steps * duration > columns * timeline.makespan > 0


def dense_row(row: Sequence[Span], places: Mapping[int, int], start: int, duration: int, columns: int, shades: int | None) -> Text:
    """Draws the `row` from `start` in `columns` columns for `duration` ns; `places` has the place of each stage on the rank.

    With `shades` shades per color, each half of a column has the mixed colors of its passes. If None, a column of nearly only one kind
    shows its letter, in lower case for later stages. Darker columns are busier.
    """
    line = Text()
    halves = list(_loads(row, places, start, duration / columns / 2, 2 * columns))
    for left, right in zip(halves[::2], halves[1::2], strict=True):
        load = {key: (left.get(key, 0.0) + right.get(key, 0.0)) / 2 for key in (*left, *right)}
        busy = sum(load.values())
        if busy < 1 / 8:
            line.append("·", "dim")
        elif shades is None:
            line.append(_letter(load) or _shade_of(busy))
        elif _shade_of(busy) == SHADES[0]:
            line.append("▌", f"{_mixed(left, shades)} on {_mixed(right, shades)}")
        else:
            line.append(_shade_of(busy), _mixed(load, shades))
    return line


def _loads(row: Sequence[Span], places: Mapping[int, int], start: int, width: float, columns: int) -> Iterator[Load]:
    """Returns the load of each column of `width` ns; overlapped passes share their time."""
    loads: list[dict[tuple[Kind, int], float]] = [{} for _ in range(columns)]
    for spans in steps_of(row):
        for span in spans:
            key = span.op.kind, places[span.op.stage]
            first, last = (span.start - start) / width, (span.end - start) / width
            for column in range(max(0, int(first)), min(columns, int(last) + 1)):
                inside = max(0.0, min(last, column + 1) - max(first, column)) / len(spans)
                loads[column][key] = loads[column].get(key, 0.0) + inside
    yield from loads


def _shade_of(busy: float) -> str:
    return SHADES[min(3, max(0, round(4 * (1 - busy))))]


def _letter(load: Load) -> str:
    """Returns the letter of the kind that takes nearly all of a column; empty if none does."""
    kinds: dict[Kind, float] = {}
    for (kind, _), part in load.items():
        kinds[kind] = kinds.get(kind, 0.0) + part
    kind, share = max(kinds.items(), key=lambda item: item[1])
    if share < MOSTLY:
        return ""
    later = sum(part for (other, place), part in load.items() if other == kind and place > 0)
    return _letter_of(kind, int(later > share / 2))


def _mixed(load: Load, shades: int) -> str:
    """Returns the colors of the passes, mixed by their fractions."""
    total = sum(load.values())
    colors = [(shade(kind, place, shades), share / total) for (kind, place), share in load.items()]
    channels = (round(sum(int(color[at : at + 2], 16) * share for color, share in colors)) for at in (1, 3, 5))
    return "#" + "".join(f"{channel:02x}" for channel in channels)
