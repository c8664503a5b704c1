"""`PipelineStrategy` against Lightning's Trainer on one device: losses, logs, metrics and weights of 30 steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zerobubble as zb
from tests.integrations.train_with_lightning import CASES, STEPS, Classifier
from tests.procs.programs import free_port, programs_of, torchrun
from tests.refusals import raises, states
from zerobubble import InputError
from zerobubble.integrations.lightning import PipelineStrategy
from zerobubble.integrations.lightning.refusals import refuse_loader, refuse_optimizers

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


def assert_same_log(folder: Path, reference: Path, case: str, keys: tuple[str, ...] = (), first: int = 0) -> None:
    found, expected = log(folder, case), log(reference, case)
    assert len(found["rows"]) == len(expected["rows"]) - first
    for row, other in zip(found["rows"], expected["rows"][first:], strict=True):
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


@pytest.mark.feature("save and resume", "resume on other ranks")
@pytest.mark.parametrize(("ranks", "step"), [(3, 9), (0, 18)], ids=["three ranks", "one device without zerobubble"])
def test_others_go_on_from_a_checkpoint_of_two_ranks(ranks: int, step: int, pipelined: Path, reference: Path, tmp_path: Path) -> None:
    train(tmp_path, "--cases", "saved", "--resume", str(pipelined / f"saved/step={step}.ckpt"), ranks=ranks)
    assert_same_log(tmp_path, reference, "saved", first=step)
    assert_same_weights(tmp_path, reference, "saved")


def test_a_checkpoint_is_that_of_one_device(pipelined: Path, reference: Path) -> None:
    found, expected = (torch.load(folder / "saved/step=18.ckpt") for folder in (pipelined, reference))
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-6, atol=1e-6)
    (optimizer,), (other,) = found["optimizer_states"], expected["optimizer_states"]
    assert optimizer["param_groups"] == other["param_groups"]
    torch.testing.assert_close(optimizer["state"], other["state"], rtol=1e-6, atol=1e-6)


@pytest.mark.feature("killed rank: our error, no hang")
def test_a_killed_rank_ends_the_run_with_our_error(tmp_path: Path) -> None:
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "killed"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path), "--cases", "plain", "--kill"],
            env=os.environ | given | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=540)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode == 1, errors[0][-3000:]
    states(errors[0][errors[0].rindex("PipelineError") :], "PipelineError", "rank 1")


def trainer(strategy: PipelineStrategy, **arguments: Any) -> lightning.Trainer:
    return lightning.Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False, enable_checkpointing=False, **arguments)


@pytest.mark.refuses("a mesh or group of another kind", "main_grad", "survive", "order_by")
def test_wrong_options_of_the_strategy_are_named_at_once() -> None:
    options: dict[str, Any] = {"mesh": None, "loss_fn": None, "main_grad": None, "survive": True, "order_by": "tokens", "speed": 2}
    with raises(InputError, *options, "num_microbatches", "data_parallel_size", "timeout"):
        PipelineStrategy("zb-h1", 0, data_parallel_size=0, timeout=-1, **options)


@pytest.mark.refuses("fp16", "sync_batchnorm", "a schedule for other ranks", "bidirectional schedules")
def test_arguments_of_trainer_that_do_not_fit_are_named_at_once() -> None:
    with raises(InputError, "data_parallel_size", 3, 4, "16-true", "sync_batchnorm"):
        trainer(PipelineStrategy("zb-h1", 8, data_parallel_size=3), precision="16-true", sync_batchnorm=True)
    for schedule, microbatches, value in (("zb-h", 8, "zb-h"), ("dualpipe", 8, "zb-v"), (zb.make("zb-h1", 2, 8), 8, 2)):
        with raises(InputError, value):
            trainer(PipelineStrategy(schedule, microbatches))


@pytest.mark.refuses("DDP wrapping", "torch.compile", "LBFGS", "a DistributedSampler over all ranks")
def test_modules_that_do_not_fit_are_named_at_once() -> None:
    module = Classifier()
    module.compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    module.wrapped = nn.DataParallel(nn.Linear(2, 2))
    with raises(InputError, "compiled", "wrapped", "DataParallel", "data_parallel_size", "network", "heart"):
        PipelineStrategy("zb-h1", 8, network="heart").connect(module)
    with raises(InputError, "LBFGS"):
        refuse_optimizers([torch.optim.LBFGS(module.model.parameters())])
    data = TensorDataset(torch.ones(8, 1))
    with raises(InputError, argument="sampler", got=4, expected=2):
        refuse_loader(DataLoader(data, sampler=DistributedSampler(data, 4, 1)), {"num_replicas": 2, "rank": 0})


@pytest.mark.feature("three-line change")
def test_the_program_of_the_page_trains(tmp_path: Path) -> None:
    done = torchrun("\n".join(programs_of("docs/lightning.md")), tmp_path, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'train_loss'" in done.stdout
    assert "'val_loss'" in done.stdout
