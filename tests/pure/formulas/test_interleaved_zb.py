"""The bubble of interleaved-zb."""

from __future__ import annotations

import pytest

from tests.pure.formulas.played import GRID, TIMES, UNIT, drawn, makespan_bubble, played
from zerobubble.costs import NS_PER_MS

SHORT = [(f, b, w) for f, b, w in TIMES if w <= min(f, b)]
"""Times with W no longer than F and B."""


def test_bubble() -> None:
    for p, m, (times, v) in drawn(GRID, [(t, v) for t in SHORT for v in (1, 2, 3, 4)]):
        f, b, w = times
        k = min(m, p)
        bubble = (p - 1) * (f + b) - (k - 1) * w + (v - 1) * ((p - k) * f + max((p - k) * b - k * w, 0))
        assert makespan_bubble(played("interleaved-zb", p, m, times, v=v), m, times, v) == bubble, (p, m, times, v)


@pytest.mark.long
def test_bubble_of_enough_microbatches() -> None:
    for p, m, (times, v) in drawn([(p, m) for p, m in GRID if m >= p], [(t, v) for t in SHORT for v in (2, 3)]):
        f, b, w = times
        assert makespan_bubble(played("interleaved-zb", p, m, times, v=v), m, times, v) == (p - 1) * (f + b - w), (p, m, times, v)


@pytest.mark.parametrize(("p", "m", "v", "makespan"), [(4, 8, 2, 51), (4, 8, 3, 75), (8, 24, 2, 151)])
def test_unit_times_of_an_independent_simulator(p: int, m: int, v: int, makespan: int) -> None:
    timeline = played("interleaved-zb", p, m, UNIT, v=v)
    assert timeline.makespan == timeline.span == makespan * NS_PER_MS
    assert [rank.gaps // NS_PER_MS for rank in timeline.ranks] == list(range(p))[::-1]
