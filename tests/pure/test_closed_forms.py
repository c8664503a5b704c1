"""The table of closed forms: where a formula's conditions hold, the simulation gives the same figure to the ns."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.pure.shapes import EVERY, SHAPES
from tests.thinned import every_and_all
from zerobubble import Costs, Schedule, make, simulate
from zerobubble.costs import UNIT_BYTES
from zerobubble.formulas import FORMULAS, FormulaInput, setting
from zerobubble.schedules import SCHEDULES
from zerobubble.simulation import peak_memory

THIN = [*SHAPES[::2], (4, 8), (6, 16), (8, 20), (9, 18), (10, 7)]
"""Shapes of every kind; the forms of each schedule are ranged over in full in tests/pure/formulas."""

STATED = [(name, v) for name, v in EVERY if name in FORMULAS]


def drawn_costs(name: str, v: int, nth: int) -> Iterator[tuple[Schedule, Costs]]:
    """For each `nth` shape of a schedule, costs equal, nearly equal and any, with messages and without, drawn but always alike."""
    for p, m in THIN[::nth]:
        if SCHEDULES[name].allows(p, m, v):
            schedule = make(name, p, m, v)
            dice = Random(f"{name} {v} {p} {m}")
            f, b, w = (dice.randint(0, 6) for _ in range(3))
            comm = dice.randint(1, 8) / 4
            for times, c in (((f, f, f), 0), ((f, f, min(f, w)), 0), ((f, b, w), 0), ((f, b, w), comm), ((f, b, min(f, b)), comm)):
                yield schedule, Costs.uniform(schedule.num_stages, times, c, stages_per_rank=schedule.num_stages // p)


@every_and_all(4)
@pytest.mark.parametrize(("name", "v"), STATED)
def test_bubbles_where_they_say_they_hold(name: str, v: int, nth: int) -> None:
    held = 0
    for schedule, costs in drawn_costs(name, v, nth):
        at = setting(schedule, costs)
        form = FORMULAS[name].bubble(at)
        if form.holds(at):
            timeline = simulate(schedule, costs)
            assert timeline.span - timeline.work // at.p == form.value(at), (at, form.text)
            held += 1
    assert held >= (5 if nth == 1 else 1)


@every_and_all(3)
@pytest.mark.parametrize(("name", "v"), STATED)
def test_peaks(name: str, v: int, nth: int) -> None:
    for p, m in THIN[::nth]:
        if SCHEDULES[name].allows(p, m, v):
            schedule = make(name, p, m, v)
            costs = Costs.uniform(schedule.num_stages)
            assert max(peak_memory(schedule, costs)) == FORMULAS[name].peak.value(setting(schedule, costs)) * UNIT_BYTES, (p, m)


def test_closed_forms_are_those_of_known_schedules() -> None:
    assert set(FORMULAS) <= set(SCHEDULES)


ZERO_BUBBLE_TABLE_2 = {"1f1b": (2, 2, 2), "zb-h1": (2, 2, -2), "zb-h2": (2, 2, -4)}
"""Bubble for 3 ranks as multiples of F, B and W, from m = 2p-1 on."""


@pytest.mark.parametrize("name", ZERO_BUBBLE_TABLE_2)
def test_table_2_of_zero_bubble(name: str) -> None:
    for f, b, w in ((1, 1, 1), (5, 4, 3), (100, 10, 1)):
        at = FormulaInput(3, 6, 1, f, b, w, 0)
        times = zip(ZERO_BUBBLE_TABLE_2[name], (f, b, w), strict=True)
        assert FORMULAS[name].bubble(at).value(at) == sum(n * time for n, time in times)


def test_outside_its_conditions_a_form_is_shown_but_does_not_hold() -> None:
    at = FormulaInput(4, 9, 1, 1, 1, 1, 1)
    form = FORMULAS["1f1b"].bubble(at)
    assert (form.text, form.when, form.holds(at)) == ("(p-1)(F+B+W)", "c = 0", False)
    assert FORMULAS["1f1b"].bubble(at._replace(m=8)).when == "1 < p divides m"


def test_a_second_copy_of_the_model_is_not_another_stage() -> None:
    schedule = make("dualpipe", 4, 8)
    assert setting(schedule, Costs.uniform(4, (3, 2, 1), 0.5)) == FormulaInput(4, 8, 1, 3_000_000, 2_000_000, 1_000_000, 500_000)
