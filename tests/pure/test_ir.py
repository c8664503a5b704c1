"""Passes, placements and schedules as values and as text.

Values survive a round trip through text and JSON.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.problems import edited, schedules
from tests.refusals import Stated, raises
from zerobubble import InputError, Kind, Op, Placement, Schedule, make, schedule_faults
from zerobubble.errors import ParseError
from zerobubble.ir import parse_step

GOLDEN = """\
zerobubble schedule 1
name zb-h1
placement linear: 0 1
microbatches 2
rank 0: 0F0 0F1 0B0 0W0 0B1 0W1
rank 1: 1F0 1B0 1F1 1B1 1W0 1W1
"""


def test_text_form_is_stable() -> None:
    assert make("zb-h1", 2, 2).to_text() == GOLDEN


@pytest.mark.long
@given(schedules())
def test_schedules_survive_text_and_json(schedule: Schedule) -> None:
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


def test_comments_and_blank_lines_are_skipped() -> None:
    text = GOLDEN.replace("microbatches 2", "\n# two of them\nmicrobatches 2  # no more")
    assert Schedule.from_text(text) == make("zb-h1", 2, 2)


def test_an_idle_rank_and_an_empty_name_survive_text() -> None:
    schedule = edited(Schedule("", Placement.linear(2), 1, ((), ())), 0, [Op(Kind.F, 0, 0)])
    assert Schedule.from_text(schedule.to_text()) == schedule


@pytest.mark.parametrize(
    ("old", "new", "stated"),
    [
        ("zerobubble schedule 1", "zerobubble schedule 9", ("line 1", "'zerobubble schedule 1'")),
        (
            "0W1",
            "0X1",
            ("line 5", "0X1", "BW", "TX", "0F3"),
        ),
        ("0W1", "0W" + "1" * 5000, ("line 5", "pass", "write")),
        ("0W1", "0W-1", ("line 5", "0W-1")),
        ("0W1", "0W٣", ("line 5", "0W٣")),
        ("rank 1:", "rank 2:", ("line 6", "'rank 1: ...'")),
        ("microbatches 2\n", "", ("microbatches", "missing", "header")),
        ("microbatches 2", "microbatches two", ("microbatches", "two")),
        ("microbatches 2", "microbatches 2 3", ("microbatches", "'2 3'")),
        ("microbatches 2", "microbatches 0", ("schedule", "1 microbatch", 0)),
        ("microbatches 2", "microbatches 2\nroutes 0", (2, 1, "microbatches", "routes")),
        ("microbatches 2", "microbatches 2\nroutes 0 1", ("microbatch", "routes", "(0, 1)")),
        ("microbatches 2", "microbatches 2\nmicrobatches 3", ("line 5", "'microbatches 3'")),
        ("linear: 0 1", "linear: 0 5", (2, 5, "placement", "ranks")),
        ("linear: 0 1", "linear: 0 0", ("ranks", "[1]", "stage")),
        ("linear: 0 1", "linear: 0 1 | 1", ("route", "[1, 2]")),
    ],
)
def test_malformed_text_is_reported_by_line_or_key(old: str, new: str, stated: Stated) -> None:
    with raises(InputError, *stated):
        Schedule.from_text(GOLDEN.replace(old, new))


def test_malformed_json_is_reported_by_key() -> None:
    with raises(ParseError, "rows", "schedule"):
        Schedule.from_dict({"placement": {"name": "linear", "routes": [[0]]}})
    with raises(ParseError, "JSON", "schedule", "object"):
        Schedule.from_dict([])
    with raises(ParseError, "'zerobubble schedule 1'", "'zerobubble costs 1'"):
        Schedule.from_dict({"format": "zerobubble costs 1"})


@pytest.mark.parametrize("number", [-1, 1.0, "1", True, None])
def test_a_pass_has_numbers_from_0_on(number: Any) -> None:
    for name, numbers in (("stage", (number, 0)), ("microbatch", (0, number))):
        with raises(InputError, argument=f"the {name} of a pass", got=number):
            Op(Kind.F, *numbers)


def test_letters_stand_for_their_kind() -> None:
    assert Op("BW", 2, 5).kind is Kind.BW
    assert Op("BW", 2, 5) == Op.parse("2BW5") == pickle.loads(pickle.dumps(Op.parse("2BW5")))


@pytest.mark.parametrize("name", ["two\nlines", " blank", "a # b", "tab\t"])
def test_names_fit_on_one_line(name: str) -> None:
    with raises(InputError, "name", repr(name)):
        Schedule(name, Placement.linear(1), 1, ((),))
    with raises(InputError, "name", repr(name)):
        Placement(name, 1, ((0,),))


def test_placements() -> None:
    assert Placement.linear(3).routes == ((0, 1, 2),)
    assert Placement.looped(3, 2).routes == ((0, 1, 2, 0, 1, 2),)
    assert Placement.vee(3).routes == ((0, 1, 2, 2, 1, 0),)
    assert Placement.vee(3).stages(1) == ((0, 1), (0, 4))
    both = Placement.custom([0, 1], [1, 0])
    assert (both.num_ranks, both.num_stages, both.stages_per_rank) == (2, 2, 2)
    assert both.stages(0) == ((0, 0), (1, 1))


@pytest.mark.parametrize(
    ("build", "stated"),
    [
        (lambda: Placement.linear(0), ("pipeline", "1 rank", 0)),
        (lambda: Placement.looped(2, 0), ("placement", "route", "stage")),
        (lambda: Placement.custom([]), ("placement", "stage")),
    ],
)
def test_empty_placements_are_refused(build: object, stated: Stated) -> None:
    with raises(InputError, *stated):
        build()


def test_the_forward_part_of_a_schedule() -> None:
    forward = make("zb-h1", 2, 2).forward_only()
    assert forward.is_forward_only
    assert forward.rows == ((Op(Kind.F, 0, 0), Op(Kind.F, 0, 1)), (Op(Kind.F, 1, 0), Op(Kind.F, 1, 1)))


@given(st.text(alphabet="0123 FBW:|#-rankplcemito\n"))
def test_junk_text_is_refused_and_nothing_else(junk: str) -> None:
    with pytest.raises(InputError):
        Schedule.from_text(junk)


@given(st.data())
def test_broken_text_is_a_schedule_or_refused(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(GOLDEN)))
    length = data.draw(st.integers(0, 4))
    text = GOLDEN[:at] + data.draw(st.text(max_size=4)) + GOLDEN[at + length :]
    try:
        schedule = Schedule.from_text(text)
    except InputError:
        return
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_an_overlapped_step_has_a_text_and_a_json_form() -> None:
    text = "zerobubble schedule 1\nname x\nplacement linear: 0\nmicrobatches 2\nrank 0: 0F0 0F1&0BW0 0BW1\n"
    schedule = Schedule.from_text(text)
    assert schedule.rows == (tuple(map(Op.parse, ("0F0", "0F1", "0BW0", "0BW1"))),)
    assert schedule.steps[0][1] == (Op(Kind.F, 0, 1), Op(Kind.BW, 0, 0))
    assert schedule.overlaps == {schedule.steps[0][1]}
    assert schedule.to_text() == text
    assert Schedule.from_dict(schedule.to_dict()) == schedule


def test_three_passes_cannot_overlap() -> None:
    with raises(ParseError, "0F0&0F1&0BW0", 3, "0F8&7BW0"):
        parse_step("0F0&0F1&0BW0")


def test_overlapped_passes_stand_next_to_each_other() -> None:
    schedule = make("gpipe", 1, 2)
    with raises(InputError, "0F0", "0BW0"):
        replace(schedule, overlaps=frozenset({(Op(Kind.F, 0, 0), Op(Kind.BW, 0, 0))}))


def test_evaluation_of_a_bidirectional_schedule_takes_the_first_route() -> None:
    schedule = make("chimera", 2, 2).forward_only()
    assert [[str(op) for op in row] for row in schedule.rows] == [["0F0", "0F1"], ["1F0", "1F1"]]
    assert schedule.microbatch_routes == ()
    assert schedule_faults(schedule) == ()
