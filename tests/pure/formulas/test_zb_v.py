"""The bubble of zb-v, which is none."""

from __future__ import annotations

from tests.pure.formulas.played import FULL, UNIT, played
from zerobubble.costs import NS_PER_MS


def test_no_bubble() -> None:
    for p, m in FULL:
        timeline = played("zb-v", p, m, UNIT, v=2)
        assert [rank.gaps for rank in timeline.ranks] == [0] * p, (p, m)
        assert timeline.makespan == (6 * m + p - 1) * NS_PER_MS, (p, m)
