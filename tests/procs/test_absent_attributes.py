"""Attributes that forwards set in parts: right on the rank of the part, an `InputError` where a rank would read old values.

Parts that reach the model around them read what its forward has set for their microbatch.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zerobubble as zb
from tests.procs.ranks import Ranks

WIDTH, COUNT = 6, 2


class Router(nn.Linear):
    """Keeps statistics in several ways, a cache that its forward reads, and a setting."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.history: list[float] = []
        self.usage = torch.zeros(WIDTH, dtype=torch.float64)
        self.calls = 0
        self.logs: dict[str, float] = {}
        self.cache: Tensor | None = None
        self.setting = 3

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        self.probabilities = y.detach().softmax(-1)
        self.history.append(y.mean().item())
        self.usage += y.detach().mean(0)
        self.calls += 1
        self.logs["mean"] = y.mean().item()
        if self.cache is None or self.cache.shape != y.shape:
            self.cache = torch.ones_like(y.detach())
        return y * self.cache

    def reset(self) -> None:
        self.history.clear()
        self.usage.zero_()
        self.calls = 0
        self.logs.clear()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


READS: dict[str, Callable[[Any], float]] = {
    "probabilities": lambda layer: layer.probabilities.sum().item(),
    "history": lambda layer: sum(layer.history),
    "usage": lambda layer: layer.usage.sum().item(),
    "calls": lambda layer: layer.calls + 0.0,
    "logs": lambda layer: layer.logs["mean"],
}


def wrong_reads(model: Model, whole: Model, own: set[nn.Parameter]) -> list[str]:
    """Reads that neither equal one device nor are refused where the rank does not train the layer."""
    wrong = []
    for number, (layer, one) in enumerate(zip(model.layers, whole.layers, strict=True)):
        for name, read in READS.items():
            try:
                value = read(layer)
            except zb.InputError as error:
                if layer.weight in own or error.fields["name"] != name:
                    wrong.append(f"{number}.{name}: {error}")
            else:
                if layer.weight not in own or abs(value - read(one)) > 1e-9:
                    wrong.append(f"{number}.{name}: {value}")
        wrong += [] if layer.setting == 3 else [f"{number}.setting"]
    return wrong


def trained(group: Any, schedule: str) -> tuple[list[str], float, list[str]]:
    """Wrong reads after each step, the error of the whole model's output inside zb.gathered, and wrong reads of a closed pipeline."""
    torch.manual_seed(0)
    model = Model()
    whole, wrong = copy.deepcopy(model), list[str]()
    x = torch.rand(8, WIDTH, dtype=torch.float64)
    with zb.Pipeline(zb.split(model, example=x[:2]), schedule, COUNT, mse_loss, group=group) as pipe:
        own = set(pipe.parameters())
        optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in (own, whole.parameters())]
        for size in (8, 8, 4):
            for layer in (*model.layers, *whole.layers):
                layer.reset()  # type: ignore[operator]
            pipe.step(x[:size], x[:size])
            for part in x[:size].chunk(COUNT):
                (mse_loss(whole(part), part) / COUNT).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            wrong += wrong_reads(model, whole, own)
        with zb.gathered(model):
            error = (model(x) - copy.deepcopy(whole)(x)).abs().max().item()
        pipe.eval_step(x, x)
        for part in x.chunk(COUNT):
            whole(part)
        if own.isdisjoint(model.layers[0].parameters()):
            with pytest.raises(zb.InputError):
                model.layers[0].calls + 0  # type: ignore[operator]
    return wrong, error, [f"{name} of a closed pipeline" for name, read in READS.items() if not is_refused(model, read, own)]


def is_refused(model: Model, read: Callable[[Any], float], own: set[nn.Parameter]) -> bool:
    other = next(layer for layer in model.layers if layer.weight not in own)
    try:
        read(other)
    except zb.InputError:
        return True
    return False


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_no_rank_reads_old_values(world: Ranks, schedule: str) -> None:
    for wrong, error, closed in world.run(trained, schedule, ranks=2):
        assert wrong == closed == []
        assert error < 1e-12


class Scaled(nn.Linear):
    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        scale, mask = self.read()
        return x + super().forward(x) * scale * mask


class Root(nn.Module):
    """Its forward sets a number and a tensor, which parts read by references of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        held, weak = [self], weakref.ref(self)
        reads: list[Any] = [self.state, lambda: held[0].state(), lambda: weak().state(), held[0].state]  # type: ignore[union-attr]
        self.layers = nn.ModuleList(map(Scaled, reads))

    def state(self) -> tuple[float, Tensor]:
        return self.scale, self.mask

    def forward(self, x: Tensor) -> Tensor:
        self.scale, self.mask = float(x[0, 0]), x[:, :1] > 0.5
        for layer in self.layers:
            x = layer(x)
        return x


def reading_the_root(group: Any, schedule: str) -> list[float]:
    """Differences of losses from one device. The model has run before: its attributes have values of another batch."""
    torch.manual_seed(0)
    model, batches = Root(), torch.rand(3, 8, WIDTH, dtype=torch.float64)
    model(batches[1, :2])
    uncut, differences = Root(), []
    uncut.load_state_dict(model.state_dict())
    with zb.Pipeline(zb.split(model, example=batches[0, :2]), schedule, 4, mse_loss, group=group) as pipe:
        for x in batches:
            expected = sum(mse_loss(uncut(part), part).item() / 4 for part in x.chunk(4))
            differences.append(abs(pipe.step(x, x).item() - expected))
            loss, _ = pipe.eval_step(x, x)
            assert loss is not None
            differences.append(abs(loss.item() - expected))
        assert model.scale == uncut.scale
    return differences


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_parts_read_what_the_forward_around_them_has_set(world: Ranks, schedule: str) -> None:
    for differences in world.run(reading_the_root, schedule, ranks=2):
        assert max(differences) < 1e-12
