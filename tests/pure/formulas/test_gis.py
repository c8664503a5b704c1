"""Bubbles of gis and gis-h, and what they gain over interleaved-1f1b."""

from __future__ import annotations

import pytest

from tests.pure.formulas.peaks import PEAKS
from tests.pure.formulas.played import GRID, TIMES, Times, drawn, makespan_bubble, played

CHOICES = [(times, v) for times in (*TIMES, (0, 6, 4), (7, 1, 1), (1, 7, 3)) for v in (1, 2, 3, 4)]
CLOSE = [(times, v) for times, v in CHOICES if abs(times[0] - times[1]) <= times[2] <= max(times[:2])]
"""F and B no further apart than W."""


def group_sizes(name: str, p: int, m: int) -> tuple[int, int]:
    """The microbatches in the first and in the last group."""
    count = -(-m // p) if name == "gis" else max(1, m // -(-p // 2))
    return -(-m // count), m // count


def bubble(name: str, p: int, m: int, times: Times, v: int) -> float:
    return makespan_bubble(played(name, p, m, times, v=v), m, times, v)


@pytest.mark.parametrize("name", ["gis", "gis-h"])
def test_bubble(name: str) -> None:
    for p, m, (times, v) in drawn(GRID, CLOSE):
        f, b, w = times
        g, h = group_sizes(name, p, m)
        if name == "gis-h" and g != h:
            continue
        stated = (p - 1) * (f + b) + (v - 1) * ((p - g) * f + max((p - h) * b - h * w, 0))
        assert bubble(name, p, m, times, v) == stated, (p, m, times, v)


def test_bubble_of_gis_where_p_divides_m() -> None:
    for p, m, ((f, b, w), v) in drawn([(p, m) for p, m in GRID if m % p == 0], CHOICES):
        assert bubble("gis", p, m, (f, b, w), v) == (p - 1) * (f + b), (p, m, v)


def test_bubble_and_peak_of_gis_h_as_published() -> None:
    """PipeOffload, Table 1, where T is the time of a stage and memory counts in p microbatches."""
    for p, m, ((f, b, w), v) in drawn(
        [(p, m) for p, m in GRID if p % 2 == 0 and m % (p // 2) == 0], [(t, v) for t, v in CLOSE if t[2] <= t[1]]
    ):
        assert bubble("gis-h", p, m, (f, b, w), v) == (p - 1) * (f + b) + (v - 1) * p / 2 * (f + b - w), (p, m, v)
        if m >= p:
            assert PEAKS["gis-h"](p, m, v, 0) / (v * p) == (v + 1) / (2 * v), (p, m, v)
