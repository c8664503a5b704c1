"""The table of kinds: every reader refuses unknown kinds and accepts added ones."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from tests.pure.compiled import simulate_compiled
from tests.recomputing import recomputing, with_recomputation
from tests.refusals import Stated, raises, states
from zerobubble import Costs, InputError, Kind, Limits, Op, Placement, Schedule, lower, make, schedule_faults, simulate
from zerobubble.blocks import Block, Start
from zerobubble.cli.outputs.drawing import draw, legend
from zerobubble.errors import ParseError, shown
from zerobubble.explain import attribute, diff
from zerobubble.export import perfetto_json, timeline_svg, to_torch_csv
from zerobubble.fit import fit_costs
from zerobubble.kinds import KINDS, ValueKind, add_kind, add_value_kind, change_kind, traits_of
from zerobubble.lowering import program_faults
from zerobubble.planning import Problem, sensitivity
from zerobubble.simulation import peak_memory
from zerobubble.text_picture import picture
from zerobubble.view import Report, report_html


@pytest.mark.parametrize(
    "read",
    [
        lambda: Kind("O"),
        lambda: traits_of("O"),
        lambda: Costs.uniform(2).time("O", 0),  # type: ignore[arg-type]
        lambda: Costs.uniform(2).memory_change("O", 0),  # type: ignore[arg-type]
        lambda: Op("O", 0, 0),
    ],
)
def test_a_kind_that_the_table_lacks_is_refused(read: Callable[[], object]) -> None:
    with raises(InputError, "O", "kind", "zerobubble.kinds.add_kind"):
        read()


@pytest.mark.parametrize("kind", [None, 1, ["F"]])
def test_what_is_no_text_is_no_kind(kind: Any) -> None:
    for read in (Kind, ValueKind, lambda letters: Op(letters, 0, 0)):
        with raises(InputError, shown(kind)):
            read(kind)


def test_text_of_an_unknown_kind_is_refused() -> None:
    with raises(ParseError, "0O3", "BW", "TX"):
        Op.parse("0O3")


def test_there_is_one_object_for_each_kind() -> None:
    for kind in KINDS:
        assert Kind(str(kind)) is kind
        assert pickle.loads(pickle.dumps(kind)) is kind
        assert copy.deepcopy(Op(kind, 0, 0)).kind is kind
    assert pickle.loads(pickle.dumps(ValueKind.WEIGHT_WORK)) is ValueKind.WEIGHT_WORK


@pytest.mark.parametrize(
    ("add", "stated"),
    [
        (lambda: add_kind("r", traits_of(Kind.F)), ("r", "name", "letters")),
        (lambda: add_kind("BW", traits_of(Kind.F)), ("kind", "BW", "taken")),
        (lambda: add_kind("A", replace(traits_of(Kind.F), color="red")), ("A", "red")),
        (
            lambda: add_kind("A", replace(traits_of(Kind.F), makes=(ValueKind.ACTIVATION, ValueKind.GRADIENT))),
            ("A", "message"),
        ),
        (
            lambda: change_kind(Kind.W, replace(traits_of(Kind.W), uses=((ValueKind.WEIGHT_WORK, 1),))),
            ("W", "w", "another", "a", "g"),
        ),
        (lambda: add_value_kind("s", "held"), ("s", "letter")),
        (lambda: ValueKind("z"), ("z", "value")),
    ],
)
def test_what_no_table_can_hold_is_refused(add: Callable[[], object], stated: Stated) -> None:
    with raises(InputError, *stated):
        add()


# An added kind: C keeps a stage's input alone, and A computes the stage again before its B.


def recomputed(name: str = "zb-h1", ranks: int = 3, microbatches: int = 4) -> tuple[Schedule, Costs]:
    schedule = with_recomputation(make(name, ranks, microbatches))
    stages = schedule.num_stages
    costs = Costs.from_ms([2] * stages, [3] * stages, [1] * stages, 0.5, [1000] * stages, [600] * stages)
    return schedule, costs.with_columns(again=[1_500_000] * stages, held_kept=[100] * stages)


def test_an_added_kind_is_read_and_written() -> None:
    with recomputing():
        schedule, costs = recomputed()
        assert Schedule.from_text(schedule.to_text()) == Schedule.from_dict(schedule.to_dict()) == schedule
        assert pickle.loads(pickle.dumps(schedule)) == schedule
        assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
        text = schedule.to_text()
    with raises(ParseError, "0C0"):
        Schedule.from_text(text)


def test_an_added_kind_is_checked() -> None:
    with recomputing() as (_, again):
        schedule, _ = recomputed()
        assert schedule_faults(schedule) == ()
        without = replace(schedule, rows=tuple(tuple(op for op in row if op != Op(again, 0, 2)) for row in schedule.rows))
        assert [fault.message for fault in schedule_faults(without)] == [
            "stage 0, microbatch 2 on rank 0 lacks 0A2, so B finds nothing saved: add it to the row"
        ]
        row = schedule.rows[0]
        place = row.index(Op(again, 0, 0))
        late = replace(schedule, rows=((*row[:place], row[place + 1], row[place], *row[place + 2 :]), *schedule.rows[1:]))
        assert [fault.code for fault in schedule_faults(late)] == ["order"]
        doubled = replace(schedule, rows=((Op(Kind.F, 0, 0), *row), *schedule.rows[1:]))
        (fault,) = schedule_faults(doubled)
        states(fault.message, "0F0", "0B0", "0W0", "0C0", "0A0", "B", "W", "C", "A")


def test_an_added_kind_takes_its_own_time_and_memory() -> None:
    with recomputing() as (_, again):
        schedule, costs = recomputed("1f1b", 2, 2)
        timeline = simulate(schedule, costs)
        assert {span.duration for _, span in timeline.spans() if span.op.kind is again} == {1_500_000}
        # In ms, rank 1: F0 from 2.5, BW0 until 8.5, F1, BW1 until 14.5. Rank 0 runs A1 before that gradient is there, and BW1 from 15.
        assert timeline.makespan == 19_000_000
        assert peak_memory(schedule, costs) == (1100, 1000)
        assert [max(held for _, held in steps) for steps in timeline.memory] == [1100, 1000]
        with raises(InputError, "again", "A"):
            simulate(schedule, Costs.uniform(2))
        plain = make("1f1b", 2, 2)
        assert simulate(plain, Costs.uniform(2)).makespan == 9_000_000


def test_an_added_kind_is_fitted_and_explained() -> None:
    with recomputing():
        schedule, costs = recomputed()
        timeline = simulate(schedule, costs)
        fitted = fit_costs(replace(timeline, memory=()))
        assert fitted.column("again") == (1_500_000, 1_500_000, 0)
        idle = attribute(schedule, costs)
        assert [causes.total for causes in idle.ranks] == [timeline.makespan - figures.work for figures in timeline.ranks]
        slower = simulate(schedule, costs.with_columns(again=[2_000_000] * 3))
        found = diff(schedule, costs, replace(slower, source="measured"))
        assert sum(drift.makespan for drift in found.drifts) == slower.makespan - timeline.makespan > 0
        assert {effect.what for effect in sensitivity(schedule, costs, samples=1).effects} >= {"every A", "A of stage 1"}


def test_what_an_added_kind_holds_is_fitted() -> None:
    with recomputing():
        schedule, costs = recomputed()
        timeline = simulate(schedule, costs)
        memory = []
        for row in timeline.rows:
            held = accumulate(costs.memory_change(span.op.kind, span.op.stage) for span in row)
            memory.append(tuple((span.end, now) for span, now in zip(row, held, strict=True)))
        fitted = fit_costs(replace(timeline, memory=tuple(memory), source="measured"))
        assert fitted.column("held_kept") == (100, 100, 0)
        assert (fitted.held_after_f, fitted.held_after_b) == (costs.held_after_f, costs.held_after_b)


def test_an_added_kind_is_lowered() -> None:
    with recomputing():
        for name in ("1f1b", "zb-v", "dualpipe"):
            schedule, _ = recomputed(name, 2, 6)
            program = lower(schedule)
            assert program_faults(program) == ()
            assert program.to_schedule() == schedule
            assert type(program).from_text(program.to_text()) == program
            assert {op.kind for row in schedule.forward_only().rows for op in row} == {Kind.F}


def test_an_added_kind_is_drawn() -> None:
    with recomputing():
        schedule, costs = recomputed()
        timeline = simulate(schedule, costs)
        assert picture(schedule).splitlines()[0].split()[:6] == ["C0", "C1", "C2", "A0", ".", "B0"]
        svg, page = timeline_svg(timeline), report_html(Report("recomputing", timelines=(timeline,)))
        for drawing in (svg, page):
            assert "forward computed again" in drawing
            assert "#4009ae" in drawing
        assert "A0 of stage 1;" in svg
        assert "A forward computed again" in legend(timeline, colored=True, drawn=[]).plain
        assert "A" in draw(timeline, 120, colored=False).plain
        events = json.loads(perfetto_json(timeline))["traceEvents"]
        assert {"A", "C"} < {event.get("cat") for event in events}


def test_what_cannot_hold_an_added_kind_refuses_it() -> None:
    with recomputing():
        schedule, costs = recomputed()
        problem = Problem(schedule.placement, schedule.num_microbatches, costs, Limits((10**6,) * 3))
        with raises(InputError, "plans", "zb-h1", "A", "C"):
            simulate_compiled(problem, schedule)
        with raises(InputError, "PyTorch's CSV", "BW", "text"):
            to_torch_csv(schedule)
        with raises(InputError, "block", "lean", "0C0"):
            Block("lean", Placement.linear(1), 4, ((Start(Op(Kind("C"), 0, 0), 0),),))
