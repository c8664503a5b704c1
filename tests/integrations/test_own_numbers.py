"""Numbers without dimensions that a network returns, such as its own loss, are those of one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ranks import outcomes, run_program
from tests.refusals import states

PROGRAM = Path(__file__).with_name("train_with_own_numbers.py")


def found(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def assert_same_on_two_ranks(case: str, schedule: str, folder: Path) -> None:
    """Runs a case on one device and on two ranks, and compares all numbers."""
    run_program(PROGRAM, folder, case, schedule)
    run_program(PROGRAM, folder, case, schedule, ranks=2)
    for rank in ("0", "1"):
        ours, theirs = found(folder, rank), found(folder, "alone")
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            assert ours[name] == pytest.approx(expected, rel=1e-9, abs=1e-9), name


def assert_refused_on_both_ranks(case: str, folder: Path) -> None:
    """Runs a case on two ranks, which must raise our error."""
    for code, printed in outcomes(PROGRAM, folder, case, "zb-h1", ranks=2):
        assert code == 1, printed[-3000:]
        states(printed[printed.rindex("InputError") :], "InputError", "loss_weight")


@pytest.mark.feature("losses that the network returns")
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
@pytest.mark.parametrize("case", ["a mean over labels", "a sum", "a mean over samples", "by hand"])
def test_numbers_of_a_network_are_those_of_one_device(case: str, schedule: str, tmp_path: Path) -> None:
    assert_same_on_two_ranks(case, schedule, tmp_path)


def test_numbers_with_dropout_follow_from_their_weights(tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, "dropout", "zb-h1", ranks=2)
    assert found(tmp_path, "0") == found(tmp_path, "1")


@pytest.mark.refuses("numbers of the network that are neither sums nor means")
@pytest.mark.parametrize("case", ["without loss_weight", "dropout without loss_weight", "a mean instead of a sum"])
def test_numbers_that_do_not_follow_are_an_error_on_every_rank(case: str, tmp_path: Path) -> None:
    assert_refused_on_both_ranks(case, tmp_path)
