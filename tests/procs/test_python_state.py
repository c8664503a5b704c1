"""A forward that runs more often than on one device, by R, `profile` and `describe`, leaves the numbers of one device.

Each stage here draws from a generator other than torch's default one, or changes an attribute, a container, a variable, an array or a
tensor, and multiplies by what it drew or changed. What cannot be put back is an error.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.ranks import Ranks, alone
from tests.refusals import states
from zerobubble.runtime.values.python_state import PythonState, put_back
from zerobubble.schedules import with_recompute

M, WIDTH, STEPS = 4, 3, 2
counted = 0
TABLE: dict[str, int] = {}


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count


class Slotted:
    __slots__ = ("count",)


class Counts:
    """A class without objects."""

    count = 0


imported = ModuleType("imported")


def drawing() -> Callable[[], float]:
    generator = torch.Generator().manual_seed(5)
    return lambda: torch.rand((), generator=generator).item()


def counting() -> Callable[[], int]:
    count = 0

    def function() -> int:
        nonlocal count
        count += 1
        return count

    return function


def numbers_from(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1


def next_of_module() -> int:
    global counted
    counted += 1
    return counted


def next_of_imported() -> int:
    imported.count += 1
    return int(imported.count)


def next_of_class() -> int:
    Counts.count += 1
    return Counts.count


def next_of_table() -> int:
    TABLE["count"] = TABLE.get("count", 0) + 1
    return TABLE["count"]


class Stateful(nn.Module):
    """A stage that computes with `next_number(kind)`."""

    of_class = 0

    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        self.inner = nn.Linear(WIDTH, WIDTH).double()
        self.outer = nn.Linear(WIDTH, WIDTH).double()
        self.of_torch = torch.Generator().manual_seed(7)
        self.listed = [torch.Generator().manual_seed(7)]
        self.named = {"noise": (torch.Generator().manual_seed(7),)}
        self.draw, self.count = drawing(), counting()
        self.of_numpy, self.older = np.random.default_rng(3), np.random.RandomState(3)
        self.of_python = random.Random(3)
        self.calls, self.seen, self.last = 0, [1.0], deque([1.0, 2.0, 3.0])
        self.table: dict[str, int] = {}
        self.members: set[int] = set()
        self.object, self.slotted = Counter(), Slotted()
        self.slotted.count = 0
        self.factor, self.in_place, self.array = torch.ones(()).double(), torch.ones(()).double(), np.ones(2)
        self.bytes = bytearray(b"\x01")

    def next_number(self) -> Any:
        drawn: dict[str, Callable[[], float]] = {
            "python": random.random,
            "numpy": np.random.rand,
            "generator": lambda: torch.rand((), generator=self.of_torch).item(),
            "listed": lambda: torch.rand((), generator=self.listed[0]).item(),
            "named": lambda: torch.rand((), generator=self.named["noise"][0]).item(),
            "closure": self.draw,
            "numpy generator": self.of_numpy.random,
            "numpy state": self.older.randn,
            "python generator": self.of_python.random,
        }
        return 1 + drawn[self.kind]() if self.kind in drawn else self.counted()

    def counted(self) -> Any:
        kind = self.kind
        if kind == "attribute":
            self.calls += 1
            return 1 + self.calls / 10
        if kind == "new attribute":
            self.later = getattr(self, "later", 0) + 1
            return 1 + self.later / 10
        if kind == "list":
            self.seen.append(len(self.seen))
            return 1 + len(self.seen) / 10
        if kind == "deque":
            self.last.rotate(1)
            return self.last[0]
        if kind == "dict":
            self.table = {"count": self.table.get("count", 0) + 1}
            return 1 + self.table["count"] / 10
        if kind == "set":
            self.members.add(len(self.members))
            return 1 + len(self.members) / 10
        if kind == "tensor":
            self.factor = self.factor * 1.1
            return self.factor
        if kind == "in place":
            self.in_place.mul_(1.1)
            return self.in_place.clone()
        if kind == "array":
            self.array += 0.1
            return float(self.array[0])
        if kind == "bytes":
            self.bytes[0] += 1
            return self.bytes[0] / 10
        if kind == "slots":
            self.slotted.count += 1
            return 1 + self.slotted.count / 10
        if kind == "class":
            Stateful.of_class += 1
            return 1 + Stateful.of_class / 10
        rest = {"object": self.object.next, "function": self.count, "global": next_of_module, "global table": next_of_table}
        rest |= {"imported": next_of_imported, "named class": next_of_class}
        return 1 + rest[kind]() / 10

    def forward(self, x: Tensor) -> Tensor:
        number = self.next_number()
        return self.outer(torch.sin(self.inner(x) * number) * number)


DRAWN = ("python", "numpy", "generator", "listed", "named", "closure", "numpy generator", "numpy state", "python generator")
CHANGED = (
    *("attribute", "new attribute", "list", "deque", "dict", "set", "tensor", "in place", "array", "bytes"),
    *("slots", "class", "object", "function", "global", "global table", "imported", "named class"),
)


def begin() -> None:
    global counted
    counted = Stateful.of_class = Counts.count = imported.count = 0  # type: ignore[attr-defined]
    TABLE.clear()
    random.seed(1)
    np.random.seed(1)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(M, WIDTH, dtype=torch.float64, generator=generator).to(DEVICE) for _ in range(2))  # type: ignore[return-value]


def noisy_loss(draw: Callable[[], float], output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output * (1 + draw()), target)


def one_device(module: nn.Module, loss_fn: Any) -> list[Tensor]:
    found = []
    for _ in range(STEPS):
        module.zero_grad()
        losses = [loss_fn(module(x), y) / M for x, y in zip(*(part.chunk(M) for part in data()), strict=True)]
        total = torch.stack(losses).sum()
        total.backward()
        found += [total.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
    return found


def in_pipeline(module: nn.Module, loss_fn: Any, way: str) -> list[Tensor]:
    schedule, found = zb.make("gpipe", 1, M), []
    options: dict[str, Any] = {"recompute": {"chosen": lambda name, _: not name}} if way == "chosen" else {}
    with zb.Pipeline(
        [module], with_recompute(schedule) if way in ("R", "chosen") else schedule, M, loss_fn, group=alone(), **options
    ) as pipe:
        for _ in range(STEPS):
            module.zero_grad()
            if way == "described":
                pipe.describe(*data())
                pipe.profile(*data(), steps=1)
            found.append(pipe.step(*data()))
            found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return found


def error_of(kind: str, way: str) -> float:
    """The largest difference from one device."""
    results = []
    for run in (one_device, partial(in_pipeline, way=way)):
        begin()
        is_loss = kind == "loss"
        module = (nn.Linear(WIDTH, WIDTH).double() if is_loss else Stateful(kind)).to(DEVICE)
        if is_loss:
            nn.init.eye_(module.weight)  # type: ignore[arg-type]
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        loss_fn = partial(noisy_loss, drawing()) if is_loss else nn.functional.mse_loss
        results.append(run(module, loss_fn))
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


def errors(group: Any, way: str) -> dict[str, float]:
    kinds = (*DRAWN, *CHANGED, *(() if way == "chosen" else ("loss",)))
    return {kind: error_of(kind, way) for kind in kinds}


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["R", "chosen", "described"])
def test_a_forward_that_runs_again_has_the_numbers_of_one_device(world: Ranks, way: str) -> None:
    (found,) = world.run(errors, way, ranks=1)
    assert {kind: error for kind, error in found.items() if error > 1e-12} == {}


class Advancing(nn.Module):
    """A stage with an iterator, whose position nobody can put back."""

    def __init__(self, numbers: Any) -> None:
        super().__init__()
        self.inner, self.numbers = nn.Linear(WIDTH, WIDTH).double(), numbers

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * next(self.numbers)


class ChangesFrozen(nn.Module):
    """A stage that changes a tensor in place which only a tuple holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.held = nn.Linear(WIDTH, WIDTH).double(), (torch.ones(()).double(),)

    def forward(self, x: Tensor) -> Tensor:
        self.held[0].add_(0.1)
        return self.inner(x) * self.held[0].clone()


def refused(group: Any) -> tuple[list[Exception], float]:
    """The errors of stages whose state cannot be put back, and the loss of a step after a refused description."""
    found: list[Exception] = []
    for module in (Advancing(itertools.count(1)), Advancing(itertools.cycle([1.0])), Advancing(numbers_from(1)), ChangesFrozen()):
        try:
            in_pipeline(module.to(DEVICE), nn.functional.mse_loss, "R")
        except zb.PipelineError as error:
            found.append(error)
    with zb.Pipeline(
        lambda stage, _: Advancing(itertools.count(1)) if stage else Stateful("list"), "1f1b", M, nn.functional.mse_loss, group=group
    ) as pipe:
        try:
            pipe.describe(*data())
        except zb.InputError as error:
            found.append(error)
        return found, pipe.step(*data()).item()


def test_state_that_cannot_be_put_back_is_an_error(world: Ranks) -> None:
    for (count, cycle, generator, held, described), loss in world.run(refused, ranks=2):
        states(count, "numbers", "count")
        states(cycle, "numbers", "cycle")
        states(generator, "numbers", "generator")
        states(held, "held[0]")
        states(described, "numbers", "count")
        assert loss > 0


@pytest.mark.parametrize("iterator", [iter([1, 2]), map(str, [1, 2]), zip([1, 2], [3, 4], strict=True), numbers_from(1), enumerate("ab")])
def test_the_position_of_an_iterator_inside_a_subset_is_found(iterator: Iterator[Any]) -> None:
    before = PythonState(Subset([{"iterator": iterator}], [0])).snapshot()  # type: ignore[arg-type]
    assert put_back(before) == []
    next(iterator)
    assert [fault.fields["place"] for fault in put_back(before)] != []


def test_the_position_of_a_file_that_is_read_is_put_back(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("a\nb\n")
    with (tmp_path / "lines").open() as file:
        before = PythonState(file.readline, [file]).snapshot()
        file.readline()
        assert put_back(before) == []
        assert file.readline() == "a\n"


def test_parameters_without_values_are_no_state() -> None:
    module = nn.Linear(1, 1)
    module.spare = [nn.LazyBatchNorm1d(), nn.LazyLinear(1)]  # type: ignore[assignment]
    PythonState(module)


shift = 1.0


def shifted(x: Tensor) -> Tensor:
    return x + shift


class Twice(nn.Module):
    """A model that reads an attribute, a function and a variable of this file. Its layer is shared, so its forward is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.counted, self.layer = nn.LayerNorm(WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = shifted(self.layer(self.counted(x)))
        return x


def with_changed_global(group: Any, name: str) -> bool:
    """Whether a step that follows the change of a global is refused."""
    before = globals()[name]
    inputs, targets = data()
    with zb.Pipeline(zb.split(Twice(), example=inputs[:2]), "zb-v", M, nn.functional.mse_loss, group=alone()) as pipe:
        pipe.step(inputs, targets)
        try:
            globals()[name] = 2
            pipe.step(inputs, targets)
        except zb.InputError:
            return True
        finally:
            globals()[name] = before
    return False


def test_a_global_with_the_name_of_an_attribute_may_change(world: Ranks) -> None:
    assert world.run(with_changed_global, "counted", ranks=1) == [False]
    assert world.run(with_changed_global, "shift", ranks=1) == [True]
