"""DualPipe and DualPipeV: the published cells, the published formula, and where it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.pure.formulas.played import GRID, Times, allowed
from zerobubble import Costs, Timeline, make, simulate
from zerobubble.costs import NS_PER_MS

EVEN = [(1.0, 1.0, 1.0), (6.0, 6.0, 4.0), (4.0, 4.0, 3.0), (2.0, 2.0, 0.0)]
"""T_F = T_B >= T_W."""


def cells(name: str, p: int, m: int, times: Times, overlap: float | None = None) -> Timeline:
    """The timeline where every stage takes `times`."""
    schedule = make(name, p, m)
    return simulate(schedule, Costs.uniform(schedule.num_stages, times, overlap=overlap))


@pytest.mark.parametrize(("name", "p", "m"), [("dualpipe", 8, 20), ("dualpipe-v", 4, 10)])
def test_the_published_picture_has_66_cells_of_which_6_are_idle_in_every_row(name: str, p: int, m: int) -> None:
    timeline = cells(name, p, m, (1, 1, 1))
    assert timeline.makespan == 66 * NS_PER_MS
    assert [rank.lead + rank.gaps + rank.tail for rank in timeline.ranks] == [6 * NS_PER_MS] * p


@pytest.mark.parametrize(("p", "m", "makespan", "gaps"), [(4, 8, 51, (3, 2, 1, 0)), (8, 24, 151, (7, 6, 5, 4, 3, 2, 1, 0))])
def test_dualpipe_v_with_its_pairs_one_after_the_other(p: int, m: int, makespan: int, gaps: tuple[int, ...]) -> None:
    """As an independent simulator gave it: what overlapping hides is paid for by sending only after the pair."""
    serial = replace(make("dualpipe-v", p, m), overlaps=frozenset())
    timeline = simulate(serial, Costs.uniform(2 * p))
    assert timeline.makespan == makespan * NS_PER_MS
    assert tuple(rank.gaps // NS_PER_MS for rank in timeline.ranks) == gaps


@pytest.mark.parametrize("times", EVEN)
def test_bubble(times: Times) -> None:
    f, b, w = times
    for p, m in allowed("dualpipe", GRID)[::7]:
        assert cells("dualpipe", p, m, times).makespan == (m * sum(times) + (p // 2 - 1) * (f + 2 * b - w)) * NS_PER_MS, (p, m)
    for p, m in allowed("dualpipe-v", GRID)[::7]:
        assert cells("dualpipe-v", p, m, times).makespan == (2 * m * sum(times) + (p - 1) * (f + 2 * b - w)) * NS_PER_MS, (p, m)


def test_an_overlapped_step_costs_what_it_is_given() -> None:
    apart, together = (cells("dualpipe", 4, 16, (1, 1, 1), overlap) for overlap in (None, 2.5))
    schedule = make("dualpipe", 4, 16)
    pairs = [sum(len(step) == 2 for step in row) for row in schedule.steps]
    assert pairs == [11, 11, 11, 11]
    assert [a.work - t.work for a, t in zip(apart.ranks, together.ranks, strict=True)] == [n * NS_PER_MS // 2 for n in pairs]
