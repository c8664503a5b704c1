"""Arguments of a network that all samples share are whole in each microbatch, also those as long as the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ranks import run_program
from tests.integrations.train_with_shared_arguments import CASES

PROGRAM = Path(__file__).with_name("train_with_shared_arguments.py")


@pytest.mark.feature("arguments that all samples share")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("framework", ["lightning", "fabric"])
def test_shared_arguments_train_and_evaluate_as_on_one_device(framework: str, case: str, tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, framework, case)
    run_program(PROGRAM, tmp_path, framework, case, ranks=2)
    theirs = found(tmp_path, "alone")
    for rank in ("0", "1"):
        ours = found(tmp_path, rank)
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            assert ours[name] == pytest.approx(expected, rel=1e-9, abs=1e-9), name


def found(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())
