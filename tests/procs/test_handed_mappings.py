"""Models that pass a mapping from layer to layer, split between layers that write its entries and layers that read them, in one process."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.families import outcome_of

pytestmark = pytest.mark.in_process


class Layer(nn.Module):
    """Writes keys and values under `gives`, and reads those under `takes`."""

    def __init__(self, gives: str = "", takes: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gives, self.takes = gives, takes

    def forward(self, x: Tensor, shared: UserDict[str, tuple[Tensor, Tensor]]) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        if self.takes:
            keys, values = shared[self.takes]
            y = y + keys * values
        if self.gives:
            shared[self.gives] = (y.sin(), y.cos())
        return y


class Shares(nn.Module):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        shared: UserDict[str, tuple[Tensor, Tensor]] = UserDict()
        for layer in self.layers:
            x = layer(x, shared=shared)
        return x if "last" not in shared else x * shared["last"][0]


MODELS = {
    "one": lambda: Shares(Layer("a"), Layer(), Layer(), Layer(takes="a")),
    "two under one key": lambda: Shares(Layer("a"), Layer("a", takes="a"), Layer(takes="a"), Layer("b", takes="a"), Layer(takes="b")),
    "around the layers": lambda: Shares(Layer(), Layer("last"), Layer(), Layer()),
}


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_what_layers_leave_for_others_crosses_boundaries(name: str, num_stages: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    plain, x = copy.deepcopy(model), torch.randn(3, 4, dtype=torch.float64)
    expected = plain(x)
    expected.square().sum().backward()
    cut = zb.split(model, example=x)
    stages = [cut(stage, num_stages) for stage in range(num_stages)]
    given: Any = stages[0](x)
    for stage in stages[1:]:
        given = stage(**given)
    given.square().sum().backward()
    assert torch.equal(given, expected)
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-14, atol=0)


@pytest.mark.long
def test_layers_of_gemma_share_keys_and_values_over_stages() -> None:
    outcome = outcome_of("gemma3n_text")
    assert outcome.error is None
