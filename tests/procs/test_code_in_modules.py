"""The remedy for code that a graph of operations would lose: in modules of a ModuleList, it trains with the numbers of one device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.refusals import raises

WIDTH, MICROBATCHES = 4, 4


def limited(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def limited_all(gradients: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
    return tuple(gradient if gradient is None else limited(gradient) for gradient in gradients)


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity within a limit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return limited(gradient)


def hooked(owner: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(limited)
    return x


def hooked_node(owner: Any, x: Tensor) -> Tensor:
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(limited_all)
        x.grad_fn.register_hook(limited_all)
    return x


def hooked_module(owner: Any, x: Tensor) -> Tensor:
    handle = owner.tanh.register_full_backward_hook(lambda _, inputs, __: limited_all(inputs))
    y = owner.tanh(x)
    handle.remove()
    return y  # type: ignore[no-any-return]


def rounded_for_backward(owner: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.float(), lambda saved: saved.double()):
        return x * x


def counted(owner: Any, x: Tensor) -> Tensor:
    owner.count += 1
    owner.kept.append(x.detach().mean())
    return x * owner.count


def seeded(owner: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return x + torch.rand(WIDTH, dtype=torch.float64)


ACTS: list[Callable[[Any, Tensor], Tensor]] = [
    hooked,
    lambda _, x: Straight.apply(x),  # type: ignore[no-untyped-call, no-any-return]
    hooked_node,
    counted,
    hooked_module,
    lambda _, x: x + random.random(),
    rounded_for_backward,
    seeded,
    lambda _, x: checkpoint(lambda y: hooked(_, y.sin()), x, use_reentrant=False),  # type: ignore[no-any-return]
    lambda _, x: torch.func.vmap(lambda row: row + row.sum().tanh())(x),
]
"""Code that a graph would lose, which gets the module that owns it and a hidden tensor."""


class Owner(nn.Module):
    """What the code uses of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh = nn.Tanh()
        self.count = 0
        self.kept: list[Tensor] = []


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2) for _ in ACTS]


class Operations(Owner):
    """All operations in one forward; the last product shares its weight with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights())

    def forward(self, x: Tensor) -> Tensor:
        for weight, act in zip(self.weights, ACTS, strict=True):
            x = act(self, (x @ weight).sin())
        return x @ self.weights[0]


class Product(Owner):
    """One product with its code."""

    def __init__(self, weight: nn.Parameter, act: Callable[[Any, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.weight = weight
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.act is None else self.act(self, y.sin())


class Modules(nn.Module):
    """The same in modules of a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        parts = [Product(weight, act) for weight, act in zip(weights(), ACTS, strict=True)]
        self.parts = nn.ModuleList([*parts, Product(parts[0].weight, None)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


X = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).reshape(8, WIDTH)
STEPS = 2


def on_one_device() -> list[Tensor | None]:
    """Returns the gradients of the operations, for microbatches one after another."""
    model = Operations()
    random.seed(0)
    for _ in range(STEPS):
        for x in X.chunk(MICROBATCHES):
            (mse_loss(model(x), x + 3) / MICROBATCHES).backward()
    return [weight.grad for weight in model.weights]


def differences(group: Any, schedule: str) -> dict[str, float]:
    """Returns by weight of the rank the largest difference of its gradient from one device."""
    model = Modules()
    with zb.Pipeline(zb.split(model, example=X[:2]), schedule, MICROBATCHES, mse_loss, group=group) as pipe:
        random.seed(0)
        for _ in range(STEPS):
            pipe.step(X, X + 3)
        ours = {name: parameter.grad for module in pipe.modules.values() for name, parameter in module.named_parameters()}
    expected = on_one_device()
    return {name: (gradient - expected[int(name.split(".")[1]) % len(ACTS)]).abs().max().item() for name, gradient in ours.items()}


def test_the_operations_are_refused_with_the_remedy() -> None:
    with raises(zb.InputError, "ModuleList"):
        zb.split(Operations(), example=X[:2]).cut(2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_modules_of_a_list_have_the_numbers_of_the_operations(world: Ranks, schedule: str) -> None:
    assert all(gradient is not None and gradient.abs().max() > 1e-6 for gradient in on_one_device())
    for of_rank in world.run(differences, schedule, ranks=2):
        assert len(of_rank) > len(ACTS) / 3
        assert of_rank == pytest.approx(dict.fromkeys(of_rank, 0.0), abs=1e-9)
