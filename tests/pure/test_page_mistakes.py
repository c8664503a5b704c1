"""Mistakes in the pages of `explore` and `watch`: each is answered at its field, or in the page's notice, with its cause and a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.run_folders import Recorded
from zerobubble import Costs, ZeroBubbleError, make, simulate
from zerobubble.explorer.answer import answer, answer_to_dict
from zerobubble.explorer.app import refusal
from zerobubble.explorer.question import MOST_TEXT, REMEDIES, Question, read_question
from zerobubble.explorer.searching import read_search
from zerobubble.explorer.workshop import BlockQuestion, block_to_dict, make_block, read_block_question
from zerobubble.export import dumps
from zerobubble.run_folder import HEADER, detail_name, log_name
from zerobubble.watch.app import WatchApp
from zerobubble.watch.run import WatchedRun

SCHEDULE = make("zb-h1", 4, 8)
COSTS = dumps(Costs.uniform(4))
RUN = dumps(simulate(make("1f1b", 4, 8), Costs.uniform(4)))
BLOCK = "zerobubble block 1\nname v\nplacement linear: 0 1\nmicrobatches 1\ninterval 3\n"
MODEL = {"model": "llama3-70b"}

SCHEDULES: list[tuple[Mapping[str, Any], str, str]] = [
    ({"ranks": "0"}, "ranks", "1 to 256"),
    ({"ranks": ""}, "ranks", "empty"),
    ({"ranks": "2.5"}, "ranks", "2.5"),
    ({"ranks": "1000"}, "ranks", "zerobubble show"),
    ({"microbatches": "many"}, "microbatches", "many"),
    ({"ranks": "256", "microbatches": "4096"}, "microbatches", "200,000"),
    ({"schedule": "zb-9"}, "schedule", "zb-h1"),
    ({"schedule": "dualpipe", "ranks": "3"}, "ranks", "2 or 4"),
    ({"schedule": "dualpipe", "microbatches": "3"}, "microbatches", "8"),
    ({"schedule": "1f1b", "stages": "3"}, "stages", "1"),
    ({"schedule": "interleaved-1f1b", "options": "color=3"}, "options", "color"),
    ({"schedule": "interleaved-1f1b", "options": "group"}, "options", "group"),
    ({"forward": "ten"}, "forward", "ten"),
    ({"comm": "nan"}, "comm", "nan"),
    ({"held": "2"}, "held", "0 to 1"),
    ({"memory": "0"}, "memory", "0"),
    ({"slow_link": "9", "slow_comm": "3"}, "slow_link", "0 to 2"),
    ({"slow_link": "1"}, "slow_comm", "time"),
    ({"slow_comm": "1"}, "slow_link", "rank"),
    ({"model": "gpt-9"}, "model", "llama3-70b"),
    (MODEL | {"gpu": "H9000"}, "gpu", "H100"),
    (MODEL | {"tp": "3"}, "tp", "divisor"),
    (MODEL | {"layers": "10,ten"}, "layers", "ten"),
    ({"file": "hello"}, "file", "hello"),
    ({"file": "\x89PNG\r\n\x1a"}, "file", "zerobubble make"),
    ({"file": "{"}, "file", "line 1"),
    ({"file": COSTS}, "file", "costs"),
    ({"file": SCHEDULE.to_text()[:-20]}, "file", "zerobubble make"),
    ({"file": "x" * (MOST_TEXT + 1)}, "file", "zerobubble show"),
    ({"costs": dumps(SCHEDULE)}, "costs", "schedule"),
    ({"costs": dumps(Costs.uniform(3))}, "costs", "8"),
    ({"costs": '{"format": "zerobubble costs 1"}'}, "costs", "forward"),
    ({"run": COSTS}, "run", "timeline"),
    ({"run": RUN}, "run", "schedule"),
    ({"versus": "dualpipe", "schedule": "zb-v", "microbatches": "7"}, "versus", "8"),
    ({"shade": "red"}, "", "shade"),
]
BLOCKS: list[tuple[Mapping[str, Any], str, str]] = [
    ({"block": "x"}, "block", "v-half"),
    ({"ranks": "99"}, "ranks", "32"),
    ({"microbatches": "many"}, "microbatches", "many"),
    ({"memory": "x"}, "memory", "x"),
    ({"text": "hello"}, "text", "zerobubble block 1"),
    ({"text": BLOCK}, "text", "rank"),
]
SEARCHES: list[tuple[Mapping[str, Any], str, str]] = [
    ({"seconds": "soon"}, "seconds", "soon"),
    ({"seconds": "9999"}, "seconds", "600"),
    ({"objective": "best"}, "objective", "makespan"),
    ({"slow_link": "3", "slow_comm": "1"}, "slow_link", "0 to 2"),
]


def faults_of(ask: Callable[[], Mapping[str, Any]]) -> list[dict[str, str]]:
    """What the page is answered."""
    try:
        content = ask()
    except ZeroBubbleError as error:
        content = json.loads(bytes(refusal(error).body))
        assert (content["error"], content["field"]) == (content["faults"][0]["error"], content["faults"][0]["field"])
    found: list[dict[str, str]] = content["faults"]
    return found


def is_answered(fault: Mapping[str, str], field: str, word: str) -> None:
    """The fault is at its field, states the value, and ends in a remedy."""
    assert fault["field"] == field
    assert word in fault["error"]
    assert fault["remedy"]
    assert fault["remedy"] in fault["error"]
    assert len(fault["error"]) > len(fault["remedy"]) + len(": ")


@pytest.mark.parametrize(("asked", "field", "word"), SCHEDULES)
def test_a_wrong_field_or_file_of_the_explorer(asked: Mapping[str, Any], field: str, word: str) -> None:
    (fault,) = faults_of(lambda: answer_to_dict(answer(read_question(asked))))
    is_answered(fault, field, word)


@pytest.mark.parametrize(("asked", "field", "word"), BLOCKS)
def test_a_wrong_field_of_the_building_blocks(asked: Mapping[str, Any], field: str, word: str) -> None:
    (fault,) = faults_of(lambda: block_to_dict(make_block(read_block_question(asked))))
    is_answered(fault, field, word)


@pytest.mark.parametrize(("asked", "field", "word"), SEARCHES)
def test_a_wrong_field_of_a_search(asked: Mapping[str, Any], field: str, word: str) -> None:
    (fault,) = faults_of(lambda: read_search(asked))
    is_answered(fault, field, word)


def test_every_field_of_the_page_has_a_remedy() -> None:
    fields = {*Question.__dataclass_fields__, *BlockQuestion.__dataclass_fields__, "seconds", "objective", "limits", "evaluations", ""}
    assert set(REMEDIES) == fields
    assert all(REMEDIES.values())


@pytest.mark.parametrize("damaged", [HEADER, detail_name(0, 0), "another version", "gone"])
def test_a_damaged_run_is_named_in_the_page(recorded: Recorded, damaged: str) -> None:
    watch = WatchApp([WatchedRun(str(recorded.folder))])
    header = recorded.folder / HEADER
    if damaged == "gone":
        for file in recorded.folder.iterdir():
            file.unlink()
        recorded.folder.rmdir()
    elif damaged == "another version":
        header.write_text(json.dumps(json.loads(header.read_text()) | {"format": "zerobubble run 9"}))
    else:
        (recorded.folder / damaged).write_text('{"format": ')
    (fault,) = faults_of(lambda: watch.parts(""))
    is_answered(fault, "", str(recorded.folder))


def test_lines_that_cannot_be_read_are_counted_in_the_page(recorded: Recorded) -> None:
    with (recorded.folder / log_name(1)).open("a") as file:
        file.write("no JSON\n[]\n")
    status = WatchApp([WatchedRun(str(recorded.folder))]).parts("")["status"]
    assert f"2 lines of {log_name(1)} cannot be read, and are left out" in status


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    run = Recorded(tmp_path_factory.mktemp("runs") / "run")
    run.step(0)
    run.details(0)
    return run
