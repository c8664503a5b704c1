"""Bubbles of chimera, in times of a rank."""

from __future__ import annotations

import pytest

from tests.pure.formulas.played import GRID, TIMES, Times, drawn, makespan_bubble, played
from tests.refusals import raises
from zerobubble import Costs, InputError, make
from zerobubble.costs import UNIT_BYTES
from zerobubble.simulation import peak_memory

EVEN = [(p, m) for p, m in GRID if p % 2 == 0]


def bubble(p: int, m: int, times: Times) -> float:
    """A microbatch passes a rank once, at one of its two stages."""
    return makespan_bubble(played("chimera", p, m, times, v=2), m, times)


def test_bubble() -> None:
    for p, m, times in drawn(EVEN, TIMES):
        f, b, w = times
        assert bubble(p, m, times) == (p - 2 + m % 2) * (b + w) + max(p - m, 0) * f, (p, m, times)


def test_published_bubble_rate() -> None:
    """Chimera, Table 2: F and the whole backward take the same time."""
    for p, m in EVEN:
        if m >= p and m % 2 == 0:
            rate = played("chimera", p, m, (2, 1, 1), v=2).bubble_makespan
            assert rate == pytest.approx((p - 2) / (2 * m + p - 2)), (p, m)


@pytest.mark.parametrize(
    ("p", "m", "backward", "optimum"),
    [(4, 4, 1, 2), (4, 4, 2, 4), (4, 8, 1, 2), (6, 6, 1, 4), (6, 6, 2, 8), (8, 8, 1, 6), (8, 8, 2, 12)],
)
def test_optimum_of_an_exact_solver(p: int, m: int, backward: int, optimum: int) -> None:
    """Bubbles in forward times, for any memory."""
    assert bubble(p, m, (1, backward / 2, backward / 2)) == optimum


@pytest.mark.parametrize(("p", "m", "optimum"), [(4, 8, 4), (4, 12, 4), (6, 12, 8)])
def test_optimum_within_memory(p: int, m: int, optimum: int) -> None:
    """Bubbles in forward times, BW taking two, of the best order that holds p microbatches; with more memory (4, 8) reaches 3."""
    assert bubble(p, m, (1, 1, 1)) == optimum
    assert max(peak_memory(make("chimera", p, m), Costs.uniform(p))) == p * UNIT_BYTES


def test_memory_of_as_many_microbatches_as_ranks() -> None:
    for p in range(2, 17, 2):
        peaks = peak_memory(make("chimera", p, p), Costs.uniform(p))
        assert (min(peaks), max(peaks)) == ((p // 2 + 1) * UNIT_BYTES, p * UNIT_BYTES)


def test_an_odd_number_of_ranks_is_refused() -> None:
    with raises(InputError, 3, "chimera", "ranks"):
        make("chimera", 3, 4)
