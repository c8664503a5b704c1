"""Adapters on quantized models train in a pipeline as on one device: bitsandbytes in 4 and 8 bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.ranks import cases_played, run_program
from tests.integrations.train_quantized import CASES, OTHERS, SCHEDULES, STEPS
from tests.procs.programs import programs_of, torchrun

LONG = pytest.mark.long
PROGRAM = Path(__file__).with_name("train_quantized.py")


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that one device leaves."""
    folder = tmp_path_factory.mktemp("one")
    run_program(PROGRAM, folder, "--cases", *sorted(cases_played(request, "test_adapters_have_the_gradients_of_one_device")))
    return folder


def difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of a loss or gradient, relative to its size."""
    return max(((tensor - expected[name]).norm() / expected[name].norm()).item() for name, tensor in found.items())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("ranks", "schedules"), [(2, SCHEDULES), pytest.param(2, OTHERS, marks=LONG), pytest.param(3, SCHEDULES + OTHERS, marks=LONG)], ids=str
)
def test_adapters_have_the_gradients_of_one_device(
    case: str, ranks: int, schedules: tuple[str, ...], reference: Path, tmp_path: Path
) -> None:
    run_program(PROGRAM, tmp_path, "--base", reference, "--cases", case, "--schedules", *schedules, ranks=ranks)
    expected = torch.load(reference / f"{case}.pt")
    for schedule in schedules:
        found = [torch.load(tmp_path / f"{case}.{schedule}.{rank}.pt") for rank in range(ranks)]
        assert set().union(*found) == expected.keys(), schedule
        assert sum(len(of_rank) - STEPS for of_rank in found) == len(expected) - STEPS, schedule
        assert max(difference(of_rank, expected) for of_rank in found) <= 1e-6, schedule


def test_the_program_of_the_page_trains_an_adapter(tmp_path: Path) -> None:
    (program,) = programs_of("docs/qlora.md")
    done = torchrun(program, tmp_path, 2)
    assert done.returncode == 0, done.stderr[-5000:]
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
