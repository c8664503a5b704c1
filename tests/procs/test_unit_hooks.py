"""Forward hooks on parts, while the forms of the parts' outputs are found with made-up values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from zerobubble.models.observation.observed_model import ObservedModel
from zerobubble.models.observation.units import find_units

pytestmark = pytest.mark.in_process

WIDTH, LOG = 4, [0.0]
CALLED = mock.Mock()
"""Counts calls of hooks. No part of the Python state that is put back."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def logs(value: Tensor) -> None:
    CALLED()
    LOG.append(float(value.detach().square().mean()))


class LogsInto:
    def __init__(self, log: list[float]) -> None:
        self.log = log

    def __call__(self, _: nn.Module, __: Any, output: Tensor) -> None:
        logs(output)
        self.log.append(float(output.sum()))


def with_kwargs(log: Callable[[Tensor], None], _: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any], output: Tensor) -> None:
    assert not kwargs
    log(args[0] + output)


def doubles(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    logs(output)
    return torch.cat([output, output], -1)[..., :WIDTH]


LOOKING: dict[str, Callable[[nn.Module], Any]] = {
    "on a part": lambda layer: layer.register_forward_hook(lambda _, __, output: logs(output)),
    "inside of a part": lambda layer: layer[0].register_forward_hook(LogsInto([])),
    "before the forward": lambda layer: layer.register_forward_pre_hook(lambda _, args: logs(args[0])),
    "with kwargs": lambda layer: layer.register_forward_hook(functools.partial(with_kwargs, logs), with_kwargs=True),
    "always": lambda layer: layer[1].register_forward_hook(lambda _, __, output: logs(output), always_call=True),
}


@pytest.mark.parametrize("register", LOOKING.values(), ids=LOOKING)
def test_a_hook_that_looks_does_not_run_with_made_up_values_again(register: Callable[[nn.Module], Any]) -> None:
    model = Layers()
    register(model.layers[1])
    observed = ObservedModel(model, find_units(model))
    observed.flow((torch.ones(2, WIDTH),), {}, training=True)
    CALLED.reset_mock()
    unit = next(iter(observed.shape_only_by_name["layers.1"].unit.modules()))
    for length in (5, 7):
        seen = observed.shape_only_by_name["layers.1"].seen((torch.ones(2, length, WIDTH),), {}, training=length == 5)
        assert [leaf.shape for leaf in seen.form.tensors] == [(2, length, WIDTH)]
    assert not any(vars(module)["_forward_hooks"] | vars(module)["_forward_pre_hooks"] for module in unit.modules())
    assert CALLED.call_count == 0
    assert LOG == [0.0]


def test_what_a_hook_on_outputs_changes_with_made_up_values_is_put_back() -> None:
    model = Layers()
    model.layers[1].register_forward_hook(doubles)
    model.layers[2].register_forward_hook(lambda _, __, output: logs(output.mul_(2)))
    observed = ObservedModel(model, find_units(model))
    observed.flow((torch.ones(2, WIDTH),), {}, training=True)
    CALLED.reset_mock()
    for name in ("layers.1", "layers.2"):
        observed.shape_only_by_name[name].seen((torch.ones(2, 5, WIDTH),), {}, training=True)
    assert CALLED.call_count > 0
    assert LOG == [0.0]


def test_a_log_of_a_part_has_the_calls_of_its_own_stage() -> None:
    """The second stage finds the form of the first part's output at each new size, since its code reads that output's width."""

    class Skips(Layers):
        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            y: Tensor = self.layers[2](self.layers[1](first)[:, : first.size(1)])
            return self.layers[3](y)

    model = Skips()
    model.layers[0].register_forward_hook(lambda _, __, output: logs(output))
    split = zb.split(model, example=torch.ones(2, 3, WIDTH), cuts=["layers.2"])
    first, second = split(0, 2), split(1, 2)
    for size in (3, 5, 7):
        second(**first(torch.randn(2, size, WIDTH)))
    logged, LOG[1:] = LOG[1:], []
    assert len(logged) == 3
    assert all(logged)
