"""Gradients within a forward, as of a gradient penalty: those of one device within a stage, and refused beyond it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks


def penalized(outputs: Tensor, targets: Tensor) -> Tensor:
    """A gradient penalty on what the last stage returns."""
    scores = outputs.tanh()
    (gradient,) = torch.autograd.grad(scores.sum(), outputs, create_graph=True)
    return loss_fn(scores, targets) + gradient.square().mean()


class Penalized(nn.Module):
    """A gradient penalty on the input of a stage."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + gradient.square().mean(-1, keepdim=True)


class OfOutside(nn.Module):
    """Asks for the gradient with respect to a tensor that it does not compute with."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        (gradient,) = torch.autograd.grad(y.sum(), torch.ones(2).requires_grad_(), create_graph=True)
        return y + gradient.sum()


def of_the_input(outputs: Tensor, targets: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(outputs.sum(), torch.ones(2).requires_grad_(), create_graph=True)
    return loss_fn(outputs, targets) + gradient.square().mean()


def stage_with(kind: Callable[[nn.Module], nn.Module]) -> Callable[[int, int], nn.Module]:
    """A build whose last stage is wrapped."""
    return lambda stage, num_stages: kind(build(stage, num_stages)) if stage == num_stages - 1 else build(stage, num_stages)


def train_with_penalty(group: Any) -> float:
    """The largest difference of this rank's loss and gradients from one device."""
    make, (x, t) = stage_with(Penalized), batch(4)
    modules, mine = [make(stage, 2) for stage in range(2)], make(group.rank(), 2)
    with zb.Pipeline([mine], "zb-h1", 4, penalized, group=group) as pipe:
        loss = pipe.step(x, t).item()
    total = 0.0
    for inputs, targets in zip(x.chunk(4), t.chunk(4), strict=True):
        share = penalized(nn.Sequential(*modules)(inputs), targets) / 4
        share.backward()
        total += share.item()
    gradients = [(p.grad, q.grad) for p, q in zip(mine.parameters(), modules[group.rank()].parameters(), strict=True)]
    return max(abs(loss - total), *(float((p - q).abs().max()) for p, q in gradients if p is not None and q is not None))


def refused_penalty(group: Any, in_loss: bool) -> str:
    make, loss = (build, of_the_input) if in_loss else (stage_with(OfOutside), loss_fn)
    with zb.Pipeline(make, "zb-h1", 4, loss, group=group) as pipe, pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(4))
    return str(caught.value)


def test_penalties_on_gradients_within_a_stage_are_those_of_one_device(world: Ranks) -> None:
    for difference in world.run(train_with_penalty, ranks=2):
        assert difference < 1e-12


@pytest.mark.parametrize("in_loss", [False, True])
def test_a_gradient_beyond_the_stage_is_refused(world: Ranks, in_loss: bool) -> None:
    first, second = world.run(refused_penalty, in_loss, ranks=2)
    assert first == second
    assert ("loss_fn" if in_loss else "stage 1") in first
    assert "torch.autograd.grad" in first
