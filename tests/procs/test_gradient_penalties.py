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


class TwoHeads(nn.Module):
    """Two heads of one `shared` output, the second behind a layer of its own, whose inputs it returns, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.first, self.deep, self.second = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        around = self.shared(x).tanh()
        first, deep = self.first(around), self.deep(around)
        return first, self.second(deep), around, deep


def balanced(of: int) -> Callable[[tuple[Tensor, ...], Tensor], Tensor]:
    """A loss with the norms of the gradients of two losses with respect to output `of`, which both losses may depend on."""

    def loss(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        both = torch.stack([(output - targets).square().mean() for output in outputs[:2]])
        if not torch.is_grad_enabled():
            return both.sum()
        found = [torch.autograd.grad(each, outputs[of], create_graph=True, allow_unused=True)[0] for each in both]
        return both.sum() + sum(gradient.norm() for gradient in found if gradient is not None)

    return loss


def train_two_heads(group: Any, of: int, first_of_last_stage: str, split: str) -> float | str:
    """This rank's largest difference from one device, or the error."""
    torch.manual_seed(2)
    model, (x, t), loss_fn = TwoHeads(), (torch.randn(6, 8, dtype=torch.float64) for _ in "xt"), balanced(of)
    one = TwoHeads()
    one.load_state_dict(model.state_dict())
    parts = zb.split(model, example=x[:2], cuts=[first_of_last_stage])
    with zb.Pipeline(parts, "1f1b", 3, loss_fn, group=group, split=split) as pipe:
        try:
            loss = pipe.step(x, t)
        except zb.PipelineError as error:
            return str(error)
        total = sum(loss_fn(one(inputs), targets) / 3 for inputs, targets in zip(x.chunk(3), t.chunk(3), strict=True))
        total.backward()
        gradients = {name: parameter.grad for name, parameter in one.named_parameters()}
        differences = [
            (p.grad - gradients[name]).abs().max() for name, p in pipe.modules[group.rank()].named_parameters() if p.grad is not None
        ]
        return float(max(abs(loss - total.detach()), *differences))


@pytest.mark.parametrize(
    ("of", "first_of_last_stage", "split", "fault"),
    [
        (2, "deep", "deferred", "part 'first'"),  # the first head is in an earlier stage, and the code around computes its argument again
        (2, "first", "deferred", ""),
        (3, "deep", "deferred", ""),  # the first head is in an earlier stage, and does not depend on this output
        (2, "first", "graph", "traced"),
    ],
)
def test_a_gradient_has_all_paths_or_is_refused(world: Ranks, of: int, first_of_last_stage: str, split: str, fault: str) -> None:
    for found in world.run(train_two_heads, of, first_of_last_stage, split, ranks=2):
        if fault:
            assert fault in str(found)
        else:
            assert isinstance(found, float), found
            assert found < 1e-12
