"""Traced stages with tensors that are neither parameters nor buffers, and with tensors and modules under several names.

A tensor that a module holds in an attribute is an input of its trace.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.refusals import Stated, raises
from zerobubble.runtime.stage.stage import Stage, make_stage

pytestmark = pytest.mark.in_process

WIDTH = 4


class Way(nn.Module):
    """Two Linears, attributes set by `prepare`, and a custom forward."""

    def __init__(self, prepare: Callable[[Any], None], way: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()
        prepare(self)
        self.way = way

    def forward(self, x: Tensor) -> Any:
        return self.way(self, self.linear(x))


@dataclass
class Scales:
    own: Tensor = field(default_factory=lambda: torch.full((WIDTH,), 2.0, dtype=torch.float64))


def put(name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, make())


def scale(number: float = 2.0) -> Tensor:
    """Numbers for each column."""
    return torch.full((WIDTH,), number, dtype=torch.float64)


def alias_of_a_weight(module: Any) -> None:
    """A weight in a list, which registers nothing."""
    module.weights = [module.other.weight]


def alias_of_a_module(module: Any) -> None:
    module.again = module.other
    module.in_a_list = [module.other]


def alias_of_a_buffer(module: Any) -> None:
    module.register_buffer("rates", scale())
    module.first_rates = module.rates


def weight_without_gradient(module: Any) -> None:
    """A view of a parameter, which follows it."""
    module.seen = module.other.weight.detach()


def leaf(module: Any) -> None:
    module.scale = scale().requires_grad_()


def two_views(module: Any) -> None:
    module.first = scale()
    module.second = module.first[:]


def two_scales(module: Any) -> None:
    module.first, module.second = scale(), scale(3.0)


def with_aliases(module: Any, y: Tensor) -> Any:
    return module.again(module.other(y).tanh()) + module.in_a_list[0](y)


def with_average(module: Any, y: Tensor) -> Any:
    """An average that is no buffer, changed in place by each microbatch."""
    module.scale.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y * module.scale


def by_its_numbers(module: Any, y: Tensor) -> Any:
    return y.tanh() if module.scale.sum() > 10 else y.exp()


WAYS: dict[str, tuple[Callable[[Any], None], Callable[[Any, Tensor], Any]]] = {
    "an attribute": (put("scale", scale), lambda m, y: y * m.scale),
    "in a dict": (put("scales", lambda: {"a": scale()}), lambda m, y: y * m.scales["a"]),
    "in a list": (put("scales", lambda: [scale(), scale(3.0)]), lambda m, y: y * m.scales[1]),
    "in an object": (put("scales", Scales), lambda m, y: y * m.scales.own),
    "a weight in a list": (alias_of_a_weight, lambda m, y: m.other(y) @ m.weights[0]),
    "a module under three names": (alias_of_a_module, with_aliases),
    "a buffer under two names": (alias_of_a_buffer, lambda m, y: y * m.first_rates + m.rates),
    "a view of a weight": (weight_without_gradient, lambda m, y: m.other(y) @ m.seen),
    "changed in place": (put("scale", scale), with_average),
    "asked for its numbers": (put("scale", scale), by_its_numbers),
    "two views of one memory": (two_views, lambda m, y: y * m.first + m.second),
    "a leaf with a gradient": (leaf, lambda m, y: y * m.scale),
}


def made(name: str) -> tuple[Stage, Any]:
    """A stage and its oracle, made twice: a copy of a view is no view of the copy."""
    torch.manual_seed(0)
    module = Way(*WAYS[name])
    torch.manual_seed(0)
    return make_stage("graph", module, 0), Way(*WAYS[name])


def compare(stage: Stage, oracle: nn.Module, num_microbatches: int = 2) -> None:
    """A step leaves the bits of autograd in gradients and in what the modules hold."""
    stage.begin(None)
    for each in (stage.module, oracle):
        each.zero_grad()
    inputs = [torch.randn(3, WIDTH, dtype=torch.float64) for _ in range(num_microbatches)]
    for number, x in enumerate(inputs):
        (y,) = stage.forward(number, (x,))
        expected = oracle(x)
        assert torch.equal(y, expected)
        stage.backward(number, (torch.ones_like(y),))
        stage.weight(number)
        expected.backward(torch.ones_like(y))
    for (name, p), q in zip(stage.module.named_parameters(), oracle.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("name", WAYS)
def test_the_numbers_are_those_of_one_device_after_an_optimizer_step_too(name: str) -> None:
    stage, oracle = made(name)
    for _ in range(3):
        compare(stage, oracle)
        with torch.no_grad():
            for p in (*stage.module.parameters(), *oracle.parameters()):
                if p.grad is not None:
                    p -= 0.1 * p.grad
    mine: Any = stage.module
    if hasattr(mine, "scale"):
        assert torch.equal(mine.scale, oracle.scale)
        assert (mine.scale.grad is None) == (oracle.scale.grad is None)
        assert mine.scale.grad is None or torch.equal(mine.scale.grad, oracle.scale.grad)
    assert len(stage.splitter.traces) == 1


def test_an_attribute_that_is_replaced_is_read_anew_without_a_trace() -> None:
    stage, oracle = made("an attribute")
    for number in (2.0, 3.0, -1.0):
        for module in (stage.module, oracle):
            module.scale = scale(number)
        compare(stage, oracle)
    assert len(stage.splitter.traces) == 1
    for module in (stage.module, oracle):
        module.scale = scale()[:1]
    compare(stage, oracle)
    assert len(stage.splitter.traces) == 2


def changing(module: Any, y: Tensor) -> Any:
    module.first.add_(1)
    return y * module.second


def test_attributes_that_come_to_share_memory_are_not_taken_for_others() -> None:
    module: Any = Way(two_scales, changing)
    oracle, stage = deepcopy(module), make_stage("graph", module, 0)
    compare(stage, oracle)
    module.second = module.first[:]
    stage.begin(None)
    with raises(zb.InputError, "tensor", "place", "memory"):
        stage.forward(0, (torch.ones(3, WIDTH, dtype=torch.float64),))


def replacing(module: Any, y: Tensor) -> Any:
    module.scale = module.scale * 2
    return y * module.scale


def replacing_in_a_list(module: Any, y: Tensor) -> Any:
    module.scales[0] = module.scales[0] * 2
    return y * module.scales[0]


def deriving(module: Any) -> None:
    module.derived = torch.ones(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) * 2


OUT_OF_REACH = "reads a tensor that is neither an input nor a parameter or buffer"


@pytest.mark.parametrize(
    ("prepare", "way", "stated"),
    [
        (put("scale", scale), replacing, ("tensor", "forward")),
        (put("scales", lambda: [scale()]), replacing_in_a_list, ("scales.0", "tensor")),
        (
            put("scales", lambda: (scale(),)),
            lambda m, y: y * m.scales[0],
            ("tensor", "parameter"),
        ),
        (deriving, lambda m, y: y @ m.derived, ("tensor", "parameter")),
    ],
)
def test_unsupported_attributes_are_refused(prepare: Callable[[Any], None], way: Callable[[Any, Tensor], Any], stated: Stated) -> None:
    module = Way(prepare, way)
    before = dict(vars(module))
    with raises(zb.InputError, *stated):
        make_stage("graph", module, 0).forward(0, (torch.ones(3, WIDTH, dtype=torch.float64),))
    assert all(vars(module)[name] is value for name, value in before.items())
