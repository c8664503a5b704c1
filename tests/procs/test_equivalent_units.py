"""Equivalent units: observed once if they are identical, and one by one if anything could differ.

Parts that differ in anything that a run reads are run separately.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from zerobubble.cost_model.machine import COUNTING
from zerobubble.models.observation.equivalent_units import ResultCache, equivalents_of
from zerobubble.models.observation.observed_model import ObservedModel
from zerobubble.models.observation.shape_only import _AttentionOfZeros, shape_only_units
from zerobubble.models.observation.units import find_units

pytestmark = pytest.mark.in_process

WIDTH = 6


class Block(nn.Module):
    """Keeps the first numbers of each row, as many as `number` says."""

    ran = mock.Mock()
    """Counts runs: observations restore counters that are plain objects."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.number = number

    def kept(self) -> int:
        return self.number

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.ran()
        y = self.lin(x)
        return x + y, y[..., : self.kept()]


class Asked(Block):
    def kept(self) -> int:
        return 1 if getattr(self, "number", 1) == 1 else 3


class OfDict(Block):
    def kept(self) -> int:
        return int(self.__dict__["number"])


class OfDictOr(Block):
    def kept(self) -> int:
        return int(vars(self).get("number", 4))


class AllOfDict(Block):
    def kept(self) -> int:
        return sum(value for name, value in vars(self).items() if name == "number")


class Counted(Block):
    def kept(self) -> int:
        self.number += 1
        return self.number


class Set(Block):
    def kept(self) -> int:
        before, self.number = vars(self)["number"], 1
        return int(before)


class SetToNone(Block):
    def kept(self) -> int:
        before, self.number = self.number, None  # type: ignore[assignment]
        is_gone, self.number = self.number is None, before
        return before if is_gone else 5


class ByClass(Block):
    number = 2

    def __init__(self, number: int) -> None:
        super().__init__(number)
        if number == 2:
            del self.__dict__["number"]
            self.__dict__["other"] = 0
        else:
            self.other = 0
            self.__dict__["number"] = number


class Answering(Block):
    def __getattr__(self, name: str) -> Any:
        return 4 if name == "number" else super().__getattr__(name)

    def kept(self) -> int:
        return self.number


class Property(Block):
    def __init__(self, number: int) -> None:
        super().__init__(0)
        self.hidden = [{"number": number}]

    @property
    def width(self) -> int:
        return self.hidden[0]["number"]

    def kept(self) -> int:
        return self.width


class Deep(Block):
    def __init__(self, number: int) -> None:
        super().__init__(0)
        self.lin.number = number  # type: ignore[assignment]

    def kept(self) -> int:
        return int(self.lin.number)  # type: ignore[arg-type]


class Method(Block):
    def __init__(self, number: int) -> None:
        super().__init__(0)
        self.call = functools.partial(int, number) if number % 2 else self.three

    def three(self) -> int:
        return 3

    def kept(self) -> int:
        return self.call()


class Like(Block):
    """Of layers 1, 2, 1, 2, ...: their number decides, and two of a number are alike."""

    def __init__(self, number: int) -> None:
        super().__init__(number % 2 + 1)
        self.layer_idx = number


class Buffer(Block):
    def __init__(self, number: int) -> None:
        super().__init__(0)
        self.register_buffer("scale", torch.ones(number, dtype=torch.float64 if number % 2 else torch.float32))

    def kept(self) -> int:
        return int(self.scale.numel()) + (self.scale.dtype == torch.float64)


class Hooked(Block):
    def __init__(self, number: int) -> None:
        super().__init__(WIDTH)
        self.register_forward_hook(lambda _module, _args, output: (output[0], output[1][..., :number]))


class Numbered(Block):
    """Like the layers of Transformers, which know their number for a cache that is not there."""

    def __init__(self, number: int) -> None:
        super().__init__(3)
        self.layer_idx = number
        self.lin.layer_idx = number  # type: ignore[assignment]


class Routes(Numbered):
    """Reads values, as experts do: it does not run on shapes alone, but on zeros."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        (x.sum(-1) > 1).nonzero()
        return super().forward(x)


class RoutesLike(Routes):
    """Reads its number after it has read values, in the copy that runs on zeros."""

    def kept(self) -> int:
        return min(int(self.layer_idx), 2)


class Model(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(number) for number in (1, 2, 3, 4)])

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for block in self.blocks:
            x, part = block(x)
            parts.append(part)
        return torch.cat([x, *parts], dim=-1)


@pytest.mark.parametrize(
    "kind",
    [
        Block,
        Asked,
        OfDict,
        OfDictOr,
        AllOfDict,
        Counted,
        Set,
        SetToNone,
        ByClass,
        Answering,
        Property,
        Deep,
        Method,
        Like,
        Buffer,
        Hooked,
        RoutesLike,
    ],
)
def test_each_layer_is_observed_with_its_own_output(kind: type[Block]) -> None:
    model, x = Model(kind), torch.zeros(2, WIDTH)
    flow = ObservedModel(model, find_units(model)).flow((x,), {}, training=True)
    seen = {call.unit: [leaf.shape for leaf in called.form.tensors] for call, called in flow.calls.items()}
    given: dict[str, list[torch.Size]] = {}
    for name, block in model.blocks.named_children():
        block.register_forward_hook(lambda _module, _args, output, name=name: given.update({f"blocks.{name}": [y.shape for y in output]}))
    model(x)
    assert seen == given
    assert len({shapes[1] for shapes in given.values()}) > 1


@pytest.mark.parametrize(("kind", "runs"), [(Numbered, 1), (Like, 2), (Routes, 1), (RoutesLike, 4)])
def test_layers_that_are_alike_are_run_once(kind: type[Block], runs: int) -> None:
    model = Model(kind)
    kind.ran.reset_mock()
    observed = ObservedModel(model, find_units(model))
    observed.flow((torch.zeros(2, WIDTH),), {}, training=True)
    assert kind.ran.call_count == runs
    observed.flow((torch.zeros(2, WIDTH),), {}, training=False)
    assert kind.ran.call_count == 2 * runs
    assert [vars(each.unit).get("layer_idx") for each in observed.shape_only_by_name.values()] == [1, 2, 3, 4]


class Holder:
    """An opaque object, known only by its identity."""


class Replaces(Block):
    """Puts another object into its list in each run, at an address from which one has just gone."""

    def __init__(self, number: int) -> None:
        super().__init__(3)
        self.layer_idx = number
        self.holders = [Holder()]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.holders.clear()
        self.holders.append(Holder())
        return super().forward(x)


def test_a_unit_that_puts_another_object_in_a_place_changes() -> None:
    """The new object could have the id of the old one, so results of such a unit are not cached."""
    units = {str(number): Replaces(number) for number in range(2)}
    shared = ResultCache[Any](equivalents_of(units)["0"])
    _, read = shared.run(units["0"], lambda: units["0"](torch.zeros(2, WIDTH)))
    assert read is None


class Repeated(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.times = number

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.times):
            x = self.lin(x)
        return x, x


def test_costs_of_layers_that_differ_by_an_attribute_are_their_own() -> None:
    split: Any = zb.split(Model(Repeated), example=torch.zeros(2, WIDTH))
    product = 2 * 2 * WIDTH * WIDTH
    assert [layer.forward for layer in split.layers(COUNTING)] == [product, 2 * product, 3 * product, 4 * product]


class LooksAtNumbers(Block):
    def forward(self, x: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.lin(x), x.unflatten(-1, (int(count), -1))  # type: ignore[arg-type]


class GivesNumbers(Model):
    def forward(self, x: Tensor) -> Tensor:
        parts = [block(x, torch.tensor(number))[1] for number, block in zip((1, 2, 3, 6), self.blocks, strict=True)]
        return torch.cat([part.flatten(-2) for part in parts], dim=-1)


def test_layers_that_look_at_numbers_are_separate_by_these() -> None:
    model, x = GivesNumbers(LooksAtNumbers), torch.zeros(2, WIDTH)
    flow = ObservedModel(model, find_units(model)).flow((x,), {}, training=True)
    assert [called.form.tensors[1].shape[-2] for called in flow.calls.values()] == [1, 2, 3, 6]


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        (x > 1).nonzero()
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_of_zeros_is_counted_and_not_computed() -> None:
    tokens, width = 2**20, 2
    unit = shape_only_units({"attends": Attends()})["attends"]
    seen = unit.seen((torch.empty(1, 1, tokens, width, device="meta"),), {}, training=True)
    assert seen.form.tensors[0].shape == (1, 1, tokens, width)
    assert seen.flops == 2 * 2 * tokens**2 * width
    with _AttentionOfZeros():
        ones = nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, width))
    assert (ones == 1).all()
