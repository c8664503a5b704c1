"""Scripts in the forms that people publish give on two ranks the figures, predictions and weights of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.ranks import run_program
from tests.integrations.scripts import NAMES

PROGRAM = Path(__file__).with_name("run_script.py")


def assert_alike(figure: Any, expected: Any, where: str = "") -> None:
    """Compares numbers of two nested values to the digits of float32, in which Trainer sums losses for its log."""
    if isinstance(expected, dict):
        assert figure.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_alike(figure[name], value, f"{where}/{name}")
    elif isinstance(expected, list):
        assert len(figure) == len(expected), where
        for index, (value, other) in enumerate(zip(figure, expected, strict=True)):
            assert_alike(value, other, f"{where}/{index}")
    else:
        assert figure == pytest.approx(expected, rel=1e-6, abs=1e-7), where


@pytest.mark.parametrize("name", NAMES)
def test_a_script_on_two_ranks_gives_the_figures_of_one_process(name: str, tmp_path: Path) -> None:
    alone, pipelined = tmp_path / "alone", tmp_path / "pipelined"
    run_program(PROGRAM, name, alone)
    run_program(PROGRAM, name, pipelined, ranks=2)
    assert_alike(*(json.loads((folder / "figures.json").read_text()) for folder in (pipelined, alone)))
    weights, expected = (torch.load(folder / "weights.pt") for folder in (pipelined, alone))
    assert weights.keys() == expected.keys()
    for parameter, value in expected.items():
        torch.testing.assert_close(weights[parameter], value, rtol=1e-7, atol=1e-7, msg=lambda text, name=parameter: f"{name}: {text}")
