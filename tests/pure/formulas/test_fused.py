"""Bubbles of gpipe, 1f1b and eager-1f1b."""

from __future__ import annotations

import pytest

from tests.pure.formulas.played import COMMS, GRID, TIMES, drawn, makespan_bubble, played
from zerobubble.costs import NS_PER_MS


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_bubble(name: str) -> None:
    for p, m, times in drawn(GRID, TIMES):
        timeline = played(name, p, m, times)
        bubble = (p - 1) * sum(times)
        assert makespan_bubble(timeline, m, times) == bubble, (p, m, times)
        assert timeline.ranks[0].gaps == bubble * NS_PER_MS, (p, m, times)


def test_eager_1f1b_pays_each_message_once() -> None:
    for p, m, (times, c) in drawn(GRID, [(t, c) for t in TIMES for c in COMMS if 2 * c <= sum(t)]):
        bubble = makespan_bubble(played("eager-1f1b", p, m, times, c), m, times)
        assert bubble == pytest.approx((p - 1) * (sum(times) + 2 * c)), (p, m, times, c)


@pytest.mark.long
def test_1f1b_pays_messages_all_along() -> None:
    multiples = [(p, p * k) for p in range(2, 17) for k in range(1, 9)]
    for p, m, (times, c) in drawn(multiples, [(t, c) for t in TIMES for c in COMMS]):
        bubble = makespan_bubble(played("1f1b", p, m, times, c), m, times)
        assert bubble == pytest.approx((p - 1) * sum(times) + 2 * ((p - 1) * m / p + p - 2) * c), (p, m, times, c)
