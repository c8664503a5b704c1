"""Layers that merge an adapter into their weights in `eval()`, and take it out in `train()`, train and evaluate as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks

WIDTH = 4


class Adapted(nn.Linear):
    """A layer with an adapter, as loralib has it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.weight.requires_grad = False
        self.down, self.up = (nn.Parameter(torch.rand(shape, dtype=torch.float64)) for shape in ((2, WIDTH), (WIDTH, 2)))
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + x @ self.down.T @ self.up.T


def figures(model: nn.Module, pipe: zb.Pipeline | None) -> list[float]:
    """Trains three steps, each followed by an evaluation, and returns all losses."""
    losses = []
    x = torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    optimizer = torch.optim.SGD((pipe or model).parameters(), lr=0.1)
    for _ in range(3):
        if pipe is not None:
            evaluated, _ = pipe.eval_step(x, x.cos())
            assert evaluated is not None
            losses += [pipe.step(x, x.sin()).item(), evaluated.item()]
        else:
            loss = nn.functional.mse_loss(model(x), x.sin())
            loss.backward()
            losses += [loss.item(), nn.functional.mse_loss(copy.deepcopy(model).eval()(x), x.cos()).item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def differences(group: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Adapted(), nn.Tanh()) for _ in range(4)))
    alone = figures(copy.deepcopy(model), None)
    with zb.Pipeline(zb.split(model, example=torch.rand(2, WIDTH).double()), "1f1b", 4, nn.functional.mse_loss, group=group) as pipe:
        return [ours - expected for ours, expected in zip(figures(model, pipe), alone, strict=True)]


def test_merged_adapters_train_and_evaluate_as_on_one_device(world: Ranks) -> None:
    for results in world.run(differences, ranks=2):
        assert results == pytest.approx([0.0] * 6, abs=1e-9)
