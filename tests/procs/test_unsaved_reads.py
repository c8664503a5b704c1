"""What a backward pass reads besides the tensors that autograd saves: forwards of later microbatches that overwrite it are refused.

All else that a forward may keep or change gives the gradients of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.refusals import Stated, raises
from zerobubble.runtime.stage.stage import make_stage

pytestmark = pytest.mark.in_process

WIDTH = 6
NUM_MICROBATCHES = 3


class Square(torch.autograd.Function):
    """Keeps its input in a workspace, and that in `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, workspace: Tensor, through_data: bool) -> Tensor:
        (workspace.data if through_data else workspace).copy_(x)
        ctx.kept = {"x": workspace}
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * gradients[0] * ctx.kept["x"], None, None


class Summing(torch.autograd.Function):
    """Adds up gradients in a tensor that `ctx` keeps, as fused sums of weight gradients do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        ctx.total = total
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.total += gradients[0].sum()
        return gradients[0] * ctx.saved_tensors[0].cos(), None


class Way(nn.Module):
    """A Linear, a workspace, a codebook and a forward of one's own."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.codebook = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("average", torch.ones(WIDTH, dtype=torch.float64))
        self.workspace, self.total = torch.zeros(2, WIDTH, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self, x).tanh())


def scaling_the_weight(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data.mul_(1.01)
    y: Tensor = m.linear(x)
    return y


def limiting_the_weight(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data.clamp_(-0.1, 0.1)
    y: Tensor = m.linear(x)
    return y


def moving_the_codebook(m: Any, x: Tensor) -> Tensor:
    m.codebook.data.mul_(0.9)
    y: Tensor = m.linear(x) + m.codebook.detach()
    return y


def moving_the_codebook_visibly(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.codebook.mul_(0.9)
    y: Tensor = m.linear(x) + m.codebook.detach()
    return y


def moving_an_average(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x) + m.average
    m.average.mul_(0.9)
    return y


WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Stated | None, Stated | None]] = {
    "a workspace": (lambda m, x: Square.apply(m.linear(x), m.workspace, False), ("ctx.kept", "Square"), None),
    "a workspace through .data": (lambda m, x: Square.apply(m.linear(x), m.workspace, True), ("ctx.kept", "Square"), None),
    "a weight": (scaling_the_weight, ("linear.weight",), ("linear.weight",)),
    "a weight, to what it is": (limiting_the_weight, None, None),
    "a codebook": (moving_the_codebook, None, ("codebook",)),
    "a codebook under no_grad": (moving_the_codebook_visibly, None, ("codebook",)),
    "a buffer": (moving_an_average, None, None),
    "a sum of gradients": (lambda m, x: Summing.apply(m.linear(x), m.total), None, None),
}
"""What a forward overwrites, what the refusal without R states, and the refusal with R; None where the gradients are right."""


def train(module: nn.Module, recomputes: bool) -> None:
    """Two steps with all forwards first."""
    stage = make_stage("deferred", module, 1)
    for seed in range(2):
        stage.begin(None)
        outputs = []
        for microbatch, x in enumerate(inputs(seed)):
            outputs += (stage.checkpointed_forward if recomputes else stage.forward)(microbatch, (x,))
        for microbatch, y in enumerate(outputs):
            if recomputes:
                stage.recompute(microbatch)
            stage.backward(microbatch, (torch.ones_like(y),))
            stage.weight(microbatch)


def inputs(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(NUM_MICROBATCHES)]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_what_later_forwards_overwrite_is_refused_where_it_is_read(name: str, recomputes: bool) -> None:
    way, *refusals = WAYS[name]
    module = Way(way)
    oracle, stated = deepcopy(module), refusals[recomputes]
    if stated is not None:
        with raises(zb.InputError, "stage 1", *stated):
            train(module, recomputes)
        return
    train(module, recomputes)
    for seed in range(2):
        for x in inputs(seed):
            oracle(x).sum().backward()
    for (path, p), q in zip(module.named_parameters(), oracle.parameters(), strict=True):
        assert torch.equal(p, q), path
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recomputes", [False, True])
def test_ever_fewer_steps_with_several_microbatches_in_flight_are_compared(recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = []
    monkeypatch.setattr("zerobubble.runtime.stage.unsaved_reads._sample_of", sampled.append)
    stage = make_stage("deferred", Way(moving_an_average), 1)

    def step(order: str) -> int:
        """The number of samples in a step."""
        stage.begin(None)
        before = len(sampled)
        outputs = {}
        for kind, microbatch in zip(order[::2], map(int, order[1::2]), strict=True):
            if kind == "F":
                forward = stage.checkpointed_forward if recomputes else stage.forward
                (outputs[microbatch],) = forward(microbatch, (inputs(0)[microbatch],))
            else:
                stage.recompute(microbatch) if recomputes else None
                stage.backward(microbatch, (torch.ones_like(outputs[microbatch]),))
                stage.weight(microbatch)
        return len(sampled) - before

    is_compared = [step(order) > 0 for order in ("F0B0F1B1", *["F0F1B0B1"] * 8)]
    powers_of_two = [True, True, False, True, False, False, False, True]
    assert is_compared == ([*powers_of_two, False] if recomputes else [False, *powers_of_two])


def test_a_parameter_that_R_changes_from_a_later_step_on_is_found() -> None:
    def way(m: Any, x: Tensor) -> Tensor:
        return moving_the_codebook(m, x) if number > 2 else m.linear(x) + m.codebook

    number, stage = 0, make_stage("deferred", Way(way), 1)
    with raises(zb.InputError, "stage 1", "codebook"):
        for number in range(5):
            stage.begin(None)
            (y,) = stage.checkpointed_forward(0, (inputs(number)[0],))
            stage.recompute(0)
            stage.backward(0, (torch.ones_like(y),))
            stage.weight(0)
    assert number == 3
