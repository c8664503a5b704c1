"""`zb.split` of models not written for pipelining: losses, gradients and names match one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.families import next_token_loss, text, tiny_model
from tests.procs.ranks import Ranks

TOLERANCE, SMALL = 1e-12, 1e-4
ROUNDING = {torch.float64: TOLERANCE, torch.float32: 1e-6}
"""Some models give their numbers in float32, whatever type they are of."""
MICROBATCHES = 4


def relative(ours: Tensor, other: Tensor) -> float:
    """The bias of keys has no gradient but rounding, and stays where it began, at 0: it is held to an absolute error."""
    return ((ours - other).norm() / other.norm().clamp_min(SMALL)).item()


def differences(
    group: Any,
    model: nn.Module,
    schedule: Any,
    inputs: Mapping[str, Any],
    targets: Tensor,
    loss_fn: Callable[..., Tensor],
    split: Callable[..., Any] = zb.split,
    **options: Any,
) -> dict[str, float]:
    """Two AdamW steps, compared with one device: the relative errors of the losses and of each parameter of this rank, by name."""
    plain = copy.deepcopy(model)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-4)
    worst: dict[str, float] = {}
    with zb.Pipeline(split(model, **options), schedule, MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01, eps=1e-4)
        for step in range(2):
            loss = pipe.step(dict(inputs), targets)
            error = relative(loss, one_device(plain, inputs, targets, loss_fn))
            if loss.dtype == torch.float64:
                worst[f"loss {step}"] = error
            assert error <= ROUNDING[loss.dtype]
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
        names = dict(plain.named_parameters(remove_duplicate=False))
        held = {name for module in pipe.modules.values() for name, _ in module.named_parameters(remove_duplicate=False)}
        for module in pipe.modules.values():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                worst[name] = relative(parameter.detach(), names[name].detach())
    assert held
    return worst


def one_device(model: nn.Module, inputs: Mapping[str, Any], targets: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for j in range(MICROBATCHES):
        part: dict[str, Any] = {"use_cache": False} if hasattr(model, "config") else {}
        part |= {name: value.tensor_split(MICROBATCHES)[j] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        loss = loss_fn(model(**part), targets.tensor_split(MICROBATCHES)[j]) / MICROBATCHES
        loss.backward()
        total += loss.detach()
    return total


def judge(message: list[dict[str, float]], model: nn.Module) -> None:
    """Every parameter of the model is held by some rank, and nothing differs from one device."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    held = {name for of_rank in message for name in of_rank if not name.startswith("loss ")}
    assert held == names
    wrong = {name: error for of_rank in message for name, error in of_rank.items() if not error <= TOLERANCE}
    assert not wrong


def language_models(group: Any) -> list[dict[str, float]]:
    inputs, ids = text()
    cases = [(family, schedule) for family in ("gpt2", "llama") for schedule in ("1f1b", "zb-v")]
    return [differences(group, tiny_model(family), schedule, inputs, ids, next_token_loss) for family, schedule in cases]


@pytest.mark.long
def test_language_models_train_with_the_numbers_of_one_device(world: Ranks) -> None:
    """GPT-2, whose embedding and head are one parameter, and Llama, with a 2-D mask, two stages and four."""
    results = world.run(language_models, ranks=2)
    for case, family in enumerate(("gpt2", "gpt2", "llama", "llama")):
        judge([of_rank[case] for of_rank in results], tiny_model(family))


class Branches(nn.Module):
    """Layers one after the other, skips that reach over several, a parameter of the model itself, and changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.act = nn.ReLU(inplace=True)
        self.up = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = self.act(layer(x))
            kept.append(x * self.scale)
        for layer in self.up:
            x = layer(x + kept.pop()).tanh()
        return x


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def own_model(kind: str) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    model: nn.Module = Branches() if kind == "branches" else nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    return model.double(), {"x" if kind == "branches" else "input": torch.randn(8, 6).double()}, torch.randn(8, 6).double()


def own_models(group: Any, kind: str, schedule: str) -> dict[str, float]:
    model, inputs, targets = own_model(kind)
    return differences(group, model, schedule, inputs, targets, plain_loss, example=inputs)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("kind", ["branches", "sequential"])
def test_own_models_train_with_the_numbers_of_one_device(world: Ranks, kind: str, schedule: str) -> None:
    judge(world.run(own_models, kind, schedule, ranks=2), own_model(kind)[0])
