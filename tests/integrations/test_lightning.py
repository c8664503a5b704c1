"""`PipelineStrategy` against Lightning's Trainer on one device: losses, logs, metrics and weights of 30 steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.train_with_lightning import CASES, STEPS
from tests.procs.programs import programs_of, torchrun

pytestmark = pytest.mark.integrations
PROGRAM = Path(__file__).with_name("train_with_lightning.py")


def run(folder: Path, *options: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """Runs the program on so many ranks, or alone with 0."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else [sys.executable]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, str(PROGRAM), str(folder), *options], capture_output=True, text=True, env=environment, timeout=540)


def train(folder: Path, *options: str, ranks: int = 0) -> Path:
    done = run(folder, *options, ranks=ranks)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def log(folder: Path, case: str) -> dict[str, Any]:
    return json.loads((folder / case / "log.json").read_text())


def assert_same_log(folder: Path, reference: Path, case: str, keys: tuple[str, ...] = ()) -> None:
    found, expected = log(folder, case), log(reference, case)
    assert len(found["rows"]) == len(expected["rows"])
    for row, other in zip(found["rows"], expected["rows"], strict=True):
        for key in keys or other:
            assert row[key] == pytest.approx(other[key], rel=1e-6, abs=1e-6), (key, row, other)
    for values, others in zip(found.get("validated", []), expected.get("validated", []), strict=True):
        assert values == pytest.approx(others, abs=1e-6)
    assert found.get("predicted", []) == pytest.approx(expected.get("predicted", []), abs=1e-5)


def assert_same_weights(folder: Path, reference: Path, case: str) -> None:
    found, expected = (torch.load(place / case / "weights.pt") for place in (folder, reference))
    assert found.keys() == expected.keys()
    tolerance = 2e-5 if case in ("evaluation", "outside") else 1e-6  # AdamW amplifies the rounding of the smallest gradients
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=tolerance)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that Trainer on one device leaves."""
    return train(tmp_path_factory.mktemp("one device"))


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a pipeline of two ranks leaves."""
    return train(tmp_path_factory.mktemp("pipeline"), ranks=2)


@pytest.mark.feature("losses of one device, 30 steps")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_device(case: str, pipelined: Path, reference: Path) -> None:
    assert_same_log(pipelined, reference, case)
    assert_same_weights(pipelined, reference, case)
    assert len(log(pipelined, case)["rows"]) >= STEPS


@pytest.mark.feature("replicas (dp 2 x pp 2)")
def test_two_replicas_of_two_ranks_train_as_one_device(reference: Path, tmp_path: Path) -> None:
    train(tmp_path, "--replicas", "2", "--cases", "accumulation", "manual", ranks=4)
    for case in ("accumulation", "manual"):
        assert_same_log(tmp_path, reference, case, ("train_loss",))
        assert_same_weights(tmp_path, reference, case)


@pytest.mark.feature("three-line change")
def test_the_program_of_the_page_trains(tmp_path: Path) -> None:
    done = torchrun("\n".join(programs_of("docs/lightning.md")), tmp_path, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'train_loss'" in done.stdout
    assert "'val_loss'" in done.stdout
