"""R, which recomputes a forward: schedules with it are checked, timed, lowered, drawn and written like any other.

An F keeps only its input exactly if the schedule has its R. Any schedule can have one.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from tests.recomputing import kinds_restored
from tests.refusals import Stated, raises
from zerobubble import Costs, InputError, Kind, Op, Placement, Schedule, lower, make, schedule_faults, simulate
from zerobubble.costs import Level
from zerobubble.export import timeline_svg, to_torch_csv
from zerobubble.fit import fit_costs
from zerobubble.gathers import plan_gathers
from zerobubble.graph import resolve
from zerobubble.kinds import CheckpointedForward, ValueKind, add_kind, traits_of
from zerobubble.lowering import program_faults
from zerobubble.lowering.rollback import with_rollback_points
from zerobubble.partition import Layer, cut_layers
from zerobubble.schedules import SCHEDULES, with_recompute
from zerobubble.simulation import peak_memory
from zerobubble.text_picture import picture
from zerobubble.view import Report, report_html

FULL = Level("full", extra=1.0, kept=0.1)


def costs_of(schedule: Schedule, level: Level = FULL) -> Costs:
    stages = schedule.num_stages
    return Costs.from_ms([2] * stages, [3] * stages, [1] * stages, 0.5, [1000] * stages, [600] * stages).with_recompute(level)


def one_rank(row: str, microbatches: int = 1) -> Schedule:
    return Schedule("mine", Placement.linear(1), microbatches, (tuple(map(Op.parse, row.split())),))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward-only"])
def test_every_schedule_can_be_recomputed(name: str) -> None:
    plain = make(name, 4, 8)
    schedule = with_recompute(plain)
    assert schedule_faults(schedule) == ()
    program = lower(schedule)
    assert program_faults(program) == ()
    assert program_faults(with_rollback_points(program)[0]) == ()
    assert Schedule.from_text(schedule.to_text()) == Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
    costs = costs_of(schedule)
    assert max(peak_memory(schedule, costs)) < max(peak_memory(plain, costs))
    assert simulate(schedule, costs).makespan >= simulate(plain, costs).makespan
    assert {op.kind for row in schedule.forward_only().rows for op in row} == {Kind.F}


def test_the_contract_of_the_text_form() -> None:
    schedule = one_rank("0F0 0R0 0B0 0W0")
    assert "rank 0: 0F0 0R0 0B0 0W0" in schedule.to_text()
    assert schedule_faults(schedule) == ()


def test_the_backward_uses_what_was_computed_again() -> None:
    graph = resolve(one_rank("0F0 0F1 0R0 0BW0 0BW1", 2))
    assert graph.needs == [(), (), (0,), (2,), (1,)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0R0 0F0 0BW0", "rank 0 runs 0R0 at position 0 before 0F0 at position 1, whose result it uses: move 0F0 earlier"),
        ("0F0 0BW0 0R0", "rank 0 runs 0BW0 at position 1 before 0R0 at position 2, whose result it uses: move 0R0 earlier"),
        ("0R0 0BW0", "stage 0, microbatch 0 on rank 0 lacks 0F0, so nothing is computed: add it to the row"),
        ("0F0 0R0", "stage 0, microbatch 0 on rank 0 lacks 0BW0, so no gradient flows back: add it to the row"),
        ("0F0 0R0 0R0 0BW0", "rank 0 runs 0R0 at position 2, but it already ran at rank 0 position 1: remove one"),
    ],
)
def test_an_illegal_order_says_why(row: str, message: str) -> None:
    assert [str(fault) for fault in schedule_faults(one_rank(row))] == [message]


def test_times_and_bytes_by_hand() -> None:
    """F keeps 100 of 1000 bytes; R takes the other 900 from its start, and 2 ms as F does."""
    schedule = one_rank("0F0 0F1 0R0 0B0 0W0 0R1 0BW1", 2)
    timeline = simulate(schedule, costs_of(schedule))
    assert [(span.start // 10**6, span.end // 10**6) for span in timeline.rows[0]] == [
        (0, 2), (2, 4), (4, 6), (6, 9), (9, 10), (10, 12), (12, 16),
    ]  # fmt: skip
    assert timeline.memory == (
        ((0, 0), (0, 100), (2_000_000, 200), (4_000_000, 1100), (9_000_000, 700), (10_000_000, 100), (10_000_000, 1000), (16_000_000, 0)),
    )
    assert peak_memory(schedule, costs_of(schedule)) == (1100,)


def test_only_what_is_chosen_is_recomputed() -> None:
    schedule = with_recompute(make("zb-v", 2, 4), stages=[0, 3], microbatches=[1, 2])
    again = {op[1:] for row in schedule.rows for op in row if op.kind is Kind.R}
    assert again == {(0, 1), (0, 2)} | {(3, j) for j in (1, 2) if not follows_at_once(make("zb-v", 2, 4), 3, j)}


def follows_at_once(schedule: Schedule, stage: int, microbatch: int) -> bool:
    row = schedule.rows[schedule.rank_of(stage, microbatch)]
    place = row.index(Op(Kind.F, stage, microbatch))
    return row[place + 1].kind is not Kind.F and row[place + 1][1:] == (stage, microbatch)


def test_a_forward_right_before_its_backward_is_left_alone() -> None:
    schedule = with_recompute(make("1f1b", 3, 4))
    assert not any(op.kind is Kind.R for op in schedule.rows[2])
    assert sum(op.kind is Kind.R for op in schedule.rows[0]) == 4


@pytest.mark.parametrize(
    ("call", "stated"),
    [
        (lambda: with_recompute(make("1f1b", 2, 2), stages=[2]), ("stage 2", 0, 1)),
        (lambda: with_recompute(make("1f1b", 2, 2), microbatches=[-1]), (-1, 0, 1, "microbatch", "schedule")),
        (lambda: with_recompute(with_recompute(make("1f1b", 2, 2))), ("1f1b", "0R0")),
        (lambda: with_recompute(make("forward-only", 2, 2)), ("forward-only", "backward")),
        (lambda: Level("full", -1, 0), ("full", "share", "level")),
        (lambda: Level("full", 1, 2), ("full", 2, "F", 0, 1)),
        (lambda: Costs.uniform(2).with_recompute([FULL]), (2, 1, "costs", "stages")),
        (lambda: simulate(with_recompute(make("1f1b", 2, 2)), Costs.uniform(2)), ("recompute", "R", "Costs")),
        (lambda: peak_memory(with_recompute(make("1f1b", 2, 2)), Costs.uniform(2)), ("held_input", "R")),
        (
            lambda: to_torch_csv(with_recompute(make("1f1b", 2, 2))),
            ("PyTorch", "CSV", "R", "BW"),
        ),
        (
            lambda: cut_layers([Layer(1, 1, 1, 1, 1)] * 4, Placement.linear(2), held=with_recompute(make("1f1b", 2, 2))),
            ("R", "layers"),
        ),
    ],
)
def test_bad_input_is_refused(call: object, stated: Stated) -> None:
    with raises(InputError, *stated):
        call()  # type: ignore[operator]


def test_what_was_measured_is_fitted() -> None:
    schedule = with_recompute(make("zb-h1", 3, 4), microbatches=[0, 2])
    costs = costs_of(schedule, Level("some", extra=0.5, kept=0.25))
    timeline = simulate(schedule, costs)
    lean = {op[1:] for row in schedule.rows for op in row if op.kind is Kind.R}
    memory = []
    for row in timeline.rows:
        changes = [costs.memory_change(*span.op[:2], Kind.R if span.op[1:] in lean else None) for span in row]
        memory.append(tuple(zip([span.end for span in row], accumulate(changes), strict=True)))
    fitted = fit_costs(replace(timeline, memory=tuple(memory), source="measured"), comm_ms=0.5)
    assert fitted.column("held_input")[:2] == (250, 250)
    assert fitted.column("recompute")[:2] == (1_000_000, 1_000_000)
    assert (fitted.held_after_f, fitted.held_after_b) == (costs.held_after_f, costs.held_after_b)


def test_gathered_weights_have_the_room_that_recomputation_leaves() -> None:
    plain = make("gpipe", 2, 4)
    costs = costs_of(plain)
    with raises(InputError, "rank 0", "gathered", "weights", 500):
        plan_gathers(plain, [500, 500], memory=3400, costs=costs)
    plan_gathers(with_recompute(plain), [500, 500], memory=3400, costs=costs)


def test_it_is_drawn() -> None:
    schedule = with_recompute(make("1f1b", 2, 3))
    timeline = simulate(schedule, costs_of(schedule))
    assert "R0" in picture(schedule)
    color = traits_of(Kind.R).color
    for drawing in (timeline_svg(timeline), report_html(Report("recomputed", timelines=(timeline,)))):
        assert "recomputed forward" in drawing
        assert color in drawing


def test_a_kind_whose_forward_sends_something_else_is_refused() -> None:
    with kinds_restored(), raises(InputError, "X", "nothing"):
        add_kind("X", replace(traits_of(Kind.R), forward=CheckpointedForward((ValueKind.INPUT,), "forward")))


def test_the_program_of_the_page_says_what_recomputation_costs_and_saves(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/recompute.md").read_text(encoding="utf-8")
    program, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program, {})
    plain, lean = capsys.readouterr().out.splitlines()[-2:]
    assert plain.startswith("1f1b (4000000, 3000000, 2000000, 1000000) ")
    assert lean.startswith("1f1b, recomputed (1180000, 1120000, 1060000, 1000000) ")


def test_costs_from_times_alone_know_what_a_transformer_keeps() -> None:
    plain = make("1f1b", 2, 2)
    assert Costs.uniform(2).completed_for(plain) == Costs.uniform(2)
    costs = Costs.uniform(2, times=(2, 1, 1)).completed_for(with_recompute(plain))
    assert (costs.column("recompute"), costs.column("held_input")) == ((2_000_000,) * 2, (60_000,) * 2)
