"""`PipelineStrategy` of Lightning Fabric against Fabric on one device: losses, norms, weights and checkpoints of 30 steps."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

from tests.integrations.ranks import outcomes, run_program
from tests.integrations.test_own_numbers import assert_refused_on_both_ranks, assert_same_on_two_ranks
from tests.integrations.train_with_lightning import STEPS, network
from tests.procs.programs import programs_of, torchrun
from tests.refusals import raises, states
from zerobubble import InputError, PipelineError
from zerobubble.integrations.lightning import PipelineStrategy as StrategyOfTrainer
from zerobubble.integrations.lightning.argument_dims import call_arguments
from zerobubble.integrations.lightning.fabric import PipelineStrategy
from zerobubble.integrations.lightning.microbatch_losses import MicrobatchLosses
from zerobubble.integrations.lightning.network_numbers import NetworkNumbers

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of its own dependencies
PROGRAM = Path(__file__).with_name("train_with_fabric.py")


def train(folder: Path, *options: str, ranks: int = 0) -> Path:
    """Runs the program on so many ranks, or alone with 0."""
    run_program(PROGRAM, folder, *options, ranks=ranks)
    return folder


def assert_same(folder: Path, reference: Path, *, first: int = 0, within: float = 1e-6) -> None:
    found, expected = (json.loads((place / "log.json").read_text()) for place in (folder, reference))
    assert len(found["rows"]) == STEPS - first
    for row, other in zip(found["rows"], expected["rows"][first:], strict=True):
        assert row == pytest.approx(other, rel=within, abs=within)
    assert found["answers"] == pytest.approx(expected["answers"], abs=10 * within)
    ours, theirs = (torch.load(place / "end.ckpt") for place in (folder, reference))
    assert ours["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
    for part in ("model", "optimizer"):
        values = [each if part == "model" else each["state"] for each in (ours[part], theirs[part])]
        torch.testing.assert_close(*values, rtol=within, atol=within)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that Fabric on one device leaves."""
    return train(tmp_path_factory.mktemp("one device"))


@pytest.mark.feature("losses of one device", "clipping", "clipping by value", "checkpoints and resuming", "resuming on other ranks")
@pytest.mark.feature("weights in callbacks and after training")
def test_two_ranks_train_as_one_device_and_three_go_on(reference: Path, tmp_path: Path) -> None:
    two = train(tmp_path / "two", ranks=2)
    assert_same(two, reference)
    torch.testing.assert_close(torch.load(two / "step9.pt"), torch.load(reference / "step9.pt"), rtol=1e-6, atol=1e-6)
    for ranks in (3, 0):  # with 0, on one device without zerobubble
        assert_same(train(tmp_path / str(ranks), "--resume", str(two / "step9.ckpt"), ranks=ranks), reference, first=9)


@pytest.mark.feature("bf16", "fabric.autocast")
def test_two_ranks_train_in_bf16_as_one_device(tmp_path: Path) -> None:
    one = train(tmp_path / "one", "--precision", "bf16-mixed")
    two = train(tmp_path / "two", "--precision", "bf16-mixed", ranks=2)
    assert_same(two, one, within=1e-2)  # microbatches round differently than a whole batch
    kept = torch.load(two / "end.ckpt")["model"]
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert json.loads((one / "log.json").read_text())["rows"] != json.loads((two / "log.json").read_text())["rows"]


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that Fabric on one device leaves with gradients accumulated over two parts of each batch."""
    return train(tmp_path_factory.mktemp("accumulated"), "--accumulated", "2")


@pytest.mark.feature("gradient accumulation", "fabric.no_backward_sync")
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.long)])
def test_pipelines_of_two_ranks_accumulate_gradients_as_one_device(replicas: int, accumulated: Path, tmp_path: Path) -> None:
    train(tmp_path, "--accumulated", "2", "--replicas", str(replicas), ranks=2 * replicas)
    assert_same(tmp_path, accumulated)


@pytest.mark.feature("replicas", "fabric.all_reduce and fabric.all_gather")
def test_two_replicas_of_two_ranks_train_as_one_device(reference: Path, tmp_path: Path) -> None:
    train(tmp_path, "--replicas", "2", ranks=4)
    assert_same(tmp_path, reference)
    assert json.loads((tmp_path / "log.json").read_text())["mean"] == 0.5  # of the numbers of replicas
    assert json.loads((tmp_path / "log.json").read_text())["gathered"] == [0.0, 1.0]


@pytest.mark.feature("a killed rank: one error, no hang")
def test_a_killed_rank_ends_the_run_with_our_error(tmp_path: Path) -> None:
    (code, error), (killed, _) = outcomes(PROGRAM, tmp_path, "--fault", "kill", ranks=2)
    assert (code, killed) == (1, -signal.SIGKILL), error[-3000:]
    states(error[error.rindex("PipelineError") :], "PipelineError", "rank 1")


def fabric(strategy: Any, devices: int = 4, **arguments: Any) -> lightning.Fabric:
    return lightning.Fabric(accelerator="cpu", devices=devices, strategy=strategy, **arguments)


@pytest.mark.refuses(
    "float16", "a schedule for other ranks", "bidirectional schedules", "the option mesh", "main_grad", "survive", "order_by"
)
def test_unsuitable_arguments_are_named_at_once() -> None:
    options: dict[str, Any] = {"mesh": None, "main_grad": None, "survive": True, "order_by": "tokens", "speed": 2}
    with raises(InputError, *options, "num_microbatches", "data_parallel_size"):
        PipelineStrategy("zb-h1", 0, nn.functional.mse_loss, data_parallel_size=0, **options)
    with raises(InputError, "data_parallel_size", 3, 4, "16-true"):
        fabric(PipelineStrategy("zb-h1", 8, nn.functional.mse_loss, data_parallel_size=3), precision="16-true")
    with raises(InputError, "zb-v"):
        fabric(PipelineStrategy("dualpipe", 8, nn.functional.mse_loss))
    with raises(InputError, "16-mixed", "bf16-mixed"):
        fabric(PipelineStrategy("1f1b", 8, nn.functional.mse_loss), plugins=MixedPrecision("16-mixed", "cpu"))
    with raises(InputError, "Trainer", "lightning.fabric"):
        fabric(StrategyOfTrainer("1f1b", 2))


@pytest.mark.refuses("DDP wrapping", "torch.compile", "LBFGS", "fabric.backward", "several modules")
def test_what_a_pipeline_cannot_run_is_named() -> None:
    one = fabric(PipelineStrategy("1f1b", 2, nn.functional.mse_loss), devices=1)
    one.launch()
    with raises(InputError, "fabric.setup"):
        one.strategy.step(torch.ones(4, 16), torch.ones(4, 5))
    with raises(InputError, "DataParallel", "data_parallel_size"):
        one.setup(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))
    compiled = network()
    compiled.compile()
    for each in (compiled, torch.compile(network()), nn.Sequential(torch.compile(nn.Linear(2, 2)))):
        with raises(InputError, "torch.compile", "split"):
            one.setup(each)
    model = network()
    with raises(InputError, "LBFGS"):
        one.setup_optimizers(torch.optim.LBFGS(model.parameters()))
    wrapped = one.setup(model)
    with raises(InputError, "zb.Pipeline"):
        one.setup(network())
    with raises(InputError, "fabric.strategy.step", "torch.no_grad"):
        wrapped(torch.ones(4, 16))
    with raises(InputError, "fabric.backward", "fabric.strategy.step"):
        one.backward(torch.ones(1, requires_grad=True).sum())
    one.strategy.step(torch.ones(4, 16), torch.ones(4, 5))
    one.strategy.teardown()


WEIGHTS = torch.tensor([1.0, 5.0, 1.0, 1.0, 1.0], dtype=torch.float64)


def weighted(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, targets, WEIGHTS)


def summed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, targets, reduction="sum")


def ignoring(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, targets, ignore_index=0)


def dropping(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(nn.functional.dropout(output), targets)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 1, 0, 2, 0, 3, 0, 4])


def losses_of(loss_fn: Any, steps: int = 4, **options: Any) -> list[float]:
    """The losses of a pipeline of one stage."""
    one = fabric(PipelineStrategy("1f1b", 2, loss_fn, **options), devices=1)
    one.launch()
    torch.manual_seed(0)
    module = network().double()
    _, optimizer = one.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    losses = []
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(float(one.strategy.step(*batch())))
            optimizer.step()
    finally:
        one.strategy.teardown()
    return losses


@pytest.mark.feature("class weights with loss_weight", "custom losses")
@pytest.mark.parametrize(
    ("loss_fn", "loss_weight"),
    [(weighted, lambda targets: WEIGHTS[targets].sum()), (ignoring, lambda targets: (targets != 0).sum()), (summed, "sum")],
    ids=["class weights", "ignored labels", "a sum"],
)
def test_losses_with_weights_train_as_on_one_device(loss_fn: Any, loss_weight: Any) -> None:
    torch.manual_seed(0)
    module = network().double()
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_fn(module(batch()[0]), batch()[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses_of(loss_fn, loss_weight=loss_weight) == pytest.approx(losses, rel=1e-9)


@pytest.mark.refuses("losses that are neither sums nor means")
@pytest.mark.parametrize("loss_fn", [weighted, ignoring, summed, lambda output, targets: (output - output.mean(0)).square().mean()])
def test_a_loss_that_is_no_mean_over_samples_is_an_error(loss_fn: Any) -> None:
    with raises(InputError, "loss_fn", "loss_weight"):
        losses_of(loss_fn, 1)


class Sharing(nn.Module):
    """Attends to the rows of a table; with `mixes`, among the samples, too."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.layer, self.head, self.mixes = nn.Linear(16, 16), nn.Linear(16, 5), mixes

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = self.layer(x - x.mean(0) if self.mixes else x)
        return self.head((x @ table.T).softmax(-1) @ table)


@pytest.mark.feature("arguments that all samples share")
@pytest.mark.refuses("arguments of which it is not clear whether all samples share them")
@pytest.mark.parametrize("batch_dims", [None, {"table": None}, {"table": 0}], ids=["not given", "shared", "cut"])
def test_arguments_that_the_network_mixes_need_batch_dims(batch_dims: dict[str, int | None] | None) -> None:
    one = fabric(PipelineStrategy("1f1b", 2, nn.functional.cross_entropy, batch_dims=batch_dims), devices=1)
    one.launch()
    module = Sharing(mixes=batch_dims is None).double()
    model, _ = one.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x, y = batch()
    table = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        if batch_dims is None:
            with raises(InputError, "batch_dims={'x': None, 'table': None}", got=8):
                one.strategy.step((x, table), y)
        else:
            parts = [(x, table)] if batch_dims["table"] is None else zip(x.split(4), table.split(4), strict=True)
            with torch.no_grad():
                expected = torch.cat([module(*part) for part in parts])
                torch.testing.assert_close(model(x, table), expected, rtol=1e-9, atol=1e-9)
            loss = one.strategy.step((x, table), y)
            assert float(loss) == pytest.approx(float(nn.functional.cross_entropy(expected, y)), rel=1e-9)
    finally:
        one.strategy.teardown()


class Scaled(nn.Module):
    """Takes arguments by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(
        self, x: torch.Tensor, other: torch.Tensor | None = None, scale: float = 1.0, *, shift: float = 0.0, **more: float
    ) -> torch.Tensor:
        x = self.layer(x).tanh() if other is None else self.layer(x).tanh() + self.layer(other)
        return self.head(x) * scale + shift + more.get("again", 0.0)


class Starred(Scaled):
    def forward(self, x: torch.Tensor, /, *others: torch.Tensor, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, *others, scale=scale)


@pytest.mark.parametrize("is_named", [True, False], ids=["by name", "by position"])
def test_arguments_of_both_forms_evaluate_as_on_one_device(is_named: bool) -> None:
    one = fabric(PipelineStrategy("1f1b", 2, nn.functional.cross_entropy), devices=1)
    one.launch()
    module = Scaled().double()
    model, _ = one.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x, y = batch()
    other = x.flip(0)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {"other": other}),
        ((x, other), {"scale": 2.0}),
        ((x,), {"scale": 3.0, "other": other}),
        ((x, None), {"scale": 2.0}),
        ((x, other, 0.5), {"shift": 1.0, "again": 2.0}),
    ]
    try:
        one.strategy.step({"x": x, "other": other} if is_named else (x, other), y)
        with torch.no_grad():
            for args, kwargs in calls:
                torch.testing.assert_close(model(*args, **kwargs), module(*args, **kwargs), rtol=1e-9, atol=1e-9)
            with raises(InputError, call="Scaled"):
                model(x, other, other=other)
    finally:
        one.strategy.teardown()


def test_arguments_without_names_stay_by_position() -> None:
    x = torch.ones(2)
    assert call_arguments(Starred(), (x, x), {}) == (x, x)
    with raises(InputError, got="scale", unnamed="x, others"):
        call_arguments(Starred(), (x, x), {"scale": 2.0})


@pytest.mark.refuses("losses that are no means only in a short last batch")
def test_a_loss_that_is_no_mean_in_a_short_batch_is_an_error() -> None:
    one = fabric(PipelineStrategy("1f1b", 2, lambda output, targets: output.square().sum() / max(len(output), 3)), devices=1)
    one.launch()
    module = network().double()
    one.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x, y = batch()
    try:
        one.strategy.step(x, y), one.strategy.step(x, y)
        with raises(InputError, "loss_fn", "loss_weight"):
            one.strategy.step(x[:4], y[:4])
    finally:
        one.strategy.teardown()


def test_a_loss_that_draws_random_numbers_is_compared_with_equal_draws() -> None:
    """No step moves the generator of the loop, which shuffles batches: only the last rank computes losses."""
    assert len(losses_of(dropping)) == 4
    moved = torch.get_rng_state()
    losses_of(summed, loss_weight="sum")
    assert torch.equal(torch.get_rng_state(), moved)


def test_a_loss_that_draws_from_a_generator_of_its_own_is_an_error() -> None:
    generator = torch.Generator()
    with raises((InputError, PipelineError), "loss_fn", "torch.Generator"):
        losses_of(lambda output, targets: (output * torch.rand(len(output), 1, generator=generator)).mean())


@pytest.mark.feature("at most three changed lines")
def test_the_program_of_the_page_trains(tmp_path: Path) -> None:
    done = torchrun(programs_of("docs/lightning.md")[-1], tmp_path, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'loss'" in done.stdout


def test_a_loss_that_changes_its_dict_of_targets_is_compared_with_the_whole_batch() -> None:
    losses = MicrobatchLosses(lambda output, targets: nn.functional.mse_loss(output, targets.pop("y")), None)
    output, y = torch.rand(2, 4, 3), torch.rand(2, 4, 3)
    assert losses.begin([4, 4])
    for index in range(2):
        losses(output[index], {"y": y[index]})
    assert losses.fault(NetworkNumbers(lambda found: found), torch.device("cpu")) is None


@pytest.mark.feature("losses that the network returns")
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_numbers_of_the_module_are_those_of_one_device(schedule: str, tmp_path: Path) -> None:
    assert_same_on_two_ranks("fabric", schedule, tmp_path)


@pytest.mark.refuses("numbers of the network that are neither sums nor means")
def test_numbers_of_the_module_that_do_not_follow_are_an_error(tmp_path: Path) -> None:
    assert_refused_on_both_ranks("fabric without loss_weight", tmp_path)
