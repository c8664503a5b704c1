"""Published tables and golden figures, met to the digit.

`formulas/` checks every formula of a docstring under the conditions that it states.
"""

from __future__ import annotations

import re

import pytest

from tests.pure.golden import FIGURES, TABLE_5, TABLE_8, UNIT_TIMES, WITH_COMM, Profile, Unit
from tests.thinned import every
from zerobubble import Costs, Kind, Op, Schedule, Timeline, make, simulate
from zerobubble.costs import NS_PER_MS, UNIT_BYTES
from zerobubble.schedules import SCHEDULES
from zerobubble.simulation import peak_memory


def bubble_rate(name: str, profile: Profile, chunks: int = 1, loops: int = 1) -> float:
    """The rate of a schedule at the profile's times, which are those of 1/`chunks` of a rank."""
    schedule = make(name, profile.ranks, profile.microbatches, loops)
    times = tuple(chunks * time for time in profile.times)
    return simulate(schedule, Costs.uniform(schedule.num_stages, times, profile.comm, stages_per_rank=loops)).bubble_span


def label(profile: Profile) -> str:
    return f"{profile.model}-m{profile.microbatches}"


@pytest.mark.parametrize("profile", every(2, TABLE_5), ids=label)
def test_bubble_rates_of_zero_bubble_table_5(profile: Profile) -> None:
    rates = {name: round(bubble_rate(name, profile), 4) for name in profile.rates}
    assert rates == profile.rates


@pytest.mark.parametrize("profile", TABLE_5, ids=label)
def test_interleaved_bubble_rates_with_every_dependency(profile: Profile) -> None:
    assert round(bubble_rate("interleaved-1f1b", profile, loops=profile.loops), 4) == profile.interleaved


@pytest.mark.sweep
@pytest.mark.parametrize("profile", TABLE_8, ids=label)
def test_bubble_rates_of_zero_bubble_table_8(profile: Profile) -> None:
    rates = {name: round(bubble_rate(name, profile, chunks=2), 4) for name in profile.rates}
    assert rates == profile.rates


@pytest.mark.parametrize("unit", UNIT_TIMES, ids=lambda u: f"{u.name}-p{u.ranks}-v{u.stages_per_rank}")
def test_golden_figures_at_unit_times(unit: Unit) -> None:
    schedule = make(unit.name, unit.ranks, unit.microbatches, unit.stages_per_rank)
    timeline = simulate(schedule, Costs.uniform(schedule.num_stages))
    without_work = peak_memory(schedule, Costs.uniform(schedule.num_stages, held=0))
    assert (timeline.makespan, timeline.span) == (unit.makespan * NS_PER_MS, unit.span * NS_PER_MS)
    assert tuple(rank.gaps // NS_PER_MS for rank in timeline.ranks) == unit.gaps
    assert tuple(rank.peak_bytes for rank in timeline.ranks) == tuple(peak * UNIT_BYTES for peak in unit.peak)
    assert without_work == tuple(peak * UNIT_BYTES for peak in unit.peak_without_work)


def test_every_schedule_has_a_golden_row() -> None:
    assert {unit.name for unit in UNIT_TIMES} == set(SCHEDULES)


@pytest.mark.parametrize(("ranks", "microbatches", "comm", "plain", "eager"), WITH_COMM)
def test_golden_makespans_with_communication(ranks: int, microbatches: int, comm: float, plain: float, eager: float) -> None:
    def timeline(name: str) -> Timeline:
        return simulate(make(name, ranks, microbatches), Costs.uniform(ranks, comm=comm))

    assert [timeline(name).makespan / NS_PER_MS for name in ("1f1b", "eager-1f1b")] == [plain, eager]


def decoded(name: str) -> list[list[Op]]:
    """A printed sequence as passes: capitals of one stage, or F b w of a rank's first and f B' W' of its second.

    B is BW where backward is whole.
    """
    schedule = make(name, 4, 8)
    back = Kind.B if SCHEDULES[name].splits else Kind.BW
    second = {"f": Kind.F, "B'": back, "W'": Kind.W}
    first = {"F": Kind.F, "b": Kind.B, "w": Kind.W, "B": back, "W": Kind.W}
    rows = []
    for rank, line in enumerate(FIGURES[name]):
        cells = [re.fullmatch(r"(\D+)(\d+)", cell).groups() for cell in line.split()]
        last = schedule.num_stages - 1 - rank
        rows.append([Op(second[k], last, int(j) - 1) if k in second else Op(first[k], rank, int(j) - 1) for k, j in cells])
    return rows


@pytest.mark.parametrize("name", FIGURES)
def test_orders_of_the_printed_figures(name: str) -> None:
    assert [list(row) for row in make(name, 4, 8).rows] == decoded(name)


def test_a_printed_figure_is_a_schedule_of_its_own() -> None:
    rows = tuple(map(tuple, decoded("zb-v")))
    figure = Schedule("figure 8", make("zb-v", 4, 8).placement, 8, rows)
    timeline = simulate(figure, Costs.uniform(8))
    assert {rank.span for rank in timeline.ranks} == {48 * NS_PER_MS}
