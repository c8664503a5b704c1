"""Bubbles of breadth-first and forward."""

from __future__ import annotations

import pytest

from tests.pure.formulas.played import GRID, TIMES, drawn, played
from zerobubble.costs import NS_PER_MS

CHOICES = [(t, v) for t in TIMES for v in (1, 2, 3, 4)]


@pytest.mark.long
def test_bubble_of_breadth_first() -> None:
    for p, m, (times, v) in drawn(GRID, CHOICES):
        timeline = played("breadth-first", p, m, times, v=v)
        bubble = (p - 1 + (v - 1) * max(p - m, 0)) * sum(times)
        assert timeline.makespan == (m * v * sum(times) + bubble) * NS_PER_MS, (p, m, times, v)
        assert timeline.ranks[0].gaps == bubble * NS_PER_MS, (p, m, times, v)


def test_bubble_of_forward() -> None:
    for p, m, (times, v) in drawn(GRID, CHOICES):
        bubble = (p - 1 + (v - 1) * max(p - m, 0)) * times[0]
        assert played("forward-only", p, m, times, v=v).makespan == (m * v * times[0] + bubble) * NS_PER_MS, (p, m, times, v)


def test_no_order_of_forwards_is_faster() -> None:
    """A rank has mv passes to run, the last of them p-1 passes before the end; the last microbatch begins after m-1 others and has pv
    passes in a row."""
    for p, m, v in drawn(GRID, (1, 2, 3, 4)):
        least = max(m * v + p - 1, m - 1 + p * v)
        assert played("forward-only", p, m, (1, 1, 1), v=v).makespan == least * NS_PER_MS, (p, m, v)


def test_messages_hide_behind_later_microbatches() -> None:
    """Between a rank's stages lie m-p passes of p ms, enough for p messages of m-p ms and no more."""
    for p, m in [(p, m) for p, m in GRID if m > p]:
        enough, short = (played("forward-only", p, m, (p, 1, 1), m - p + excess, v=2) for excess in (0, 0.5))
        assert [rank.gaps for rank in enough.ranks] == [0] * p, (p, m)
        assert min(rank.gaps for rank in short.ranks) > 0, (p, m)
