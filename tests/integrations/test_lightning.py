"""`PipelineStrategy` against Lightning's Trainer on one device: losses, logs, metrics and weights of 30 steps."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import signal
import time
from collections import deque, namedtuple
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, R2Score, RunningMean, SumMetric
from torchmetrics.classification import MulticlassF1Score

import zerobubble as zb
from tests.integrations.ranks import outcomes, run_program
from tests.integrations.train_with_lightning import CASES, CLASSES, STEPS, WIDTH, Accuracy, Classifier, Denoiser, Evaluated
from tests.procs.programs import programs_of, torchrun
from tests.refusals import raises, states
from zerobubble import InputError, PipelineError
from zerobubble.integrations.batches import cut
from zerobubble.integrations.lightning import PipelineStrategy
from zerobubble.integrations.lightning.refusals import refuse_callbacks, refuse_loader, refuse_optimizers
from zerobubble.integrations.lightning.runner import _Loss
from zerobubble.integrations.whole_model import replaced

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of its own dependencies
PROGRAM = Path(__file__).with_name("train_with_lightning.py")


def train(folder: Path, *options: str, ranks: int = 0) -> Path:
    """Runs the program on so many ranks, or alone with 0."""
    run_program(PROGRAM, folder, *options, ranks=ranks)
    return folder


def log(folder: Path, case: str) -> dict[str, Any]:
    return json.loads((folder / case / "log.json").read_text())


def assert_same_log(
    folder: Path, reference: Path, case: str, keys: tuple[str, ...] = (), *, first: int = 0, tolerance: float = 1e-6
) -> None:
    found, expected = log(folder, case), log(reference, case)
    assert len(found["rows"]) == len(expected["rows"]) - first
    for row, other in zip(found["rows"], expected["rows"][first:], strict=True):
        for key in keys or other:
            assert row[key] == pytest.approx(other[key], rel=tolerance, abs=tolerance), (key, row, other)
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


@pytest.mark.feature("losses of one device", "gradient accumulation", "clipping", "manual optimization", "learning rate schedulers")
@pytest.mark.feature("evaluation with metrics", "loggers and callbacks", "losses with parameters", "bf16")
@pytest.mark.feature(
    "random numbers in training_step", "BackboneFinetuning", "StochasticWeightAveraging", "WeightAveraging", "LearningRateFinder"
)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_device(case: str, pipelined: Path, reference: Path) -> None:
    assert_same_log(pipelined, reference, case, tolerance=5e-2 if case == "bf16" else 1e-6)
    if case != "bf16":
        assert_same_weights(pipelined, reference, case)
    assert len(log(pipelined, case)["rows"]) >= STEPS


@pytest.mark.feature("weights in callbacks and after training")
@pytest.mark.parametrize("case", CASES)
def test_weights_in_callbacks_and_checkpoints_are_those_of_one_device(case: str, pipelined: Path, reference: Path) -> None:
    if case != "bf16":
        for name in ("step12.pt", "end.pt", "step12.ckpt"):
            (ours, theirs) = (torch.load(folder / case / name, weights_only=False) for folder in (pipelined, reference))
            ours, theirs = ours.get("state_dict", ours), theirs.get("state_dict", theirs)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-5 if case in ("evaluation", "outside") else 1e-6)
    assert (log(pipelined, case)["refused"], log(reference, case)["refused"]) == (True, False)


@pytest.mark.feature("BasePredictionWriter")
def test_predictions_are_written_once(pipelined: Path, reference: Path) -> None:
    ours, theirs = (sorted((folder / "evaluation").glob("predicted-*.pt")) for folder in (pipelined, reference))
    assert [file.name for file in ours] == [file.name for file in theirs]
    assert {file.name for file in ours} == {"predicted-0.pt", *(f"predicted-{batch}-0.pt" for batch in range(3))}
    for file, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.load(file), torch.load(other), rtol=1e-5, atol=1e-5)


@pytest.mark.feature("skipped batches: training_step returns None")
@pytest.mark.parametrize("case", ["skipping", "skipping accumulated", "skipping by hand"])
def test_batches_that_training_step_skips_are_those_of_one_device(case: str, pipelined: Path, reference: Path) -> None:
    assert_same_log(pipelined, reference, case, tolerance=1e-9)
    ours, theirs = (torch.load(folder / case / "weights.pt") for folder in (pipelined, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert log(reference, case)["rows"][-1]["skipped"] > 3


@pytest.mark.refuses("batches that one rank skips")
def test_a_batch_that_one_rank_skips_is_an_error(tmp_path: Path) -> None:
    for code, error in outcomes(PROGRAM, tmp_path, "--cases", "skipping alone", ranks=2):
        assert code == 1, error[-3000:]
        states(error[error.rindex("InputError") :], "InputError", "rank 0", 1, 2)


@pytest.mark.feature("random numbers after the network in training_step")
def test_gradients_and_logs_by_hand_are_of_the_same_draws_on_all_ranks(tmp_path: Path) -> None:
    train(tmp_path, "--cases", "late by hand", ranks=2)
    rows = log(tmp_path, "late by hand")["rows"]
    assert len(rows) == STEPS
    assert max(row["spread"] for row in rows) < 1e-6


@pytest.mark.feature("replicas")
def test_two_replicas_of_two_ranks_train_as_one_device(reference: Path, tmp_path: Path) -> None:
    train(tmp_path, "--replicas", "2", "--cases", "accumulation", "manual", ranks=4)
    for case in ("accumulation", "manual"):
        assert_same_log(tmp_path, reference, case, ("train_loss",))
        assert_same_weights(tmp_path, reference, case)


@pytest.mark.feature("checkpoints and resuming", "resuming on other ranks")
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


@pytest.mark.feature("a killed rank: one error, no hang")
def test_a_killed_rank_ends_the_run_with_our_error(tmp_path: Path) -> None:
    (code, error), (killed, _) = outcomes(PROGRAM, tmp_path, "--cases", "plain", "--fault", "kill", ranks=2)
    assert (code, killed) == (1, -signal.SIGKILL), error[-3000:]
    states(error[error.rindex("PipelineError") :], "PipelineError", "rank 1")


@pytest.mark.feature("SIGTERM on one rank: all ranks stop before the same batch")
def test_sigterm_on_one_rank_stops_all_before_the_same_batch(tmp_path: Path) -> None:
    for code, printed in outcomes(PROGRAM, tmp_path, "--cases", "plain", "--fault", "terminate", ranks=2):
        assert (code, printed.count("SIGTERMException after 3 steps")) == (0, 1), printed[-3000:]


@pytest.mark.feature("an error of a callback on one rank: one error, no hang")
def test_a_callback_that_raises_on_one_rank_ends_all_with_its_error(tmp_path: Path) -> None:
    (code, raised), (other, error) = outcomes(PROGRAM, tmp_path, "--cases", "plain", "--fault", "raise", ranks=2)
    assert (code, other) == (1, 1)
    assert "OSError: no space left" in raised
    last = error[error.rindex("PipelineError: ") :]
    assert all(part in last for part in ("rank 0", "OSError", "no space left")), last


@pytest.mark.feature("training again in the same processes after errors")
def test_a_retry_in_the_same_processes_trains_as_one_device(reference: Path, tmp_path: Path) -> None:
    train(tmp_path, "--cases", "plain", "--retry", ranks=2)
    assert_same_log(tmp_path, reference, "plain")
    assert_same_weights(tmp_path, reference, "plain")


@pytest.mark.feature("trainer.should_stop on one rank: all ranks stop")
def test_should_stop_on_one_rank_stops_all_at_the_same_batch(tmp_path: Path) -> None:
    for code, printed in outcomes(PROGRAM, tmp_path, "--cases", "plain", "--fault", "stop", ranks=2):
        assert code == 0, printed[-3000:]
    assert len(log(tmp_path, "plain")["rows"]) == 3


@pytest.mark.refuses("different batches on the ranks of a pipeline")
def test_ranks_with_other_batches_are_an_error(tmp_path: Path) -> None:
    for code, error in outcomes(PROGRAM, tmp_path, "--cases", "plain", "--fault", "data", ranks=2):
        assert code == 1, error[-3000:]
        states(error[error.rindex("InputError") :], "InputError", "seed_everything", "ranks 1")


def trainer(strategy: PipelineStrategy, **arguments: Any) -> lightning.Trainer:
    return lightning.Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False, enable_checkpointing=False, **arguments)


@pytest.mark.refuses("the option mesh", "main_grad", "survive", "order_by")
def test_wrong_options_of_the_strategy_are_named_at_once() -> None:
    options: dict[str, Any] = {"mesh": None, "loss_fn": None, "main_grad": None, "survive": True, "order_by": "tokens", "speed": 2}
    with raises(InputError, *options, "num_microbatches", "data_parallel_size", "timeout"):
        PipelineStrategy("zb-h1", 0, data_parallel_size=0, timeout=-1, **options)


@pytest.mark.refuses("float16", "sync_batchnorm", "a schedule for other ranks", "bidirectional schedules")
def test_arguments_of_trainer_that_do_not_fit_are_named_at_once() -> None:
    with raises(InputError, "data_parallel_size", 3, 4, "16-true", "sync_batchnorm"):
        trainer(PipelineStrategy("zb-h1", 8, data_parallel_size=3), precision="16-true", sync_batchnorm=True)
    for schedule, microbatches, value in (("zb-h", 8, "zb-h"), ("dualpipe", 8, "zb-v"), (zb.make("zb-h1", 2, 8), 8, 2)):
        with raises(InputError, value):
            trainer(PipelineStrategy(schedule, microbatches))


@pytest.mark.refuses("DDP wrapping", "torch.compile", "LBFGS", "a DistributedSampler over all ranks", "ModelPruning", "BatchSizeFinder")
def test_modules_that_do_not_fit_are_named_at_once() -> None:
    module = Classifier()
    module.compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    module.wrapped = nn.DataParallel(nn.Linear(2, 2))
    with raises(InputError, "compiled", "wrapped", "DataParallel", "data_parallel_size", "network", "heart"):
        PipelineStrategy("zb-h1", 8, network="heart").connect(module)
    with raises(InputError, "LBFGS"):
        refuse_optimizers([torch.optim.LBFGS(module.model.parameters())])
    with raises(InputError, "ModelPruning", "BatchSizeFinder"):
        refuse_callbacks([ModelPruning("l1_unstructured"), BatchSizeFinder()])
    data = TensorDataset(torch.ones(8, 1))
    with raises(InputError, argument="sampler", got=4, expected="2 replicas"):
        refuse_loader(DataLoader(data, sampler=DistributedSampler(data, 4, 1)), world_size=4, rank=1, num_replicas=2)


@pytest.fixture
def one_rank(tmp_path: Path) -> lightning.Trainer:
    """A Trainer of one rank with a pipeline of one stage."""
    strategy = PipelineStrategy("1f1b", 2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=3, default_root_dir=tmp_path, **quiet)


def data(samples: int = 8) -> DataLoader[Any]:
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, torch.zeros(samples, dtype=torch.long)), 8)


def fits_twice(folder: Path, strategy: Callable[[], dict[str, Any]]) -> dict[str, Tensor]:
    """Weights after one Trainer has fit a module twice, and another once."""
    lightning.seed_everything(0, verbose=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    make = partial(lightning.Trainer, accelerator="cpu", devices=1, precision="64-true", default_root_dir=folder, **quiet)
    module, first = Classifier(), make(max_epochs=2, **strategy())
    first.fit(module, data())
    first.fit_loop.max_epochs = 4
    first.fit(module, data())
    make(max_epochs=2, **strategy()).fit(module, data())
    return module.state_dict()


@pytest.mark.feature("several fits of one module")
def test_several_fits_of_one_module_train_as_on_one_device(tmp_path: Path) -> None:
    ours, theirs = (fits_twice(tmp_path, strategy) for strategy in (lambda: {"strategy": PipelineStrategy("1f1b", 2)}, dict))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_module_with_a_metric_is_copied_after_fit(one_rank: lightning.Trainer) -> None:
    module = Evaluated()
    one_rank.callbacks.append(StochasticWeightAveraging(0.05, 2))  # it copies the module before each call of the Trainer
    one_rank.fit(module, data())
    one_rank.validate(module, data(), verbose=False)
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module.accuracy))
    assert [type(metric) for metric in (copies[0].accuracy, copies[1])] == [Accuracy, Accuracy]


def test_both_runs_of_a_training_step_draw_the_same(one_rank: lightning.Trainer) -> None:
    one_rank.fit(Denoiser(), data())
    assert one_rank.global_step == 3
    assert "noise" in one_rank.callback_metrics


class LateDenoiser(Classifier):
    """Draws noise from the second step on, and notes the sum of each microbatch that it gives to the network."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        if self.global_step:
            x = x + torch.randn_like(x) + random.random()
        if len(x) < 8:  # a microbatch
            note((float(x.sum()),))
        return self.model(x).square().mean()


def test_a_training_step_that_begins_to_draw_later_draws_the_same_in_both_runs(one_rank: lightning.Trainer) -> None:
    """In each step, the runs of two microbatches up to the call, and then those for the losses."""
    NOTES.clear()
    one_rank.fit(LateDenoiser(), data())
    steps = [NOTES[start : start + 4] for start in (0, 4, 8)]
    assert all(sums[:2] == sums[2:] for sums in steps)
    assert len(set(NOTES)) == 6


class Faulty(Classifier):
    """Has a training_step with the given code."""

    def __init__(self, step: Callable[[Faulty, Any], Any]) -> None:
        super().__init__()
        self.step, self.scale = step, nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch[0])


def spread(self: Any, x: Tensor) -> Tensor:
    """A mean over samples that differs between microbatches."""
    return (self.model(x) * x[:, :1].exp()).square().mean()


def weighted(self: Any, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(self.model(x), x[:, 0].gt(0).long(), torch.tensor([1.0, 5.0, 1.0, 1.0, 1.0]))


def mixed(self: Any, x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mixes samples with others of the batch."""
    labels, order, share = x[:, 0].gt(0).long(), torch.randperm(len(x)), np.random.beta(2, 2)
    logits = self.model(share * x + (1 - share) * x[order])
    losses = [nn.functional.cross_entropy(logits, of, weights) for of in (labels, labels[order])]
    return share * losses[0] + (1 - share) * losses[1]


def late(self: Any, x: Tensor) -> Tensor:
    """Draws after the call of the network: a scalar of each generator, and a mask."""
    output = self.model(x)
    note((len(x), float(torch.rand(())), random.random(), float(np.random.rand())))
    return nn.functional.dropout(output, 0.5).square().mean()


NOTES: list[tuple[float, ...]] = []
note = NOTES.append  # changes that the strategy does not find


@pytest.mark.feature("random numbers after the network in training_step")
def test_numbers_drawn_after_the_network_are_those_of_the_step(one_rank: lightning.Trainer) -> None:
    """One draw for all microbatches and the comparison in steps 1 and 2, and others in each step."""
    NOTES.clear()
    with pytest.warns(UserWarning, match="on_after_batch_transfer") as found:
        one_rank.fit(Faulty(late), data())
    assert sum("on_after_batch_transfer" in str(warning.message) for warning in found) == 1
    assert [size for size, *_ in NOTES] == [4, 4, 8, 4, 4, 8, 4, 4]
    first, second, third = NOTES[:3], NOTES[3:6], NOTES[6:]
    for step in (first, second, third):
        assert len({draw[1:] for draw in step}) == 1
    assert len({step[0][1:] for step in (first, second, third)}) == 3


def test_a_permutation_of_the_batch_is_one_of_each_microbatch(one_rank: lightning.Trainer) -> None:
    with pytest.warns(UserWarning, match="on_after_batch_transfer") as found:
        one_rank.fit(Faulty(mixed), data())
    assert one_rank.global_step == 3
    assert sum("on_after_batch_transfer" in str(warning.message) for warning in found) == 1


def logged(self: Any, x: Tensor) -> Tensor:
    loss = spread(self, x)
    self.log("root", loss.sqrt())
    return loss


def perplexity(self: Any, x: Tensor) -> Tensor:
    loss = timed(self, x)
    self.log("perplexity", math.exp(float(loss)))
    return loss


def timed(self: Any, x: Tensor) -> Any:
    loss = spread(self, x)
    self.log("time", time.perf_counter())
    return loss


def counted(self: Any, x: Tensor) -> Tensor:
    self.count = getattr(self, "count", 0) + 1
    return self.model(x).square().mean()


@pytest.mark.refuses("losses that are neither sums nor means")
@pytest.mark.parametrize(
    ("step", "stated"),
    [
        (lambda self, x: self.model(x).square().sum(), 'loss_weight="sum"'),
        (lambda self, x: spread(self, x).sqrt(), "num_microbatches=1"),
        (weighted, "loss_weight"),
        (lambda self, x: mixed(self, x, torch.tensor([1.0, 5.0, 1.0, 1.0, 1.0])), "on_after_batch_transfer"),
        (logged, "'root'"),
        (perplexity, "'perplexity'"),
        (counted, "self.count"),
    ],
    ids=["a sum", "a root", "class weights", "mixed class weights", "a logged root", "a logged number", "a counter"],
)
def test_a_number_that_is_no_mean_over_microbatches_is_an_error(step: Any, stated: str, one_rank: lightning.Trainer) -> None:
    with raises(InputError, "training_step", stated):
        one_rank.fit(Faulty(step), data())


class Begins(Classifier):
    """Gives numbers from step 3 on, which is not compared."""

    def __init__(self, give: Callable[[Any, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.give, self.tally, self.stepwise, self.losses = give, MeanMetric(), MeanMetric(), []
        self.f1 = MulticlassF1Score(CLASSES, average="macro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(batch[0]).square().mean()
        given = self.give(self, loss, batch[0]) if self.global_step >= 2 else None
        return {"loss": loss, **given} if isinstance(given, dict) else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append({name: float(value) for name, value in outputs.items()})


def scored(self: Any, loss: Tensor, x: Tensor) -> None:
    self.f1(x[:, :CLASSES], labels(x))
    self.log("f1", self.f1)


@pytest.mark.refuses("numbers that are no means over microbatches, in a later step")
@pytest.mark.parametrize(
    ("give", "stated"),
    [
        (lambda self, loss, x: self.log("perplexity", (500 * loss).exp()), "'perplexity'"),
        (lambda self, loss, x: self.tally.update((500 * loss).exp()), "self.tally"),
        (lambda self, loss, x: {"largest": x.max()}, "'largest'"),
        (scored, "'f1'"),
    ],
    ids=["a logged number", "a Metric of the loss", "a returned number", "a Metric of samples"],
)
def test_a_number_is_compared_in_the_step_in_which_it_first_appears(give: Any, stated: str, one_rank: lightning.Trainer) -> None:
    with raises(InputError, "training_step", stated):
        one_rank.fit(Begins(give), data())
    assert one_rank.global_step == 2


def begun(self: Any, loss: Tensor, x: Tensor) -> dict[str, Tensor]:
    self.log("mean", loss, on_step=True, on_epoch=True)
    self.log("sum", x.sum(), reduce_fx="max", on_step=True)
    self.tally.update(loss)
    self.stepwise(loss)
    self.log("stepwise", self.stepwise, on_step=True, on_epoch=False)
    return {"sum": x.sum(), "mean": loss.detach()}


@pytest.mark.feature("numbers that are first logged in a later step")
def test_numbers_that_begin_in_a_later_step_are_those_of_one_device(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    found = []
    for strategy in ({"strategy": PipelineStrategy("1f1b", 2)}, {}):
        lightning.seed_everything(0, verbose=False)
        given = {"devices": 1, "max_epochs": 5, "default_root_dir": tmp_path, **quiet, **strategy}
        module, trainer = Begins(begun), lightning.Trainer(accelerator="cpu", precision="64-true", **given)
        trainer.fit(module, data())
        logs = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found.append([module.losses, logs, float(module.tally.compute()), module.tally.update_count, module.state_dict()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert found[0][3] == 3


class Meter:
    """Counts samples in an attribute and in one of its class, and is counted in a global variable."""

    total = 0

    def __init__(self) -> None:
        self.count = 0

    def update(self, count: int) -> None:
        self.count += count


METERS: list[int] = []


def kept(update: Callable[[Any, Tensor], object]) -> Callable[[Any, Tensor], Tensor]:
    """A training step that calls `update` after the network."""

    def step(self: Any, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        update(self, x)
        return loss

    return step


class Keeper(Faulty):
    """Holds state of many kinds."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(step)
        self.meter, self.meters, self.stats = Meter(), {"x": Meter()}, SimpleNamespace(count=0)
        self.last, self.array, self._private = deque(maxlen=3), np.zeros(3), 0
        self.plain = {"mean": MeanMetric()}
        self.register_buffer("center", torch.zeros(WIDTH))

    def count(self) -> None:
        self._private += 1


@pytest.mark.refuses("state of any kind that training_step changes")
@pytest.mark.parametrize(
    ("update", "stated"),
    [
        (lambda self, x: self.meter.update(len(x)), "self.meter.count"),
        (lambda self, x: self.meters["x"].update(len(x)), "self.meters.x.count"),
        (lambda self, x: vars(self.stats).update(count=len(x)), "self.stats.count"),
        (lambda self, x: self.last.append(len(x)), "self.last"),
        (lambda self, x: self.array.__iadd__(len(x)), "self.array"),
        (lambda self, x: self.count(), "self._private"),
        (lambda self, x: self.plain["mean"].update(x), "self.plain.mean"),
        (lambda self, x: self.center.add_(1), "self.center"),
        (lambda self, x: setattr(self, "center", self.center + 1), "self.center"),
        (lambda self, x: setattr(Meter, "total", Meter.total + 1), "Meter.total"),
        (lambda self, x: METERS.append(len(x)), f"{__name__}.METERS"),
        (lambda self, x: self.trainer.callbacks[-1].rows.append(len(x)), "callbacks[0].rows"),
    ],
    ids=["meter", "dict", "namespace", "deque", "array", "private", "metric", "buffer", "assigned", "class", "global", "callback"],
)
def test_state_that_a_training_step_changes_is_an_error(update: Any, stated: str, one_rank: lightning.Trainer) -> None:
    one_rank.callbacks.append(Kept())
    with raises(InputError, "training_step", stated, "on_train_batch_end"):
        one_rank.fit(Keeper(kept(update)), data())


def doubled(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def hooked(self: Any, x: Tensor) -> Tensor:
    handle = self.model[0].register_forward_hook(doubled)
    output = self.model(x)
    handle.remove()
    return output.square().mean()


def within(enter: Callable[[ExitStack, Any], object]) -> Callable[[Any, Tensor], Tensor]:
    """A training step that calls the network inside of a context."""

    def step(self: Any, x: Tensor) -> Tensor:
        with ExitStack() as stack:
            enter(stack, self.model)
            output = self.model(x)
        return output.float().square().mean()

    return step


with_hook = within(lambda stack, model: stack.callback(model[0].register_forward_hook(doubled).remove))


@pytest.mark.refuses("what training_step sets for its call of the network only")
@pytest.mark.parametrize(
    ("step", "stated"),
    [
        (within(lambda stack, model: stack.enter_context(replaced(model, scale=2.0))), "'scale'"),
        (within(lambda stack, model: stack.enter_context(torch.autocast("cpu", torch.bfloat16))), 'precision="bf16-mixed"'),
        (within(lambda stack, model: stack.enter_context(torch.no_grad())), "gradient"),
        (within(lambda stack, model: stack.enter_context(sdpa_kernel(SDPBackend.MATH))), "attention"),
        (within(lambda stack, model: (stack.enter_context(torch.random.fork_rng()), torch.manual_seed(1))), "torch.random"),
        (within(lambda stack, model: stack.callback(model.eval().train)), "'0.0'"),
        (within(lambda stack, model: stack.callback(model[5].requires_grad_(False).requires_grad_)), "'5.weight'"),
        (with_hook, "'0'"),
        (hooked, "'0'"),
    ],
    ids=["attribute", "autocast", "gradients", "attention", "random state", "mode", "frozen", "hook in with", "hook"],
)
def test_what_is_set_for_the_call_of_the_network_is_an_error(step: Any, stated: str, one_rank: lightning.Trainer) -> None:
    with raises(InputError, "training_step", stated, "on_train_batch_start"):
        one_rank.fit(Faulty(step), data())


def drawn_around(self: Any, x: Tensor) -> Tensor:
    return self.model(x + torch.rand(())).square().mean() + torch.rand(())


def test_random_numbers_around_the_call_of_the_network_are_no_setting_of_it(one_rank: lightning.Trainer) -> None:
    one_rank.fit(Faulty(drawn_around), data())
    assert one_rank.global_step == 3


class StepsInContext(Faulty):
    """Trains by hand."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(step)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.step(self, batch[0]))
        optimizer.step()


def test_by_hand_the_network_runs_in_the_context_of_its_call(one_rank: lightning.Trainer) -> None:
    module = StepsInContext(with_hook)
    alone = copy.deepcopy(module.model)
    one_rank.fit(module, data())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        with_hook(SimpleNamespace(model=alone), data().dataset[:][0]).backward()
        optimizer.step()
    torch.testing.assert_close(module.model.state_dict(), alone.state_dict())


def test_by_hand_a_hook_that_is_removed_after_the_call_is_an_error(one_rank: lightning.Trainer) -> None:
    with raises(InputError, "training_step", "'0'", "on_train_batch_start"):
        one_rank.fit(StepsInContext(hooked), data())


def test_the_callbacks_of_a_trainer_are_those_of_the_user(one_rank: lightning.Trainer) -> None:
    before = list(one_rank.callbacks)
    one_rank.fit(Classifier(), data())
    assert one_rank.callbacks == before


def labels(x: Tensor) -> Tensor:
    return x[:, :CLASSES].argmax(1) * x[:, CLASSES].gt(0)


class Scored(Faulty):
    """Logs a metric that is no mean over samples."""

    def __init__(self, **options: bool) -> None:
        super().__init__(kept(lambda self, x: self.score(x)))
        self.f1, self.options = MulticlassF1Score(CLASSES, average="macro"), options

    def score(self, x: Tensor) -> None:
        self.f1(x[:, :CLASSES], labels(x))
        self.log("f1", self.f1, **self.options)


@pytest.mark.refuses("a Metric per step that is no mean over microbatches")
@pytest.mark.parametrize("options", [{}, {"on_step": True, "on_epoch": True}, {"on_step": False, "on_epoch": True}])
def test_a_metric_is_that_of_one_device_or_an_error(options: dict[str, bool], one_rank: lightning.Trainer) -> None:
    refused = raises(InputError, "training_step", "'f1'", "on_step=False") if options.get("on_step", True) else nullcontext()
    with refused:
        one_rank.fit(Scored(**options), data())
    if not options.get("on_step", True):
        x = data().dataset.tensors[0]
        expected = MulticlassF1Score(CLASSES, average="macro")(x[:, :CLASSES], labels(x))
        assert float(one_rank.callback_metrics["f1"]) == pytest.approx(float(expected))


class RowCount(Metric):
    """Counts rows, those after the first update `times` as often."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.add_state("rows", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.rows += len(x) * (self.times if self.rows else 1)

    def compute(self) -> Tensor:
        return self.rows


class Counted(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.counts = MetricCollection({"once": RowCount(1), "twice": RowCount(2)})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counts.update(batch[0])
        return self.model(batch[0]).square().mean()


def test_metrics_that_are_equal_in_the_first_microbatch_stay_apart(one_rank: lightning.Trainer) -> None:
    module = Counted()
    one_rank.fit(module, data())
    counts = module.counts.compute()
    assert counts["twice"] > counts["once"] == one_rank.global_step * len(data().dataset)


class Printing(Faulty):
    """Logs on the first rank only, and with `direct` by its logger."""

    def __init__(self, direct: Callable[[Any], object]) -> None:
        super().__init__(kept(lambda self, x: self.write(x)))
        self.direct = direct

    def write(self, x: Tensor) -> None:
        if self.trainer.is_global_zero and self.global_rank == 0:
            self.log("mean", x.mean(), on_epoch=True)
        self.on_first_rank(x)
        if self.logger is not None and self.logger.log_dir:
            self.direct(self.logger)

    @rank_zero_only
    def on_first_rank(self, x: Tensor) -> None:
        self.log("decorated", x.mean(), on_epoch=True)


@pytest.mark.refuses("writing with self.logger in training_step")
@pytest.mark.parametrize("direct", [lambda logger: logger.log_metrics({"x": 1.0}), lambda logger: logger.experiment.log_metrics({})])
def test_a_training_step_that_writes_with_its_logger_is_an_error(direct: Any, one_rank: lightning.Trainer) -> None:
    one_rank.logger = CSVLogger(one_rank.default_root_dir)
    with raises(InputError, "training_step", "self.log", "on_train_batch_end"):
        one_rank.fit(Printing(direct), data())


class Kept(lightning.Callback):
    """A callback with a list."""

    def __init__(self) -> None:
        self.rows: list[int] = []


def test_a_time_is_logged_as_a_mean(one_rank: lightning.Trainer) -> None:
    one_rank.fit(Faulty(lambda self, x: {"loss": timed(self, x), "end": time.perf_counter()}), data())
    assert one_rank.callback_metrics["time"] <= time.perf_counter()


@pytest.mark.refuses("two calls of the network in training_step")
@pytest.mark.parametrize(
    ("step", "stated"),
    [
        (lambda self, x: self.model(x - x.mean(0)).mean(), "self.model"),
        (lambda self, x: self.model(x + torch.tensor(np.random.randn(*x.shape)).float()).mean(), "on_after_batch_transfer"),
        (lambda self, x: (self.model(x) + self.model(x)).mean(), "self.model"),
        (lambda self, x: x.mean(), "self.model"),
        (lambda self, x: (self.model(x) * torch.rand(len(x), 1, generator=torch.Generator())).mean(), "torch.Generator"),
        (lambda self, x: {"loss": (output := self.model(x)).mean(), "largest": output.max()}, "largest"),
        (lambda self, x: self.model(x * self.scale).mean(), "self.scale"),
        (lambda self, x: self.model(x.T.mean(0).sub(torch.ones(8))[:, None] * x).mean(), "tensor[None]"),
        (lambda self, x: {"answers": self.model(x)}, "'loss'"),
        (lambda self, x: None if len(x) == 4 else self.model(x).mean(), "on_after_batch_transfer"),
        (lambda self, x: None if len(x) == 8 and len(self.model(x)) else self.model(x).mean(), "on_after_batch_transfer"),
        (lambda self, x: loss if (loss := self.model(x).mean()) is not None and len(x) != 4 else None, "on_after_batch_transfer"),
    ],
    ids=[
        "a mean of the batch",
        "rows of NumPy",
        "two calls",
        "no call",
        "a late generator",
        "a returned maximum",
        "a scaled input",
        "a row of the size of the batch",
        "no loss",
        "skipped microbatches",
        "a skipped batch of trained microbatches",
        "microbatches that are skipped late",
    ],
)
def test_a_training_step_that_cannot_be_cut_is_an_error(step: Any, stated: str, one_rank: lightning.Trainer) -> None:
    with raises((InputError, PipelineError), "training_step", stated):
        one_rank.fit(Faulty(step), data())


class Distilled(Classifier):
    """Calls a teacher before the model; with `frozen`, its parameters need no gradients, and else it is called without them."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.teacher, self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen), frozen

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.set_grad_enabled(self.frozen):
            taught = self.teacher(batch[0])
        return (self.model(batch[0]).mean(1) - taught.mean(1)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)


@pytest.mark.refuses("a network that is not trained, next to others that are")
@pytest.mark.parametrize("validates", [False, True], ids=["", "after a validation"])
@pytest.mark.parametrize("frozen", [False, True], ids=["without gradients", "frozen"])
@pytest.mark.parametrize("network", [None, "model"])
def test_a_teacher_that_is_called_first_is_not_the_network(network: str | None, frozen: bool, validates: bool, tmp_path: Path) -> None:
    strategy = PipelineStrategy("1f1b", 2, network=network)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=2, strategy=strategy, default_root_dir=tmp_path, **quiet)
    refused = nullcontext() if network else raises(InputError, "network='model'", "network='teacher'", network="teacher")
    with refused:
        trainer.fit(Distilled(frozen=frozen), data(), data() if validates else None)
    assert trainer.global_step == (2 if network else 0)


class Remembering(Classifier):
    """Notes how many outputs of the network are alive in each call."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(batch[0])
        note_output(StorageWeakRef(output.untyped_storage()))
        note((sum(not storage.expired() for storage in outputs_so_far()),))
        return output.square().mean()


OUTPUTS: list[StorageWeakRef] = []
note_output, outputs_so_far = OUTPUTS.append, OUTPUTS.__iter__


def test_outputs_are_kept_in_compared_steps_only(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"devices": 1, "max_steps": 3, "default_root_dir": tmp_path, **quiet}
    NOTES.clear(), OUTPUTS.clear()
    lightning.Trainer(accelerator="cpu", strategy=PipelineStrategy("1f1b", 8), **given).fit(Remembering(), data())
    alive = [count for (count,) in NOTES]
    assert max(alive[:9]) >= 8  # step 1, with one call for the whole batch
    assert len(alive) == 9 + 9 + 8
    assert max(alive[-8:]) <= 2


def test_a_batch_that_is_skipped_in_a_step_that_is_not_compared_runs_again(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    found = []
    for strategy in ({"strategy": PipelineStrategy("1f1b", 2)}, {}):
        lightning.seed_everything(0, verbose=False)
        module, given = SkipsThird(), {"devices": 1, "max_epochs": 6, "default_root_dir": tmp_path, **quiet, **strategy}
        lightning.Trainer(accelerator="cpu", precision="64-true", **given).fit(module, data())
        found.append([module.losses, module.state_dict()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert len(found[0][0]) == 4


class SkipsThird(Classifier):
    """Skips batches 3 and 5 after the call, for a NaN of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        rows = self.model(batch[0]).square().mean(1)
        rows = torch.where((batch[0][:, 0] > 1) & (self.current_epoch in (2, 4)), math.nan, rows)
        return loss if (loss := rows.mean()).isfinite() else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses += [outputs["loss"]] if outputs else []


@pytest.mark.refuses("manual_backward for some microbatches")
def test_manual_backward_for_some_microbatches_is_an_error(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"devices": 1, "max_steps": 3, "default_root_dir": tmp_path, **quiet}
    module = Faulty(by_hand)
    module.automatic_optimization = False
    with raises(InputError, "manual_backward", got=2):
        lightning.Trainer(accelerator="cpu", strategy=PipelineStrategy("1f1b", 2), **given).fit(module, data())


def by_hand(self: Any, x: Tensor) -> None:
    loss = self.model(x).square().mean()
    if len(x) == 8:
        self.manual_backward(loss)


class Rows(nn.Module):
    """Returns rows of another form than one for each sample: steps of time in the first dimension, or several rows for each sample."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(WIDTH, 4), form

    def forward(self, x: Tensor) -> Tensor:
        steps = [self.layer(x), self.layer(x).tanh(), self.layer(x).sin()]
        return torch.stack(steps) if self.form == "time first" else torch.stack(steps, 1).flatten(0, 1)


class OfRows(Classifier):
    """A loss of some rows of the network, with automatic or manual optimization."""

    def __init__(self, form: str, *, by_hand: bool) -> None:
        super().__init__()
        self.model, self.form, self.automatic_optimization, self.losses = Rows(form), form, not by_hand, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.model(batch[0])
        loss = (rows[1] if self.form == "time first" else rows[1::3]).square().mean()
        if self.automatic_optimization:
            return {"loss": loss, "rows": rows.detach()}
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach(), "rows": rows.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses += [outputs["loss"], outputs["rows"]]


@pytest.mark.parametrize("by_hand", [False, True], ids=["", "by hand"])
@pytest.mark.parametrize("form", ["time first", "rows of samples"])
def test_rows_of_another_form_are_those_of_one_device(form: str, by_hand: bool, tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    found = []
    for strategy in ({"strategy": PipelineStrategy("1f1b", 2)}, {}):
        lightning.seed_everything(0, verbose=False)
        module, given = OfRows(form, by_hand=by_hand), {"devices": 1, "max_steps": 3, "default_root_dir": tmp_path, **quiet, **strategy}
        lightning.Trainer(accelerator="cpu", precision="64-true", **given).fit(module, data())
        found.append([module.losses, module.state_dict()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


class Recurrent(Classifier):
    """Keeps the output of the last step, which it gives to the network, in an attribute or in the batch."""

    def __init__(self, *, in_batch: bool) -> None:
        super().__init__()
        self.model = Cell()
        self.automatic_optimization, self.in_batch, self.hidden = False, in_batch, None

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        hidden = torch.zeros(len(batch[0]), WIDTH, dtype=batch[0].dtype) if self.hidden is None else self.hidden
        return [*batch, hidden] if self.in_batch else batch

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, optimizer = batch[0], self.optimizers()
        hidden = torch.zeros(len(x), WIDTH, dtype=x.dtype) if self.hidden is None else self.hidden
        output = self.model(x, batch[2] if self.in_batch else hidden)
        optimizer.zero_grad()
        self.manual_backward(output.square().mean())
        optimizer.step()
        self.hidden = output.detach()


class Cell(nn.Module):
    """A step of a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.hidden((self.input(x) + hidden).tanh())


def test_state_in_an_attribute_is_an_error_and_trains_in_the_batch(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    make = partial(lightning.Trainer, accelerator="cpu", devices=1, max_epochs=3, precision="64-true", default_root_dir=tmp_path, **quiet)
    with raises((InputError, PipelineError), "training_step", got=8, expected=4):
        make(strategy=PipelineStrategy("1f1b", 2)).fit(Recurrent(in_batch=False), data())
    weights = []
    for strategy in ({"strategy": PipelineStrategy("1f1b", 2)}, {}):
        lightning.seed_everything(0, verbose=False)
        module = Recurrent(in_batch=True)
        make(**strategy).fit(module, data())
        weights.append(module.state_dict())
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-9)


def ragged(self: Any, x: Tensor) -> Tensor:
    """A mean over samples in batches of 8 and their microbatches only."""
    return self.model(x).square().mean(1).sum() / (len(x) if len(x) in (4, 8) else len(x) + 1)


@pytest.mark.refuses("losses that are no means only in a short last batch")
def test_a_loss_that_is_no_mean_in_the_short_last_batch_is_an_error(one_rank: lightning.Trainer) -> None:
    with raises(InputError, "training_step", "loss_weight"):
        one_rank.fit(Faulty(ragged), data(22))
    assert one_rank.global_step == 2


class Closed(Classifier):
    """Gives its loss to the optimizer as a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.model(batch[0]).square().mean()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class SkipMeter(Classifier):
    """Counts skipped batches in an object, a list, a tensor and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.names, self.skipped = Meter(), [], 0
        self.register_buffer("total", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.meter.update(1)
            self.names.append(batch_idx)
            self.skipped += 1
            self.total += 1
            return None
        return self.model(batch[0]).square().mean()


class Regressed(Classifier):
    """A metric whose value needs two samples."""

    def __init__(self, *, by_value: bool) -> None:
        super().__init__()
        self.r2, self.by_value = R2Score(), by_value

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(batch[0])
        (self.r2 if self.by_value else self.r2.update)(output[:, 0], batch[0][:, 0])
        self.log("r2", self.r2, on_step=False, on_epoch=True)
        return output.square().mean()


class Policy(nn.Module):
    """Draws with Python's generator between its layers, and returns log probabilities of classes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers, self.head, self.options = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, CLASSES), options

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * (1 if random.random() < 2 else 0)
        return torch.distributions.Categorical(logits=self.head(x), **self.options).log_prob(torch.zeros(len(x)))


class Acting(Classifier):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = Policy(**options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return -self.model(batch[0]).mean()


class Tallied(Classifier):
    """Updates metrics with the loss and other numbers of the batch, in each form of torchmetrics, and has what they say in `rows`."""

    def __init__(self) -> None:
        super().__init__()
        self.tallies = nn.ModuleList((MeanMetric(), SumMetric(), MaxMetric(), MinMetric(), CatMetric(), RunningMean(2), SteppedMean()))
        self.logged, self.weighted, self.counted, self.best = SumMetric(), MeanMetric(), SumMetric(), MaxMetric()
        self.collected = MetricCollection({"mean": MeanMetric(), "sum": SumMetric(), "running": RunningMean(2)}, prefix="all_")
        self.rows: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = spread(self, batch[0])
        for metric in self.tallies:
            metric.update(loss)
        self.weighted.update(loss.item(), weight=len(batch[0]))
        self.counted.update(1)
        self.logged(value=loss)
        self.log("logged", self.logged, on_step=True, on_epoch=True)
        self.log("value", self.best(loss), on_step=False, on_epoch=True)
        self.collected(loss)
        self.log_dict(self.collected, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        values = {str(place): metric.compute() for place, metric in enumerate(self.tallies)}
        values |= {"weighted": self.weighted.compute(), "counted": self.counted.compute()}
        self.rows.append(values | dict(self.trainer.callback_metrics))


class SteppedMean(Metric):
    """A mean over updates, whose number it counts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.updates += 1
        self.total += value

    def compute(self) -> Tensor:
        return self.total / self.updates


@pytest.mark.feature("metrics of the loss")
def test_metrics_of_the_loss_are_those_of_one_device(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    found = []
    for strategy in ({"strategy": PipelineStrategy("1f1b", 4)}, {}):
        lightning.seed_everything(0, verbose=False)
        module, given = Tallied(), {"devices": 1, "max_epochs": 2, "default_root_dir": tmp_path, **quiet, **strategy}
        lightning.Trainer(accelerator="cpu", precision="64-true", **given).fit(module, data(21))
        found.append(module.rows)
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)  # metrics compute in float32


def tallied(update: Callable[[Any, Tensor], object]) -> Callable[[Any, Tensor], Tensor]:
    """A training step that updates the metric `self.tally` in some way."""

    def step(self: Any, x: Tensor) -> Tensor:
        loss = spread(self, x)
        update(self, loss)
        return loss

    return step


@pytest.mark.refuses("a Metric of a number that is neither a mean nor a sum")
@pytest.mark.parametrize(
    ("update", "stated"),
    [
        (lambda self, loss: self.tally.update(loss.sqrt()), "self.tally"),
        (lambda self, loss: (self.tally.update(loss), self.log("mean", self.tally.compute())), "self.tally.compute()"),
        (lambda self, loss: (self.tally.update(loss), self.tally.reset()), "self.tally.reset()"),
        (lambda self, loss: (self.tally(loss), loss.ndim or [self.tally(loss) for _ in range(int(1e3 * loss) % 7)]), "self.tally"),
        (lambda self, loss: self.tally.update(math.nan * loss), "RuntimeError"),
        (lambda self, loss: self.tally(loss[None]), "self.tally"),
    ],
    ids=["a root", "computed", "reset", "by condition", "nan", "with dimensions"],
)
def test_a_metric_of_a_number_that_does_not_follow_is_an_error(update: Any, stated: str, one_rank: lightning.Trainer) -> None:
    module = Faulty(tallied(update))
    module.tally = MeanMetric(nan_strategy="error")
    with raises(InputError, "training_step", stated, "on_train_batch_end" if stated != "RuntimeError" else "Metric"):
        one_rank.fit(module, data())


@pytest.mark.parametrize("has_dimensions", [False, True])
def test_a_metric_with_microbatches_of_one_sample_is_that_of_one_device_or_an_error(has_dimensions: bool, tmp_path: Path) -> None:
    def step(self: Any, x: Tensor) -> Tensor:
        output = self.model(x)
        loss = output.square().mean()
        self.tally(loss[None] if has_dimensions else output[:, 0])
        return loss

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    found = []
    with raises(InputError, "self.tally") if has_dimensions else nullcontext():
        for strategy in ({"strategy": PipelineStrategy("1f1b", 8)}, {}):
            lightning.seed_everything(0, verbose=False)
            module, given = Faulty(step), {"devices": 1, "max_steps": 3, "default_root_dir": tmp_path, **quiet, **strategy}
            module.tally = CatMetric()
            lightning.Trainer(accelerator="cpu", precision="64-true", **given).fit(module, data())
            found.append(module.tally.compute().detach())
        assert len(found[0]) == 24
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)  # metrics compute in float32


@pytest.mark.feature(
    "closures of optimizers with manual optimization", "a meter that counts skipped batches", "code of the network that draws"
)
@pytest.mark.parametrize(
    "make",
    [Closed, SkipMeter, partial(Regressed, by_value=False), partial(Acting, validate_args=False)],
    ids=["a closure", "a meter", "R2", "a policy"],
)
def test_other_forms_of_training_step_train_as_on_one_device(make: Callable[[], Any], tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    found = []
    for strategy in ({"strategy": PipelineStrategy("1f1b", 4)}, {}):
        lightning.seed_everything(0, verbose=False)
        module, given = make(), {"devices": 1, "max_epochs": 2, "default_root_dir": tmp_path, **quiet, **strategy}
        one = lightning.Trainer(accelerator="cpu", precision="64-true", **given)
        one.fit(module, data(20))
        counts = [module.meter.count, module.names, module.skipped] if isinstance(module, SkipMeter) else []
        found.append([counts, module.state_dict(), dict(one.callback_metrics)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.refuses("metrics whose value needs more samples than a microbatch has")
def test_a_metric_that_needs_more_samples_than_a_microbatch_has_is_an_error(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"strategy": PipelineStrategy("1f1b", 8), "max_steps": 1, "default_root_dir": tmp_path, **quiet}
    with raises((InputError, PipelineError), "training_step", "metric.update", 1, 8):
        lightning.Trainer(accelerator="cpu", devices=1, **given).fit(Regressed(by_value=True), data())


class LatePrinting(Classifier):
    """Writes with its logger from step 3 on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(batch[0])
        if self.global_step == 2:
            self.logger.experiment.log_metrics({"x": 1.0})
        return output.square().mean()


def test_a_training_step_that_writes_with_its_logger_in_a_later_step_is_an_error(one_rank: lightning.Trainer) -> None:
    one_rank.logger = CSVLogger(one_rank.default_root_dir)
    with raises(InputError, "training_step", "self.log", "on_train_batch_end"):
        one_rank.fit(LatePrinting(), data())
    assert one_rank.global_step == 2


@pytest.mark.refuses("unknown names in batch_dims")
def test_a_wrong_name_in_batch_dims_is_an_error(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"strategy": PipelineStrategy("1f1b", 2, batch_dims={"tabel": None}), "max_steps": 1, "default_root_dir": tmp_path, **quiet}
    with raises(InputError, argument="batch_dims", got="'tabel'"):
        lightning.Trainer(accelerator="cpu", devices=1, **given).fit(Classifier(), data())


def test_a_batch_with_fewer_samples_than_microbatches_is_an_error(one_rank: lightning.Trainer) -> None:
    with raises(InputError, argument="num_microbatches", got=2, expected=1):
        one_rank.fit(Classifier(), data(samples=1))


def test_a_batch_of_any_structure_is_cut() -> None:
    Pair = namedtuple("Pair", "left right")
    batch = {"x": torch.arange(5), "pair": Pair(torch.ones(5, 2), "text"), "names": list("abcde"), "mask": torch.ones(1, 5), "scale": 2}
    parts, sizes = cut(batch, 2)
    assert sizes == [3, 2]
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part["names"] for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert all(type(part["pair"]) is Pair and part["pair"].right == "text" for part in parts)
    assert all(part["mask"].shape == (1, 5) and part["scale"] == 2 for part in parts)
    with raises(InputError, argument="batch"):
        cut((torch.ones(3), torch.ones(4)), 2)


@pytest.mark.feature("at most three changed lines")
def test_the_program_of_the_page_trains(tmp_path: Path) -> None:
    done = torchrun(programs_of("docs/lightning.md")[0], tmp_path, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'train_loss'" in done.stdout
    assert "'val_loss'" in done.stdout


def test_parameters_outside_the_network_have_their_names_in_the_module() -> None:
    named = dict(Faulty(spread).named_parameters())
    found = dict(_Loss(lambda output, target: output, named).named_parameters())
    assert found.keys() == named.keys()
    assert all(found[name] is parameter for name, parameter in named.items())


@pytest.mark.feature("class weights with loss_weight", "custom losses")
def test_class_weights_train_as_on_one_device(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    weights, losses = torch.tensor([1.0, 5.0, 1.0, 1.0, 1.0]), []
    for strategy in ({}, {"strategy": PipelineStrategy("1f1b", 2, loss_weight=lambda batch: weights[batch[0][:, 0].gt(0).long()].sum())}):
        lightning.seed_everything(0, verbose=False)
        one = lightning.Trainer(accelerator="cpu", devices=1, max_steps=9, default_root_dir=tmp_path, **strategy, **quiet)
        module = Faulty(weighted)
        one.fit(module, data())
        with torch.no_grad():
            losses.append(float(weighted(module, data().dataset.tensors[0])))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
