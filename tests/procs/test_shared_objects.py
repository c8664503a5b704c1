"""Parts that share a plain Python object: refused if one writes what another reads, because ranks have separate objects; otherwise not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.refusals import raises

pytestmark = pytest.mark.in_process

WIDTH = 4
COUNT = 0
RECORDS: list[float] = []
CACHE: dict[int, Tensor] = {}
IMPORTED = ModuleType("imported")
IMPORTED.count = 0  # type: ignore[attr-defined]


class Counts:
    """A class without objects."""

    count = 0


class Shared:
    """An object that parts share; the class has a count, too."""

    total: ClassVar[float] = 0.0

    def __init__(self) -> None:
        self.count = 0.0
        self.entries: list[float] = []
        self.nested = {"count": [0.0]}
        self.scale = 0.5


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0.0


class Part(nn.Linear):
    """A layer that adds what `read` returns, after `write`; both get the shared object and the number of the part."""

    def __init__(self, number: int, shared: Any, write: Callable[[Any, int], None], read: Callable[[Any, int], float]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.number, self.shared, self.write, self.read = number, shared, write, read

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + self.read(self.shared, self.number)
        self.write(self.shared, self.number)
        return x


def nothing(*_: Any) -> None: ...


def zero(*_: Any) -> float:
    return 0.0


def first(write: Callable[[Any], None]) -> Callable[[Any, int], None]:
    return lambda shared, number: write(shared) if number == 0 else None


def last(read: Callable[[Any], float]) -> Callable[[Any, int], float]:
    return lambda shared, number: read(shared) if number == 3 else 0.0


def add_count(shared: Any) -> None:
    shared.count += 1


def add_global(_: Shared) -> None:
    global COUNT
    COUNT += 1


def add_total(_: Shared) -> None:
    Shared.total += 1


def add_imported(_: Any) -> None:
    IMPORTED.count += 1


def add_counts(_: Any) -> None:
    Counts.count += 1


def add_nested(shared: Shared) -> None:
    shared.nested["count"][0] += 1


def fill_cache(_: Shared, number: int) -> None:
    CACHE.setdefault(number, torch.ones(1))


def of_closure() -> tuple[Callable[[Any], None], Callable[[Any], float]]:
    count = 0

    def add(_: Any) -> None:
        nonlocal count
        count += 1

    return add, lambda _: float(count)


def set_entry(shared: dict[str, float]) -> None:
    shared["count"] = shared.get("count", 0.0) + 1


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None], Callable[[Any, int], float]]] = {
    "counter": (Shared, first(add_count), last(lambda shared: shared.count)),
    "counter with slots": (Slotted, first(add_count), last(lambda shared: shared.count)),
    "list": (Shared, first(lambda shared: shared.entries.append(1.0)), last(lambda shared: float(len(shared.entries)))),
    "nested list": (Shared, first(add_nested), last(lambda shared: shared.nested["count"][0])),
    "dict": (dict, first(set_entry), last(lambda shared: shared.get("count", 0.0))),
    "set": (set, first(lambda shared: shared.add(1)), last(lambda shared: float(len(shared)))),
    "bare list": (list, first(lambda shared: shared.append(1.0)), last(lambda shared: float(len(shared)))),
    "global number": (Shared, first(add_global), last(lambda _: float(COUNT))),
    "global list": (Shared, first(lambda _: RECORDS.append(1.0)), last(lambda _: float(len(RECORDS)))),
    "attribute of a class": (Shared, first(add_total), last(lambda _: Shared.total)),
    "global of an imported module": (Shared, first(add_imported), last(lambda _: float(IMPORTED.count))),
    "attribute of a class without objects": (Shared, first(add_counts), last(lambda _: float(Counts.count))),
    "generator of Python": (lambda: random.Random(0), first(lambda shared: shared.random()), last(lambda shared: shared.random())),
    "closure": (Shared, *(wrap(function) for wrap, function in zip((first, last), of_closure(), strict=True))),  # type: ignore[operator]
    "from the last to the first in the next forward": (
        Shared,
        lambda shared, number: add_count(shared) if number == 3 else None,
        lambda shared, number: shared.count if number == 0 else 0.0,
    ),
}
TAKEN: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None], Callable[[Any, int], float]]] = {
    "only read": (Shared, nothing, lambda shared, _: shared.scale),
    "global only read": (Shared, nothing, lambda *_: float(WIDTH)),
    "counter that is not read": (Shared, lambda shared, _: add_count(shared), zero),
    "list that is not read": (Shared, lambda shared, _: shared.entries.append(1.0), zero),
    "global that is not read": (Shared, lambda shared, _: add_global(shared), zero),
    "a cache that each part fills": (Shared, fill_cache, lambda _, number: float(len(CACHE.get(number, ())))),
    "entry for each part": (
        dict,
        lambda shared, number: shared.update({number: shared.get(number, 0) + 1}),
        lambda shared, number: float(shared.get(number, 0)),
    ),
}


class Net(nn.Module):
    def __init__(self, case: tuple[Callable[[], Any], Callable[[Any, int], None], Callable[[Any, int], float]]) -> None:
        super().__init__()
        make, write, read = case
        shared = make()
        self.layers = nn.ModuleList(Part(number, shared, write, read) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.fixture(autouse=True)
def state_is_as_before() -> Iterator[None]:
    """Splitting leaves what is outside of the model as it was."""

    def now() -> tuple[Any, ...]:
        return COUNT, list(RECORDS), dict(CACHE), Shared.total, IMPORTED.count, Counts.count, random.getstate()

    before = now()
    yield
    assert now() == before


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_part_writes_and_another_reads_is_refused(case: str) -> None:
    with raises(zb.InputError, "Net", "stage 0" if case.startswith("from the last") else "stage 1"):
        zb.split(Net(REFUSED[case]), example=torch.ones(2, WIDTH)).describe(2)


def test_the_refusal_names_the_parts_and_the_object() -> None:
    with raises(zb.InputError, "layers.3", shared="layers.0.shared.count"):
        zb.split(Net(REFUSED["counter"]), example=torch.ones(2, WIDTH)).describe(2)
    with raises(zb.InputError, shared=f"{__name__}.COUNT"):
        zb.split(Net(REFUSED["global number"]), example=torch.ones(2, WIDTH)).describe(2)


@pytest.mark.parametrize("case", TAKEN)
def test_what_no_other_part_reads_is_taken(case: str) -> None:
    split = zb.split(Net(TAKEN[case]), example=torch.ones(2, WIDTH))
    assert split.describe(2).splitlines()[-1].startswith("Proved")


class Drawing(nn.Linear):
    """A layer that draws from Python's generator, in training or always."""

    def __init__(self, *, always: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (random.random() if self.training or self.always else 1.0)


@pytest.mark.parametrize(("always", "proof"), [(False, "Proved"), (True, "Not proved")])
def test_a_model_that_draws_from_pythons_generator_is_compared_in_evaluation_mode(always: bool, proof: str) -> None:
    split = zb.split(nn.Sequential(*(Drawing(always=always) for _ in range(3))), example=torch.ones(2, WIDTH))
    assert split.describe(2).splitlines()[-1].startswith(proof)


@pytest.mark.parametrize("case", REFUSED)
def test_parts_in_one_stage_may_share_what_they_write(case: str) -> None:
    """Every part that shares is in the first stage."""
    net = Net(REFUSED[case])
    net.layers.append(nn.Linear(WIDTH, WIDTH))
    zb.split(net, example=torch.ones(2, WIDTH), cuts=["layers.4"]).describe(2)
