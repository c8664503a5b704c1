"""Autocast around a step: forwards and losses run under it, backward passes and weight passes outside of it, as torch asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.procs.models import batch, loss_fn
from tests.procs.ranks import Ranks
from zerobubble.runtime.split.layers.eligibility import CAN_SEE_HOOKS


class Mixed(nn.Module):
    """A Linear that autocast lowers, and an island of full precision around another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.lowered, self.island, self.way = nn.Linear(16, 16), nn.Linear(16, 16), way
        self.matrix = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "checkpoint":
            return checkpoint(self.run, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lowered(x))
        with torch.autocast("cpu", enabled=False):
            y = torch.tanh(self.island(y.float())) @ self.matrix
        return x + y


def stage_of(stage: int, num_stages: int, way: str) -> nn.Module:
    torch.manual_seed(stage)
    mixed: nn.Module = Mixed(way)
    if way == "compiled":
        mixed.compile(backend="aot_eager")
    first: list[nn.Module] = [nn.Embedding(11, 16)] if stage == 0 else []
    last: list[nn.Module] = [nn.Linear(16, 11)] if stage == num_stages - 1 else []
    return nn.Sequential(*first, mixed, *last)


def largest_error(group: Any, schedule: str, split: str, way: str) -> float:
    """Of gradients after a step under autocast, against forwards under autocast and backward passes outside of it on one device."""
    inputs, targets = batch(4)
    with zb.Pipeline(lambda s, n: stage_of(s, n, way), schedule, 4, loss_fn, group=group, split=split) as pipe:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipe.step(inputs, targets)
        stages = [stage_of(s, pipe.schedule.num_stages, way) for s in range(pipe.schedule.num_stages)]
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_fn(nn.Sequential(*stages)(x), y) / 4
            loss.backward()
        pairs = [pair for s, m in pipe.modules.items() for pair in zip(m.parameters(), stages[s].parameters(), strict=True)]
        return max(((mine.grad - theirs.grad).norm() / theirs.grad.norm()).item() for mine, theirs in pairs)


@pytest.mark.parametrize("way", ["plain", "checkpoint", "compiled"])
@pytest.mark.parametrize(("schedule", "split"), [("1f1b", "whole"), ("zb-h1", "deferred"), ("zb-v", "deferred"), ("zb-h1", "graph")])
def test_gradients_go_back_outside_of_autocast(world: Ranks, schedule: str, split: str, way: str) -> None:
    if (way, split) == ("compiled", "graph"):
        pytest.skip("a graph is traced from plain modules")
    if (way, split) == ("checkpoint", "graph") and not CAN_SEE_HOOKS:
        pytest.skip("a graph stage takes checkpoints from torch 2.8 on")
    assert max(world.run(largest_error, schedule, split, way, ranks=2)) <= 1e-6
