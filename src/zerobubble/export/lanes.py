"""Which passes of a rank ran overlapped, for pictures: two of them share the place that one has alone."""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.timeline import Span, steps_of


def lanes(row: Sequence[Span]) -> list[tuple[int, int]]:
    """For each span of a rank, its lane and their number: (0, 1) for one that runs alone, (0, 2) and (1, 2) for two overlapped."""
    return [(lane, len(group)) for group in steps_of(row) for lane in range(len(group))]
