"""A graph stage with ignored outputs: parameters that no gradient reaches have None, as on one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zerobubble.runtime.stage.stage import make_stage

pytestmark = pytest.mark.in_process


class Forked(nn.Module):
    """Two outputs are views of one product, one is unused by the others, and one depends on no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.halved, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        h = self.first(x)
        left, right = self.halved(h).chunk(2, -1)
        return left, self.last(torch.tanh(h)), self.norm(z), right.transpose(0, 1), x * z


def compare(given: str, *, compiled: bool) -> None:
    """Two microbatches, both with gradients for the outputs marked in `given`, against autograd on the whole."""
    torch.manual_seed(0)
    module = Forked().double()
    stage = make_stage("compiled" if compiled else "graph", module, 1)
    inputs = [tuple(torch.randn(2, 4, dtype=torch.double, requires_grad=True) for _ in range(2)) for _ in range(2)]
    mine = []
    for j, pair in enumerate(inputs):
        mine += stage.backward(j, cotangents(stage.forward(j, pair), given))
        stage.weight(j)
    mine += [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    theirs = []
    for leaves in [tuple(x.detach().requires_grad_() for x in pair) for pair in inputs]:
        outputs = module(*leaves)
        pairs = [(y, dy) for y, dy in zip(outputs, cotangents(outputs, given), strict=True) if dy is not None]
        torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
        theirs += [x.grad for x in leaves]
    theirs += [parameter.grad for parameter in module.parameters()]
    assert [gradient is None for gradient in mine] == [gradient is None for gradient in theirs]
    for a, b in zip(mine, theirs, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-12 if compiled else 0, atol=1e-14 if compiled else 0)


def cotangents(outputs: tuple[Tensor, ...], given: str) -> tuple[Tensor | None, ...]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs]
    return tuple(dy if mark == "x" else None for dy, mark in zip(drawn, given, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("given", ["xxxxx", "x.xx.", ".x...", "..x..", "x....", "...x.", "....x"])
def test_parameters_that_no_gradient_reaches_have_none(given: str) -> None:
    compare(given, compiled=False)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_parameters_that_no_gradient_reaches_have_none_when_compiled() -> None:
    compare("...x.", compiled=True)


def test_an_output_that_the_loss_ignores_trains_nothing() -> None:
    module = Forked()
    stage = make_stage("graph", module, 1)
    stage.forward(0, (torch.randn(2, 4, requires_grad=True),) * 2, finish=lambda outputs: outputs[1].sum())
    stage.backward(0, (torch.tensor(1.0),))
    stage.weight(0)
    assert {name for name, parameter in module.named_parameters() if parameter.grad is None} == {
        "halved.weight",
        "halved.bias",
        "norm.weight",
        "norm.bias",
    }


def test_the_next_microbatch_may_have_what_this_one_lacks() -> None:
    module = Forked()
    stage = make_stage("graph", module, 1)
    x = torch.randn(2, 4, requires_grad=True)
    for j, given in enumerate((".x...", "xxxxx", ".x...")):
        outputs = stage.forward(j, (x, x))
        stage.backward(j, tuple(torch.ones_like(y) if mark == "x" else None for y, mark in zip(outputs, given, strict=True)))
        stage.weight(j)
    assert torch.equal(module.last.bias.grad, torch.full((4,), 6.0))
    assert torch.equal(module.norm.bias.grad, torch.full((4,), 2.0))
