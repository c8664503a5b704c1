"""Bubbles of hanayo."""

from __future__ import annotations

import pytest

from tests.pure.formulas.played import GRID, TIMES, drawn, makespan_bubble, played
from tests.refusals import raises
from zerobubble import InputError, make


@pytest.mark.long
def test_bubble() -> None:
    for p, m, (times, v) in drawn(GRID, [(t, v) for t in TIMES for v in (2, 4, 6)]):
        f, b, w = times
        last = (m - 1) % p + 1
        bubble = (2 * (p - 1) + (v - 2) * (p - last)) * (b + w) + v * max(p - m, 0) * f
        assert makespan_bubble(played("hanayo", p, m, times, v=v), m, times, v) == bubble, (p, m, times, v)


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_bubble_rate_of_as_many_microbatches_as_ranks(waves: int) -> None:
    for p in range(2, 17):
        rate = played("hanayo", p, p, (2, 2, 2), v=2 * waves).bubble_makespan
        assert rate == pytest.approx((2 * p - 2) / (3 * p * waves + 2 * p - 2)), p


@pytest.mark.parametrize(("waves", "greedy"), [(1, 0.333), (2, 0.213), (3, 0.153)])
def test_no_worse_than_a_greedy_list(waves: int, greedy: float) -> None:
    assert round(played("hanayo", 4, 4, (2, 2, 2), v=2 * waves).bubble_makespan, 3) <= greedy


@pytest.mark.parametrize(("p", "waves", "makespan"), [(2, 1, 16), (2, 2, 28), (3, 1, 26), (3, 2, 44), (4, 1, 36), (4, 2, 60)])
def test_optimum_of_an_exact_solver(p: int, waves: int, makespan: int) -> None:
    """Makespans in forward times of a stage, BW taking two, m = p."""
    timeline = played("hanayo", p, p, (1, 1, 1), v=2 * waves)
    assert timeline.makespan == makespan * 1_000_000


def test_half_a_wave_is_refused() -> None:
    with raises(InputError, 3, "hanayo", "stages"):
        make("hanayo", 4, 4, 3)
