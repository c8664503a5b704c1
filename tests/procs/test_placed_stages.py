"""`device=` moves a rank's stages: made by a function or cut from a model, with ties, and with buffers that all stages use.

On the CPU nothing moves; `test_separate` runs this file on a device whose tensors the CPU refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE
from tests.procs import models
from tests.procs.ranks import Ranks
from tests.refusals import raises

WIDTH, MICROBATCHES, STEPS = 6, 4, 3


class Net(nn.Module):
    """A model with a tied head, and with a parameter and buffers of its own around the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * self.scale + self.shift)
        for block in self.blocks:
            x = x + block(x) * self.shift
        return self.head(x)


def net() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return Net().double()


def example() -> Tensor:
    return torch.zeros(2, WIDTH, dtype=torch.float64, device="cpu")


def data(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=generator, device="cpu")


def one_device(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = nn.functional.mse_loss(model(data(step)), torch.sin(data(step)))
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def differences(group: Any, make: Callable[[nn.Module], Any], schedule: str) -> float:
    """The largest difference of a loss from one device's, for stages that were moved."""
    model = net()
    expected = one_device(copy.deepcopy(model))
    with zb.Pipeline(make(model), schedule, MICROBATCHES, nn.functional.mse_loss, group=group, device=DEVICE) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            x = data(step).to(DEVICE)
            losses.append(pipe.step(x, torch.sin(x)).item())
            optimizer.step(), optimizer.zero_grad()
        held = [*pipe.parameters(), *(buffer for module in pipe.modules.values() for buffer in module.buffers())]
        assert {tensor.device.type for tensor in held} == {DEVICE.type}
    return max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))


def given(model: nn.Module) -> Any:
    return zb.split(model, example=example())


def created(model: nn.Module) -> Any:
    return zb.split(net, example=example())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("make", [given, created])
def test_moved_stages_train_like_one_device(world: Ranks, make: Any, schedule: str) -> None:
    assert max(world.run(differences, make, schedule, ranks=2)) < 1e-9


def built(group: Any) -> tuple[float, float]:
    def build(stage: int, num_stages: int) -> nn.Module:
        with torch.device("cpu"):
            return models.build(stage, num_stages)

    x, y = models.batch(4)
    with zb.Pipeline(build, "1f1b", 4, models.loss_fn, group=group, device=DEVICE) as pipe:
        loss = pipe.step(x.to(DEVICE), y.to(DEVICE)).item()
    with torch.device("cpu"):
        expected = models.one_device([models.build(stage, 2) for stage in range(2)], 4, x.cpu(), y.cpu())
    return loss, expected.item()


def test_stages_that_a_function_builds_are_moved(world: Ranks) -> None:
    for loss, expected in world.run(built, ranks=2):
        assert abs(loss - expected) < 1e-9


def wrong(group: Any) -> None:
    with raises(zb.InputError, argument="device", got="no device"):
        zb.Pipeline(models.build, "1f1b", 4, models.loss_fn, group=group, device="no device")


def test_an_unknown_device_is_refused(world: Ranks) -> None:
    world.run(wrong, ranks=2)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the CPU has one device")
def test_a_batch_on_another_device_names_both(world: Ranks) -> None:
    for error in world.run(far_batch, ranks=2):
        assert DEVICE.type in error
        assert "pipe.device" in error


def far_batch(group: Any) -> str:
    with zb.Pipeline(given(net()), "1f1b", 4, nn.functional.mse_loss, group=group, device=DEVICE) as pipe:
        with pytest.raises(zb.PipelineError) as caught:
            pipe.step(data(0), data(0))
        return str(caught.value)


class Chain(nn.Module):
    """A model without parts, which is cut between operations."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + (x @ weight).tanh()
        return x


def chained(group: Any) -> None:
    torch.manual_seed(0)
    with raises(zb.InputError, device=DEVICE.type, model="Chain"):
        zb.Pipeline(given(Chain()), "1f1b", 4, nn.functional.mse_loss, group=group, device=DEVICE)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the model is on the CPU")
def test_a_model_that_is_cut_between_operations_is_not_moved(world: Ranks) -> None:
    world.run(chained, ranks=2)
