"""Bubbles of zb-h1 and zb-h2."""

from __future__ import annotations

import pytest

from tests.pure.formulas.played import COMMS, FULL, GRID, TIMES, UNIT, drawn, played, span_bubble
from zerobubble.costs import NS_PER_MS

SHORT = [(f, b, w) for f, b, w in TIMES if w <= min(f, b)]
"""Times with W no longer than F and B."""


@pytest.mark.parametrize(("name", "depth"), [("zb-h1", 1), ("zb-h2", 2)])
def test_bubble(name: str, depth: int) -> None:
    for p, m, times in drawn(GRID, SHORT):
        f, b, w = times
        ahead = min(p if depth == 1 else 2 * p - 1, m) - 1
        assert span_bubble(played(name, p, m, times), m, times) == (p - 1) * (f + b) - ahead * w, (p, m, times)


def test_bubble_of_zb_h1_with_communication() -> None:
    choices = [(t, c) for t in TIMES for c in COMMS if 2 * c <= t[2] <= min(t[:2]) + 2 * c]
    for p, m, (times, c) in drawn([(p, m) for p, m in GRID if m > p], choices):
        f, b, w = times
        bubble = span_bubble(played("zb-h1", p, m, times, c), m, times)
        assert bubble == pytest.approx((p - 1) * (f + b - w + 4 * c)), (p, m, times, c)


def test_bubble_of_zb_h2_with_communication() -> None:
    choices = [(t, c) for t in SHORT for c in COMMS if 2 * c <= t[0] + t[1]]
    for p, m, (times, c) in drawn(FULL, choices):
        f, b, w = times
        bubble = span_bubble(played("zb-h2", p, m, times, c), m, times)
        assert bubble == pytest.approx((p - 1) * (f + b - 2 * w + 2 * c)), (p, m, times, c)


@pytest.mark.parametrize(("name", "shapes"), [("zb-h1", [(p, m) for p, m in GRID if m >= p]), ("zb-h2", FULL)])
def test_makespan(name: str, shapes: list[tuple[int, int]]) -> None:
    for p, m in shapes:
        assert played(name, p, m, UNIT).makespan == (3 * m + p - 1) * NS_PER_MS, (p, m)
