"""Random numbers drawn by a model's code around its parts: all stages draw the same ones, and train as one device.

Parts draw as if the code around them drew nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import batch, loss_fn
from tests.procs.ranks import Ranks
from tests.thinned import every

WIDTH = 6


class Masks:
    """The masks that `drop` draws, or those that it takes from an earlier forward."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []
        self.replayed: list[Tensor] | None = None

    def drop(self, x: Tensor) -> Tensor:
        if self.replayed is not None:
            mask = self.replayed.pop(0)
        else:
            mask = torch.bernoulli(torch.full_like(x, 0.5))
            if not mask.is_meta:  # where parts are only looked at
                self.drawn.append(mask.clone())
        return 2 * mask * x


MASKS = Masks()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(5))
        self.head = nn.Linear(WIDTH, 11)

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(tokens)))
        return logits

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class DroppedResiduals(Base):
    """Every later layer uses the sum of all that was dropped."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + MASKS.drop(layer(x))
        return x


class OneNoise(Base):
    """The input and the output have one noise."""

    def body(self, x: Tensor) -> Tensor:
        noise = MASKS.drop(torch.ones_like(x))
        x = x + noise
        for layer in self.layers:
            x = layer(x)
        return x - noise


class Turned(nn.Module):
    """A layer whose output lies in memory column after column."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear.weight @ x.transpose(-1, -2)).transpose(-1, -2)


class TurnedResiduals(DroppedResiduals):
    def layer(self) -> nn.Module:
        return Turned()


class DrawingLayer(nn.Module):
    """A layer that draws, too: from the random numbers of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(self.linear(x), 0.0) + 0 * torch.rand_like(x)


class DrawingLayers(DroppedResiduals):
    def layer(self) -> nn.Module:
        return DrawingLayer()


class DrawingBlock(nn.Module):
    """A block whose own code draws between its parts, and uses again what it dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + MASKS.drop(self.attention(x))
        x = x + MASKS.drop(self.mlp(x))
        result: Tensor = x + self.last(x)
        return result


class OpenBlock(DroppedResiduals):
    """Cut inside of one block, which then is code around its parts."""

    CUTS: ClassVar = {2: ["layers.2.mlp"], 3: ["layers.2.mlp", "layers.2.last"]}

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = DrawingBlock()


MODELS = [DroppedResiduals, OneNoise, TurnedResiduals, DrawingLayers, OpenBlock]


def relative(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_stages_draw_the_random_numbers_of_one_device(kind: Callable[[], nn.Module], num_stages: int) -> None:
    torch.manual_seed(0)
    model = kind().double()
    whole = copy.deepcopy(model)
    inputs, targets = batch(1)
    split = zb.split(model, example=inputs, cuts=OpenBlock.CUTS[num_stages] if kind is OpenBlock else None)
    stages = [split(stage, num_stages) for stage in range(num_stages)]
    masks, given = [], None
    for number, stage in enumerate(stages):
        torch.manual_seed(100 + number)  # ranks have random numbers of their own
        MASKS.drawn, MASKS.replayed = [], None
        given = stage(inputs) if given is None else stage(**given)
        masks.append(MASKS.drawn)
    loss = loss_fn(given, targets)
    loss.backward()
    MASKS.replayed = masks[-1]
    expected = loss_fn(whole(inputs), targets)
    expected.backward()
    MASKS.replayed = None
    assert relative(loss, expected) < 1e-12
    ours = dict(model.named_parameters())
    assert max(relative(ours[name].grad, parameter.grad) for name, parameter in whole.named_parameters()) < 1e-12


def test_parts_draw_as_if_the_code_around_them_drew_nothing() -> None:
    """After a forward the random numbers of the rank have advanced by the seed and by what its own parts drew."""
    torch.manual_seed(0)
    inputs, _ = batch(1)
    first = zb.split(DrawingLayers().double(), example=inputs)(0, 3)
    own = sum(isinstance(layer, DrawingLayer) and "linear" in dict(layer.named_children()) for layer in first.layers)
    assert 0 < own < 5
    torch.manual_seed(7)
    first(inputs)
    after = torch.rand(3)
    torch.manual_seed(7)
    torch.randint(2**62, (1,), device="cpu")
    for _ in range(own):
        torch.rand(*inputs.shape, WIDTH, dtype=torch.float64)
    assert torch.equal(after, torch.rand(3))


def trained(group: Any, schedule: str) -> list[float]:
    """The losses of steps with dropout of residuals between the parts, on ranks with other seeds."""
    torch.manual_seed(0)
    model = Dropout().double()
    with zb.Pipeline(zb.split(model, example=batch(1)[0]), schedule, 4, loss_fn, group=group) as pipe:
        torch.manual_seed(pipe.rank)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses = []
        for _ in range(8):
            losses.append(pipe.step(*batch(4)).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


class Dropout(Base):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x), 0.2, self.training)
        return x


@pytest.mark.parametrize("schedule", every(2, ["zb-v", "1f1b"]))
def test_dropout_between_parts_trains_on_ranks(world: Ranks, schedule: str) -> None:
    losses = world.run(trained, schedule, ranks=2)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
