"""Lanes of overlapped passes in pictures: two of them share the height of one."""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.timeline import Span, steps_of


def lanes(row: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the lane of each span and the number of lanes: (0, 1) for one that runs alone, (0, 2) and (1, 2) for two overlapped."""
    return [(lane, len(group)) for group in steps_of(row) for lane in range(len(group))]
