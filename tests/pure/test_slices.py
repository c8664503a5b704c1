"""Microbatches that are cut into slices of their sequence: order, simulation, memory, forms and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import zerobubble as zb
from tests.refusals import raises
from zerobubble.export import to_torch_csv
from zerobubble.program import Program
from zerobubble.rules import Value, uses
from zerobubble.simulation import peak_memory
from zerobubble.slicing import equal_lengths, slices_of
from zerobubble.verify_program import program_faults

ROOT = Path(__file__).parents[2]
COSTS = zb.Costs.uniform(4, times=(12, 20, 8), comm=0.4).with_columns(held_keys=(80_000,) * 4)


def test_order_of_slices_is_checked() -> None:
    schedule = zb.make("1f1b", 2, 2, slices=2)
    row = list(schedule.rows[1])
    assert [str(op) for op in row[:4]] == ["1F0", "1F1", "1BW1", "1F2"]
    forwards = replace(schedule, rows=(schedule.rows[0], (row[1], row[0], *row[2:])))
    assert [(fault.code, fault.op) for fault in zb.schedule_faults(forwards)] == [("order", "1F1")]
    first, last = row.index(zb.Op.parse("1BW1")), row.index(zb.Op.parse("1BW0"))
    row[first], row[last] = row[last], row[first]
    backwards = replace(schedule, rows=(schedule.rows[0], tuple(row)))
    assert ("order", "1BW0") in [(fault.code, fault.op) for fault in zb.schedule_faults(backwards)]


def test_slices_of_other_microbatches_are_free() -> None:
    schedule = zb.make("1f1b", 1, 2, slices=2)
    row = [zb.Op.parse(text) for text in ["0F2", "0F0", "0F3", "0F1", "0BW1", "0BW3", "0BW0", "0BW2"]]
    assert zb.schedule_faults(replace(schedule, rows=(tuple(row),))) == ()


def test_values_between_slices() -> None:
    keys, gradients = zb.kinds.ValueKind.KEYS, zb.kinds.ValueKind.KEY_GRADIENT
    assert Value(keys, 1, 4) in uses(zb.Op.parse("1F5"), 3, slices=3)
    assert not {keys, gradients} & {value.value_kind for value in uses(zb.Op.parse("1F6"), 3, slices=3)}
    assert Value(gradients, 1, 5) in uses(zb.Op.parse("1B4"), 3, slices=3)
    assert not {keys, gradients} & {value.value_kind for value in uses(zb.Op.parse("1W4"), 3, slices=3)}


@pytest.mark.parametrize(("name", "slices"), [("1f1b", 4), ("zb-h1", 3), ("interleaved-1f1b", 4)])
def test_forms_keep_slices(name: str, slices: int) -> None:
    schedule = zb.make(name, 4, 2, slices=slices)
    program = zb.lower(schedule)
    assert zb.Schedule.from_text(schedule.to_text()) == schedule
    assert zb.Schedule.from_dict(schedule.to_dict()) == schedule
    assert Program.from_text(program.to_text()) == program
    assert program.slices == schedule.slices
    assert replace(program.to_schedule(), name=schedule.name) == schedule
    assert program_faults(program) == ()


def test_a_schedule_without_slices_names_those_with_slices() -> None:
    with raises(zb.InputError, name="zb-v", option="slices", having="1f1b, interleaved-1f1b, zb-h1"):
        zb.make("zb-v", 4, 2, slices=2)


def test_simulation_waits_for_slices() -> None:
    """Every pass begins as early as its rank, its message and the slice before allow, by plain recursion over the same rules."""
    costs, schedule = COSTS.sliced(4, attention=(0.3, 0.4)), zb.make("1f1b", 4, 3, slices=4)
    timeline = zb.simulate(schedule, costs)
    span = {span.op: span for row in timeline.rows for span in row}
    for rank, row in enumerate(timeline.rows):
        for before, here in zip([None, *row], row, strict=False):
            kind, stage, number = here.op
            needs = [before.end] if before else [0]
            other = stage - 1 if kind is zb.Kind.F else stage + 1
            if 0 <= other < 4:
                needs.append(span[zb.Op(kind, other, number)].end + 100_000)
            neighbor = number + (-1 if kind is zb.Kind.F else 1)
            if neighbor // 4 == number // 4 and neighbor >= 0:
                needs.append(span[zb.Op(kind, stage, neighbor)].end)
            assert here.start == max(needs), (rank, here)
            assert here.end - here.start == costs.time(kind, stage, number)


def test_times_of_slices_add_up() -> None:
    costs = COSTS.sliced((0.5, 0.3, 0.2), attention=(0.25, 0.5))
    for kind, whole in ((zb.Kind.F, 12), (zb.Kind.B, 20), (zb.Kind.W, 8), (zb.Kind.BW, 28)):
        assert sum(costs.times(kind, 0)) == pytest.approx(whole * 1e6, abs=3)
    assert costs.time(zb.Kind.F, 0, 0) == round(12e6 * (0.75 * 0.5 + 0.25 * 0.25))
    assert costs.time(zb.Kind.W, 0, 1) == round(8e6 * 0.3)
    assert zb.Costs.from_dict(costs.to_dict()) == costs


def test_shares_and_slices_multiply() -> None:
    costs = replace(COSTS, shares=(1.0, 2.0)).sliced(2)
    assert costs.times(zb.Kind.F, 0) == [6_000_000, 6_000_000, 12_000_000, 12_000_000]


def test_slices_of_equal_time() -> None:
    pieces = slices_of(equal_lengths(5, 0.6), forward=0.6, backward=0.6)
    assert [piece.forward for piece in pieces] == pytest.approx([0.2] * 5)
    assert sum(piece.tokens for piece in pieces) == pytest.approx(1)
    assert pieces[0].tokens > pieces[-1].tokens


def test_keys_stay_until_the_first_slice_has_run() -> None:
    costs, schedule = COSTS.sliced(4), zb.make("1f1b", 4, 1, slices=4)
    held = list(accumulate([250_000 + 20_000] * 4 + [-250_000] * 3 + [-250_000 - 80_000]))
    assert max(held) == peak_memory(schedule, costs)[3]
    timeline = zb.simulate(schedule, costs)
    assert [size for _, size in timeline.memory[3]][1:] == held
    assert all(steps[-1][1] == 0 for steps in timeline.memory)


def test_recomputation_keeps_slices() -> None:
    schedule = zb.schedules.with_recompute(zb.make("1f1b", 2, 2, slices=2))
    assert schedule.slices == 2
    assert zb.schedule_faults(schedule) == ()


def test_wrong_slices_are_refused() -> None:
    schedule = zb.make("1f1b", 2, 4)
    with raises(zb.InputError, 3, 4):
        replace(schedule, slices=3)
    with raises(zb.InputError, 1, 4):
        zb.simulate(zb.make("1f1b", 4, 4), COSTS.sliced(4))
    with raises(zb.InputError, 0.9):
        COSTS.sliced((0.5, 0.4))
    with raises(zb.InputError, 1.5):
        COSTS.sliced(2, attention=(1.5, 0.0))
    with raises(zb.InputError, 2):
        to_torch_csv(zb.make("1f1b", 2, 4, slices=2))


def test_the_table_of_the_page_has_the_figures_of_the_committed_benchmark() -> None:
    cases = json.loads((ROOT / "benchmarks/slices/results.json").read_text(encoding="utf-8"))["cases"]
    page = (ROOT / "docs/long-sequences.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) ms \| ([\d,]+) ms \| (\d+) % \| ([\d,]+) ms \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for sequences, *figures in rows:
        shapes = {slices: ("attention", int(sequences), slices) for slices in (1, 8)}
        best = {slices: min(case["period_ms"] for case in cases if shape_of(case) == shape) for slices, shape in shapes.items()}
        work = sum((29.718, 29.444, 19.927)) * int(sequences)
        expected = [best[1], best[8], 100 * (1 - best[8] / best[1]), work]
        assert figures == [f"{figure:,.0f}" for figure in expected]


def shape_of(case: dict[str, Any]) -> tuple[str, int, int]:
    return case["times"], case["microbatches"], case["slices"]
