"""Code of a forward that acts on gradients, such as hooks: it gets the gradients of one device, or the split is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.refusals import raises

WIDTH, MICROBATCHES = 4, 4
CALLS: list[int] = []


def limited(gradient: Tensor) -> Tensor:
    """Is not additive: half of a large gradient, and all of a small one."""
    CALLS.append(1)
    return gradient * 0.5 if gradient.norm() > 0.01 else gradient


def hooked(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(limited)
    return tensor


class Layer(nn.Linear):
    """A layer that has its own code on gradients: `act` gets its output."""

    def __init__(self, act: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.act = act

    def forward(self, x: Tensor, skipped: Tensor | None = None) -> Tensor:
        y = super().forward(x).tanh()
        if skipped is not None:
            y = y + hooked(skipped)
        return y if self.act is None else self.act(y)


class Around(nn.Module):
    """Four layers, with a hook around them at `place`."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hooked if place == "in the layer" and number == 0 else None) for number in range(4))
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 1:
                skipped = x
            if number == 1 and self.place in ("skip", "dropout"):
                skipped = x = hooked(x) if self.place == "skip" or self.training else x
            if number == 1 and self.place == "sum":
                skipped = x = hooked(x * 2)
            x = layer(x, skipped) if number == 3 and self.place == "of another layer" else layer(x)
            if number in (1, 3) and self.place in ("skip", "sum", "dropout", "in the layer"):
                x = x + skipped
            if self.place == "dropout":
                x = dropout(x, 0.1, self.training)
            if number == 1 and self.place == "between stages":
                hooked(x)
            if number == 2 and self.place == "within a stage":
                x = hooked(x * 2)
        return hooked(x) if self.place == "at the end" else x


REFUSED = {"skip": 2, "sum": 2, "dropout": 2, "of another layer": 1}
"""Places of hooks on a tensor of which two stages have a share of the gradient, with the number of gradients in the stages."""


@pytest.mark.parametrize("place", REFUSED)
def test_a_hook_that_would_get_shares_of_a_gradient_is_refused(place: str) -> None:
    with raises(zb.InputError, "register_hook", "test_code_on_gradients.py", 1, REFUSED[place]):
        zb.split(Around(place), example=torch.randn(2, WIDTH)).cut(2)


def one_device(model: nn.Module, x: Tensor) -> int:
    """Runs the microbatches one after another, and returns the number of gradients that hooks get."""
    CALLS.clear()
    for microbatch in x.chunk(MICROBATCHES):
        (mse_loss(model(microbatch), microbatch + 3) / MICROBATCHES).backward()
    return len(CALLS)


def difference(group: Any, schedule: str, make: Callable[[], nn.Module]) -> tuple[float, int, int]:
    """Returns the rank's largest difference of a gradient from one device, and the gradients that hooks get here and there."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, WIDTH, dtype=torch.float64)
    with zb.Pipeline(zb.split(model, example=x[:2] / 1000), schedule, MICROBATCHES, mse_loss, group=group) as pipe:
        CALLS.clear()
        pipe.step(x, x + 3)
        calls = len(CALLS)
        of_rank = [(name, parameter.grad) for module in pipe.modules.values() for name, parameter in module.named_parameters()]
    torch.manual_seed(0)
    whole = make()
    calls_of_one = one_device(whole, x)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    return max(0.0, *((gradient - expected[name]).abs().max().item() for name, gradient in of_rank)), calls, calls_of_one


RIGHT = ("between stages", "within a stage", "at the end", "in the layer")
"""Places of hooks on a tensor that one stage uses; the last is the remedy for a skip connection."""


def of_places(group: Any, schedule: str) -> dict[str, tuple[float, int, int]]:
    return {place: difference(group, schedule, partial(Around, place)) for place in RIGHT}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_hook_that_gets_the_whole_gradient_has_the_numbers_of_one_device(world: Ranks, schedule: str) -> None:
    first, second = world.run(of_places, schedule, ranks=2)
    for place in RIGHT:
        assert max(first[place][0], second[place][0]) < 1e-12, place
        assert first[place][1] + second[place][1] == first[place][2] == MICROBATCHES, place
