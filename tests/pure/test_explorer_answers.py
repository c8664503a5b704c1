"""The explorer's sentences agree with the figures next to them."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zerobubble as zb
from tests.pure.test_cli import run as run_cli
from tests.refusals import raises
from zerobubble.explorer.answer import CAUSES, answer, answer_to_dict
from zerobubble.explorer.forms import FORMS, command, file_names, needed_forms, python_lines, write_form
from zerobubble.explorer.offers import offers
from zerobubble.explorer.question import MOST_SECONDS, RANGES, FieldError, Question, read_question
from zerobubble.explorer.searching import read_search
from zerobubble.explorer.workshop import RANGES as BLOCK_RANGES
from zerobubble.explorer.workshop import read_block_question
from zerobubble.export import dumps
from zerobubble.simulation import period
from zerobubble.units import show_ms, show_percent


def peak(question: Question) -> tuple[str, str]:
    """The figure of the peak memory and its detail."""
    [found] = [figure for figure in answer_to_dict(answer(question))["figures"] if figure["label"] == "peak memory"]
    return found["value"], found["detail"]


def test_the_rank_that_holds_most_is_the_one_with_most_bytes() -> None:
    """Rank 0 holds two microbatches of 5 GB and rank 1 a single one of 23 GB."""
    costs = zb.Costs.from_ms([1, 1], [1, 1], [1, 1], held_after_f=[5 * 10**9, 23 * 10**9])
    question = Question("1f1b", ranks=2, microbatches=4, costs=json.dumps(costs.to_dict()))
    assert peak(question) == ("23 GB", "rank 1 holds most, rank 0 least: 10 GB")


def test_ranks_that_hold_the_same_are_not_reported_apart() -> None:
    assert peak(Question("gpipe", ranks=2, microbatches=4)) == ("4 microbatches", "the same on every rank")
    assert peak(Question("gpipe", ranks=1, microbatches=4)) == ("4 microbatches", "on the only rank")


def test_idle_time_of_ranks_with_less_work_is_imbalance() -> None:
    """Of four ranks with 255, 340, 340 and 340 ms of work one has 85 ms less, which is the imbalance of the mean rank times 4."""
    costs = zb.Costs.from_ms(*[[works / 24 for works in (255, 340, 340, 340)]] * 3)
    found = answer(Question("1f1b", ranks=4, microbatches=8, costs=json.dumps(costs.to_dict())))
    text = answer_to_dict(found)["notes"][-1]
    share = 85e6 / (4 * found.timeline.makespan)
    assert f"{CAUSES['imbalance']} {100 * share:.2f} %" in text
    assert text.endswith(" Ranks have 255 ms to 340 ms of work.")
    assert "of work" not in answer_to_dict(answer(Question("1f1b", ranks=4, microbatches=8)))["notes"][-1]


def test_a_schedule_is_compared_with_another_of_the_same_shape() -> None:
    question = Question(schedule="zb-h1", versus="1f1b", comm=0.25)
    costs = zb.Costs.uniform(4, (10, 10, 8), 0.25)
    shown = answer_to_dict(answer(question))
    assert [line["name"] for line in shown["data"]["timelines"]] == ["zb-h1", "1f1b"]
    assert shown["data"]["timelines"][1]["makespan"] == zb.simulate(zb.make("1f1b", 4, 8), costs).makespan
    plan_file = json.dumps(zb.plan(zb.Workload.uniform(4, times=(20, 20, 20)), 8, evaluations=0).to_dict())
    compared = answer_to_dict(answer(Question(file=plan_file, versus="1f1b")))["data"]["timelines"][1]
    assert compared["makespan"] == zb.simulate(zb.make("1f1b", 4, 8), zb.Costs.uniform(4, times=(20, 20, 20))).makespan, "the plan's times"


@pytest.mark.parametrize(("name", "times"), [("zb-h2", "1.75"), ("gpipe", "2"), ("v-half", "0.75"), ("zb-v", "1"), ("zb-h1", "1")])
def test_a_speed_is_shown_with_the_memory_it_takes(name: str, times: str) -> None:
    labels = [figure["label"] for figure in answer_to_dict(answer(Question(name, versus="1f1b")))["figures"]]
    [label] = [label for label in labels if label.startswith("speed")]
    assert re.findall(r"[\d.]+(?=×)", label) == ([] if times == "1" else [times])


def test_a_text_that_is_no_whole_number_is_refused_with_the_range() -> None:
    for value in ("four", "4.5", 4.5):
        with raises(FieldError, value, 1, 256):
            read_question({"ranks": value})


@pytest.mark.parametrize(
    "wrong",
    [{"versus": "no-such"}, {"versus": "dualpipe", "microbatches": 7}, {"run": "{}"}, {"versus": "chimera", "run": "{", "ranks": 3}],
)
def test_what_cannot_be_drawn_below_a_schedule_is_reported_at_its_field_and_the_schedule_is_drawn(wrong: dict[str, Any]) -> None:
    question = Question(**wrong)
    alone = replace(question, versus="", run="")
    found, expected = (answer_to_dict(answer(each)) for each in (question, alone))
    assert [fault["field"] for fault in found.pop("faults")] == [name for name in ("versus", "run") if name in wrong]
    assert expected.pop("faults") == []
    assert found == expected
    assert (command(answer(question)), python_lines(answer(question))) == (command(answer(alone)), python_lines(answer(alone)))


PLAN_FILE = json.dumps(zb.plan(zb.Workload.uniform(4, times=(20, 20, 20)), 8, evaluations=0).to_dict())


@pytest.mark.parametrize("memory", [None, 5.0, 8.0])
def test_a_limit_is_shown_for_a_plan_that_has_one(memory: float | None) -> None:
    plan = zb.plan(zb.Workload.uniform(4, times=(10, 10, 8)), 8, memory, evaluations=0)
    made = answer(Question(file=json.dumps(plan.to_dict())))
    assert made.limits == (() if memory is None else plan.problem.limits.memory)
    assert made.viewed.limits == made.limits
    [detail] = [figure["detail"] for figure in answer_to_dict(made)["figures"] if figure["label"] == "peak memory"]
    assert detail.endswith(f"limit {memory:g}") if memory else "limit" not in detail


@pytest.mark.parametrize(
    ("question", "compares", "needs"),
    [
        (Question(), False, []),
        (Question(versus="1f1b", comm=0.25, held=0.5), True, []),
        (Question("interleaved-1f1b", versus="breadth-first", stages=3, ranks=2), True, []),
        (Question("zb-h1", versus="1f1b", slow_link=1, slow_comm=9), True, ["costs"]),
        (Question("zb-v", versus="1f1b", slow_link=1, slow_comm=9), False, ["costs"]),
        (Question("zb-v", versus="1f1b", model="llama3-70b"), False, ["costs"]),
        (Question(file=PLAN_FILE, file_name="plan.json"), False, ["plan"]),
        (Question(file=PLAN_FILE, file_name="plan.json", versus="1f1b"), True, ["plan"]),
    ],
)
def test_the_command_and_the_program_reproduce_what_is_shown(
    question: Question, compares: bool, needs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = answer(question)
    assert needed_forms(made) == [FORMS[name].label for name in needs]
    for name in needs:
        (tmp_path / file_names(made)[name]).write_text(write_form(made, name))
    found: dict[str, zb.Timeline] = {}
    exec(python_lines(made), found)
    assert found["timeline"] == made.timeline
    if made.below.other is not None:
        assert found["other_timeline"] == made.below.other.timeline
    program, verb, *words = shlex.split(command(made))
    assert (program, verb) == ("zerobubble", "compare" if compares else "show")
    shown = run_cli(verb, *words, "--json")
    assert shown.exit_code == 0, shown.stderr
    given = json.loads(shown.stdout)
    figures = given if compares else [given]
    drawn = [made, made.below.other] if compares else [made]
    assert [figure["makespan_ms"] for figure in figures] == [each.timeline.makespan / 1e6 for each in drawn if each is not None]


@pytest.mark.parametrize(("memory", "objective"), [(None, "makespan"), (2.5, "period")])
def test_the_command_and_the_program_repeat_a_search(
    memory: float | None, objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work = zb.Workload.uniform(4, times=(10, 12, 8), comm=0.5, held=0.75)
    plan = zb.plan(work, 8, memory, objective=objective, seconds=0)
    made = answer(Question(file=json.dumps(plan.to_dict()), file_name="plan.json", search_seconds=0))
    assert needed_forms(made) == []
    found: dict[str, zb.Timeline] = {}
    exec(python_lines(made), found)
    assert found["timeline"] == made.timeline
    search, show = command(made).split("\n")
    for line in (search, show):
        done = run_cli(*shlex.split(line)[1:])
        assert done.exit_code == 0, done.stderr
    assert zb.io.load_plan("plan.json").schedule == made.schedule
    front = replace(made, question=replace(made.question, search_limits="1:3:0.5"))
    assert "--memory 1:3:0.5" in command(front)
    assert len(needed_forms(front)) == 1
    worse = replace(made, question=replace(made.question, search_placement="vee", search_seconds=None))
    assert command(worse) == "zerobubble show plan.json"
    assert len(needed_forms(worse)) == 1


def test_a_run_is_drawn_below_its_plan_and_one_of_another_schedule_is_refused() -> None:
    run = replace(zb.simulate(zb.make("zb-h1", 4, 8), zb.Costs.uniform(4, (10, 14, 8), 0.5)), source="measured")
    shown = answer_to_dict(answer(Question(schedule="zb-h1", run=dumps(run))))
    assert [line["source"] for line in shown["data"]["timelines"]] == ["simulated", "measured"]
    assert show_ms(run.makespan) in [figure["value"] for figure in shown["figures"]]
    other = answer_to_dict(answer(Question(schedule="1f1b", run=dumps(run))))
    assert [fault["field"] for fault in other["faults"]] == ["run"]
    assert [line["source"] for line in other["data"]["timelines"]] == ["simulated"]


def test_recomputation_is_offered_to_a_model_that_fits_only_with_it() -> None:
    question = Question(schedule="1f1b", ranks=8, microbatches=16, model="llama3-70b", tp=4, microbatch=2)

    def recomputation(asked: Question) -> list[str]:
        return [offer["fields"]["recompute"] for offer in offers(answer(asked)) if "recompute" in offer["fields"]]

    assert recomputation(question) == ["full"]
    assert recomputation(replace(question, recompute="full")) == []
    assert recomputation(replace(question, tp=8, microbatch=1)) == []
    assert recomputation(replace(question, tp=1)) == [], "nothing suffices"
    assert list(offers(answer(Question()))) == []


def test_cuts_are_offered_where_they_shorten_the_step_with_the_figures_before_and_after() -> None:
    question = Question(schedule="zb-v", ranks=8, microbatches=24, model="llama3-70b", tp=8)
    before = answer(question)
    [offer] = offers(before)
    after = answer(replace(question, **offer["fields"]))
    layers = [float(count) for count in offer["fields"]["layers"].split(", ")]
    assert (len(layers), sum(layers)) == (16, 80)
    assert any(count % 1 for count in layers)
    steps = [period(made.schedule, made.costs) for made in (before, after)]
    assert steps[1] < 0.98 * steps[0]
    figures = [
        text
        for made, step in zip((before, after), steps, strict=True)
        for text in (show_ms(step), show_percent(made.timeline.bubble_at(step)))
    ]
    assert all(figure in offer["text"] for figure in figures)
    assert list(offers(after)) == []
    with pytest.raises(FieldError) as caught:
        answer(replace(question, layers="5.25, 4.75"))
    assert caught.value.field == "layers"
    found: dict[str, zb.Costs] = {}
    exec(python_lines(after).replace("print(timeline)", ""), found)
    assert found["costs"] == after.costs


def test_whole_layers_are_offered_before_cuts_inside_them() -> None:
    question = Question(schedule="zb-v", ranks=4, microbatches=8, model="llama3-70b", tp=8, layers="13, 10, 10, 10, 10, 10, 10, 7")
    whole, inside = offers(answer(question))
    assert "." not in whole["fields"]["layers"]
    assert "." in inside["fields"]["layers"]


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"memory": "0"}, ["memory"]),
        ({"held": "1.5"}, ["held"]),
        ({"held": "-0.1"}, ["held"]),
        ({"memory": "40GB", "slow_link": "x"}, ["memory", "slow_link"]),
        ({"schedule": "dualpipe", "ranks": "4", "microbatches": "7"}, ["microbatches"]),
        ({"schedule": "chimera", "ranks": "3"}, ["ranks"]),
        ({"forward": "1e9"}, ["forward"]),
        ({"slow_link": "9"}, ["slow_link"]),
        ({"slow_link": "1"}, ["slow_comm"]),
        ({"slow_comm": "1"}, ["slow_link"]),
    ],
)
def test_a_wrong_value_is_refused_at_the_field_whose_change_helps(given: dict[str, str], fields: list[str]) -> None:
    with pytest.raises(FieldError) as caught:
        answer(read_question(given))
    assert [field for field, *_ in caught.value.faults] == fields


def test_a_refused_range_is_written_in_digits() -> None:
    for read, asked in ((read_question, RANGES), (read_block_question, BLOCK_RANGES)):
        for field, (least, most) in asked.items():
            for value in (least - 1, most + 1):
                with pytest.raises(FieldError) as caught:
                    read({field: value})
                assert caught.value.field == field
                assert f"{most:,.12g}" in str(caught.value)
                assert not re.search(r"\de[+-]\d", str(caught.value))
    for field, most in (("seconds", MOST_SECONDS), ("evaluations", 10**9)):
        with pytest.raises(FieldError) as caught:
            read_search({field: 2 * most})
        assert (caught.value.field, f"{most:,.12g}" in str(caught.value)) == (field, True)


@pytest.mark.parametrize(("given", "seconds"), [({}, 5), ({"seconds": 0}, 0), ({"seconds": "0"}, 0), ({"seconds": "2.5"}, 2.5)])
def test_a_search_has_the_seconds_given(given: dict[str, Any], seconds: float) -> None:
    assert read_search(given)["seconds"] == seconds
    with pytest.raises(FieldError) as caught:
        read_search({"seconds": ""})
    assert caught.value.field == "seconds"


def test_times_may_have_units() -> None:
    asked = read_question({"forward": "10ms", "backward": "250 us", "weight": "0.002s"})
    assert asked.times == (10, 0.25, 2)


def test_a_step_at_its_bound_is_optimal() -> None:
    above, single = (answer_to_dict(answer(question))["figures"][0] for question in (Question(), Question("1f1b", ranks=1)))
    assert "optimal" not in above["detail"]
    assert "optimal" in single["detail"]
