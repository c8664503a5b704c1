"""Which passes of a rank ran overlapped, for pictures: two of them share the place that one has alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerobubble.timeline import Span


def together(row: Sequence[Span]) -> Iterator[tuple[Span, ...]]:
    """The spans of a rank, alone or two that ran overlapped."""
    place = 0
    while place < len(row):
        pair = tuple(row[place : place + 2])
        overlapped = len(pair) == 2 and pair[1].start < pair[0].end
        yield pair if overlapped else pair[:1]
        place += 2 if overlapped else 1


def lanes(row: Sequence[Span]) -> list[tuple[int, int]]:
    """For each span of a rank, its lane and their number: (0, 1) for one that runs alone, (0, 2) and (1, 2) for two overlapped."""
    return [(lane, len(group)) for group in together(row) for lane in range(len(group))]
