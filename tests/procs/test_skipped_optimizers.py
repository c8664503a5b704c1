"""A rank that skips its optimizer while others step is warned of, and no loop that decides alike on all ranks is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks


def skipping(group: Any, skips: dict[int, list[int]], frozen: int | None = None) -> int:
    """The number of warnings if each rank skips its optimizer in these steps, and all parameters of the stage `frozen` are frozen."""
    with zb.Pipeline(build, "1f1b", 2, loss_fn, group=group) as pipe, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if frozen in pipe.modules:
            pipe.modules[frozen].requires_grad_(False)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        for number in range(6):
            pipe.step(*batch(2))
            if number not in skips.get(pipe.rank, []):
                optimizer.step()
            optimizer.zero_grad()
            pipe.eval_step(*batch(2))
        return sum("has stepped" in str(warning.message) for warning in caught)


def refused(group: Any) -> int:
    """The number of warnings if the first rank refuses a call after each step of the optimizers."""
    with zb.Pipeline(build, "1f1b", 2, loss_fn, group=group) as pipe, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        inputs, targets = batch(2)
        for _ in range(3):
            pipe.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(zb.InputError):
                pipe.step(inputs[:1], targets)
        return sum("has stepped" in str(warning.message) for warning in caught)


def alternating(group: Any) -> int:
    """The number of warnings if each optimizer has the parameters of one half of the model, of which a rank trains one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    x = torch.rand(4, 4)
    split = zb.split(model, example=x)
    loss = torch.nn.functional.mse_loss
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.01) for half in (model[:2], model[2:])]
    with zb.Pipeline(split, "1f1b", 2, loss, group=group) as pipe, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            pipe.step(x, x)
            optimizers[number // 2 % 2].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return sum("has stepped" in str(warning.message) for warning in caught)


def test_a_rank_that_skips_its_optimizer_alone_is_warned_of_once(world: Ranks) -> None:
    assert world.run(skipping, {1: [2, 4]}, ranks=2) == [0, 1]
    assert world.run(skipping, {0: [3]}, ranks=3) == [0, 1, 0]
    assert world.run(skipping, {0: [1, 3, 4], 1: [1, 3, 4]}, ranks=2) == [0, 0]
    assert world.run(skipping, {}, 0, ranks=2) == [0, 0]


def test_a_call_that_one_rank_refuses_does_not_count(world: Ranks) -> None:
    assert world.run(refused, ranks=2) == [0, 0]


def test_optimizers_of_one_rank_that_alternate_are_not_warned_of(world: Ranks) -> None:
    """Every rank steps both, as in a GAN within one model; one of them has no gradients on this rank."""
    assert world.run(alternating, ranks=2) == [0, 0]
