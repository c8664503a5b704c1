"""Attributes that a checkpointed forward reads and changes, again in the backward: equal to one device, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.refusals import raises
from zerobubble.runtime.stage.stage import make_stage

pytestmark = pytest.mark.in_process


class Scaling(nn.Module):
    """A layer with attributes, whose forward runs `way` under a checkpoint."""

    num_calls = 0
    own = property(lambda m: vars(m)["own"], lambda m, value: vars(m).update(own=value))

    def __init__(self, way: Callable[[Any, Tensor], Tensor], reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.scale = 2.0
        self.mean = torch.zeros((), dtype=torch.float64)
        self.seen = self.own = 0
        self.shown: Tensor | None = None
        self.way = way
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda z: self.way(self, self.linear(z)), x, use_reentrant=self.reentrant)
        return y + self.outside(y)

    def outside(self, y: Tensor) -> Tensor | float:
        return y * self.scale if self.way is read_outside else 0.0


def a_number(m: Any, x: Tensor) -> Tensor:
    m.scale *= 0.9
    return (x * m.scale).sin()


def a_number_by_a_variable(m: Any, x: Tensor) -> Tensor:
    scale = m.scale * 0.9
    m.scale = scale
    return (x * scale).sin()


def read_outside(m: Any, x: Tensor) -> Tensor:
    m.scale *= 0.9
    return x.sin()


def a_tensor(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean()
    return x.sin() - m.mean


def a_tensor_in_place(m: Any, x: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(0.1 * x.detach().mean())
    return x.sin() - m.mean.clone()


def of_the_class(m: Any, x: Tensor) -> Tensor:
    m.num_calls += 1
    return (x / m.num_calls).sin()


def counting(m: Any, x: Tensor) -> Tensor:
    m.seen += len(x)
    m.num_calls += 1
    m.own += 1
    m.mean += x.detach().mean()
    return x.sin()


def showing(m: Any, x: Tensor) -> Tensor:
    m.shown = x.sin()
    m.scale = x.mean().item()
    return m.shown * m.scale


WAYS = {
    a_number: "scale",
    a_number_by_a_variable: "scale",
    read_outside: "scale",
    a_tensor: "mean",
    a_tensor_in_place: "mean",
    of_the_class: "num_calls",
    counting: None,
    showing: None,
}
"""What a checkpointed forward does with attributes, and the one that makes results depend on the order of passes."""


def run(module: nn.Module, order: str, batches: list[Tensor]) -> list[Tensor]:
    """Runs the forwards (F) and backwards (B) of microbatches in an `order`, such as F0 F1 B0 B1; returns outputs and gradients."""
    stage = make_stage("deferred", module, 1)
    outputs = {}
    with stage.stepping():
        for kind, digit in order.split():
            number = int(digit)
            if kind == "F":
                (outputs[number],) = stage.forward(number, (batches[number],))
            else:
                stage.backward(number, (torch.ones_like(outputs[number]),))
                stage.weight(number)
    return [*outputs.values(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_attribute_that_a_backward_changes_too_late_is_refused(way: Any, reentrant: bool) -> None:
    batches = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    expected = run(Scaling(way, reentrant), "F0 B0 F1 B1 F2 B2", batches)
    for order in ("F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2"):
        module = Scaling(way, reentrant)
        if WAYS[way] is None:
            for value, one_device in zip(run(module, order, batches), expected, strict=True):
                torch.testing.assert_close(value, one_device, rtol=0, atol=1e-12)
        else:
            with raises(zb.InputError, index=1, name=WAYS[way], module="the stage"):
                run(module, order, batches)
        assert "scale" not in vars(Scaling)
        assert Scaling.num_calls == 0


def test_microbatches_one_after_another_change_attributes_in_order() -> None:
    batches = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    module = Scaling(a_number)
    run(module, "F0 B0 F1 B1", batches)
    assert module.scale == pytest.approx(2 * 0.9**4)
