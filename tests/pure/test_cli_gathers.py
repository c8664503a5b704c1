"""`zerobubble show --weights` draws and counts the gathers of sharded weights."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tests.refusals import states
from zerobubble.cli import main

SHOW = ("show", "zb-v", "--ranks", "2", "--microbatches", "4", "--width", "80")


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, words)
    return result.exit_code, result.output


def test_show_draws_when_weights_are_gathered() -> None:
    code, text = run(*SHOW, "--weights", "12GB", "--gathered", "6GB", "--gather-rate", "6000GB")
    assert code == 0
    lines = text.splitlines()
    first = lines.index("rank 0: 7 gathers of weights, proven the fewest; up to 6 GB")
    stages = lines[first + 1 : first + 3]
    assert stages[0].startswith(" 0     =")
    assert stages[1].startswith(" 3     ·")
    assert len({len(line) for line in stages}) == 1
    there = [[mark == "=" for mark in line] for line in stages]
    assert not any(both for both in map(all, zip(*there, strict=True)))
    assert "weights of a stage: > being gathered, = gathered" in text
    states(text, "1 ms", "makespan", "gathers")


def test_show_shows_gathers_as_json() -> None:
    _, text = run(*SHOW, "--weights", "6GB,6GB,6GB,12GB", "--gathered", "18GB", "--json")
    ranks = json.loads(text)["weights"]
    assert [rank["num_gathers"] for rank in ranks] == [2, 2]
    assert ranks[0]["gathers"][0] == {"stage": 0, "begins": 0, "needed": 0, "ends": max(g["ends"] for g in ranks[0]["gathers"])}
    assert "weights" not in json.loads(run(*SHOW, "--json")[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--weights", "6"), "'6' is not an amount of memory with a unit of"),
        (("--gathered", "6GB"), "--gathered needs --weights"),
        (("--gather-rate", "6GB"), "--gather-rate needs --weights"),
        (("--weights", "6GB,6GB"), "has 4 stages, weights are given for 2: give those of a rank"),
        (
            ("--weights", "12GB", "--gathered", "5GB"),
            "rank 0 has 5000000000 bytes for gathered weights in 0F0, whose weights take 6000000000",
        ),
    ],
)
def test_wrong_sizes_are_refused(words: tuple[str, ...], message: str) -> None:
    code, text = run(*SHOW, *words)
    assert code != 0
    assert message in " ".join(text.split())
