"""A row of a timeline whose passes are narrower than a column: how busy the rank is in each column, and with what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from zerobubble.export.palette import shade
from zerobubble.kinds import Kind
from zerobubble.timeline import Span, Timeline, steps_of

Load = Mapping[tuple[Kind, int], float]
"""The share of a column that the passes of each kind and place of a stage on its rank take."""

SHADES = "█▓▒░"
"""For a column that is busy throughout, and for three quarters, half and a quarter of its time."""

MOSTLY = 0.85
"""The share of a column from which on it is shown as passes of one kind."""


def is_dense(timeline: Timeline, columns: int, duration: int) -> bool:
    """Whether the passes of the fullest rank are on average narrower than one of `columns` that stand for `duration` ns."""
    steps = max(sum(1 for _ in steps_of(row)) for row in timeline.rows)
    return steps * duration > columns * timeline.makespan > 0


def dense_row(row: Sequence[Span], places: Mapping[int, int], start: int, duration: int, columns: int, shades: int | None) -> Text:
    """The `row` from `start` on in `columns` that stand for `duration` ns; `places` has the place of each stage on the rank.

    In colour, with so many `shades` of each, the colours of the passes mix. Without (None) a letter stands where nearly all of a column is
    passes of one kind, in lower case on later stages. Darker columns are busier.
    """
    line = Text()
    for load in _loads(row, places, start, duration / columns, columns):
        busy = sum(load.values())
        if busy < 1 / 8:
            line.append("·", "dim")
        elif shades is not None:
            line.append(_shade_of(busy), _mixed(load, shades))
        else:
            line.append(_letter(load) or _shade_of(busy))
    return line


def _loads(row: Sequence[Span], places: Mapping[int, int], start: int, width: float, columns: int) -> Iterator[Load]:
    """What passes take of each column of `width` ns; passes that ran overlapped share their time."""
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
    """The letter of the kind that takes nearly all of a column; empty where none does."""
    kinds: dict[Kind, float] = {}
    for (kind, _), part in load.items():
        kinds[kind] = kinds.get(kind, 0.0) + part
    kind, share = max(kinds.items(), key=lambda item: item[1])
    if share < MOSTLY:
        return ""
    later = sum(part for (each, place), part in load.items() if each == kind and place > 0)
    return kind[0].lower() if later > share / 2 else kind[0]


def _mixed(load: Load, shades: int) -> str:
    """The colours of the passes, mixed by their shares."""
    total = sum(load.values())
    colours = [(shade(kind, place, shades), share / total) for (kind, place), share in load.items()]
    channels = (round(sum(int(colour[at : at + 2], 16) * share for colour, share in colours)) for at in (1, 3, 5))
    return "#" + "".join(f"{channel:02x}" for channel in channels)
