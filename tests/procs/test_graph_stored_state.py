"""A traced stage reads Python state as it is stored, sees each change of it, and leaves all of it as it was.

Classes of users compute on access, keep attributes in containers and slots, and hold others weakly: no access of theirs runs.
"""

from __future__ import annotations

import functools
import random
import types
import weakref
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.refusals import Stated, raises
from zerobubble.runtime.stage.stage import Stage, make_stage

pytestmark = pytest.mark.in_process

WIDTH = 4
TOTAL = 0


class Way(nn.Module):
    """A Linear and a forward of one's own, which reads `held`."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], held: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.way = way
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.held, self.linear(x))


class Thing:
    def __init__(self) -> None:
        self.scale = 1.0


THING, OTHER = Thing(), Thing()


class Instances(OrderedDict):  # type: ignore[type-arg]
    """A registry of classes that makes an instance on access."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Doubling(dict):  # type: ignore[type-arg]
    """A table that computes on access, also when it is copied or set."""

    scale = 1.0

    def __getitem__(self, key: str) -> Any:
        return 2 * super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, 3 * value)

    def keys(self) -> Any:
        raise NotImplementedError

    items = values = copy = clear = keys


class DoublingList(list):  # type: ignore[type-arg]
    def __getitem__(self, i: Any) -> Any:
        return 2 * super().__getitem__(i)

    def __iter__(self) -> Any:
        return (2 * value for value in super().__iter__())

    def __len__(self) -> int:
        return 7


class Private:
    """Keeps its number in a slot whose name Python mangles, and raises for names it lacks."""

    __slots__ = ("__scale", "late")

    def __init__(self) -> None:
        self.__scale = 1.0

    def scale(self) -> float:
        return self.__scale

    def double(self) -> None:
        self.__scale *= 2

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is asked for")


class Counting:
    """Counts who asks for it."""

    def __init__(self) -> None:
        self.asked = 0
        self.number = 1.0

    @property
    def scale(self) -> float:
        return self.number

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        raise AttributeError(name)


class Mode(Enum):
    ONE = 1


class Float(float):
    pass


def by_function(held: Any, y: Tensor) -> Tensor:
    return y * by_function.scale  # type: ignore[attr-defined]


by_function.scale = 1.0  # type: ignore[attr-defined]


def with_attribute(value: Any) -> Any:
    value.scale = 1.0
    return value


def scaled(held: Any, y: Tensor) -> Tensor:
    return y * held.scale


def by_key(held: Any, y: Tensor) -> Tensor:
    return y * held["a"]


def double(value: Any) -> Callable[[Any], None]:
    """Doubles the `scale` of a value, or of what is held."""
    return lambda held: setattr(held if value is None else value, "scale", (held if value is None else value).scale * 2)


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], Any], Callable[[Any], object]]] = {
    "an attribute of a dict": (scaled, lambda: with_attribute(Doubling()), double(None)),
    "the class of a dict": (scaled, Doubling, lambda held: setattr(Doubling, "scale", Doubling.scale * 2)),
    "a dict that computes": (by_key, lambda: Doubling(a=1.0), lambda held: held.update(a=3.0)),
    "a list that computes": (lambda held, y: y * held[0] + sum(held), lambda: DoublingList([1.0]), lambda held: held.append(4.0)),
    "UserDict": (by_key, lambda: UserDict(a=1.0), lambda held: held.update(a=2.0)),
    "UserList": (lambda held, y: y * held[0], lambda: UserList([1.0]), lambda held: held.reverse() or held.insert(0, 3.0)),
    "ChainMap": (by_key, lambda: ChainMap({}, {"a": 1.0}), lambda held: held.maps[1].update(a=2.0)),
    "defaultdict": (by_key, lambda: defaultdict(float, a=1.0), lambda held: held.update(a=2.0)),
    "Counter": (by_key, lambda: Counter(a=1), lambda held: held.update(a=2)),
    "a view of a dict": (by_key, lambda: types.MappingProxyType(SEEN), lambda held: SEEN.update(a=SEEN["a"] + 1)),
    "the order of an OrderedDict": (
        lambda held, y: functools.reduce(lambda z, f: f(z), held.values(), y),
        lambda: OrderedDict(a=torch.tanh, b=torch.exp),
        lambda held: held.move_to_end("a"),
    ),
    "a private slot": (lambda held, y: y * held.scale(), Private, lambda held: held.double()),
    "a property": (scaled, Counting, lambda held: setattr(held, "number", 2.0)),
    "an attribute of an enum": (scaled, lambda: with_attribute(Mode.ONE), double(None)),
    "an attribute of a number": (scaled, lambda: with_attribute(Float(1.0)), double(None)),
    "an attribute of a function": (by_function, lambda: None, double(by_function)),
    "behind a weak reference": (lambda held, y: y * held().scale, lambda: weakref.ref(THING), double(THING)),
    "behind a weak proxy": (scaled, lambda: weakref.proxy(THING), double(THING)),
    "a weak dict": (lambda held, y: y * held["a"].scale, lambda: weakref.WeakValueDictionary(a=THING), double(THING)),
    "an entry of a weak dict": (
        lambda held, y: y * (2 if "b" in held else 1),
        lambda: weakref.WeakValueDictionary(a=THING),
        lambda held: held.update(b=OTHER),
    ),
    "a dict of weak keys": (
        lambda held, y: y * held[THING],
        lambda: weakref.WeakKeyDictionary({THING: 1.0}),
        lambda held: held.update({THING: 2.0}),
    ),
    "a weak set": (lambda held, y: y * len(held), lambda: weakref.WeakSet([THING]), lambda held: held.add(OTHER)),
}  # fmt: skip
SEEN = {"a": 1.0}


def step(stage: Stage, seed: int) -> None:
    """A step, whose output and gradients are those of autograd."""
    stage.begin(None)
    stage.module.zero_grad()
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
    z = x.detach().requires_grad_()
    (y,) = stage.forward(0, (x,))
    expected = torch.autograd.grad((loss := stage.module(z)).sum(), list(stage.module.parameters()))
    assert torch.equal(y, loss)
    stage.backward(0, (torch.ones_like(y),))
    stage.weight(0)
    for p, gradient in zip(stage.module.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_is_seen(name: str) -> None:
    way, make, change = CHANGES[name]
    stage = make_stage("graph", Way(way, make()), 1)
    step(stage, 0)
    step(stage, 1)
    assert len(stage.splitter.traces) == 1
    change(stage.module.held)
    step(stage, 2)
    assert len(stage.splitter.traces) == 2


def test_a_step_leaves_what_computes_on_access() -> None:
    registry = Instances(tanh=nn.Tanh, relu=nn.ReLU)
    table, items, counting = Doubling(a=1.0), DoublingList([1.0]), Counting()
    module = Way(lambda held, y: held[0]["tanh"](y) * held[1]["a"] * held[2][0] * held[3].scale, (registry, table, items, counting))
    stage = make_stage("graph", module, 1)
    for seed in range(3):
        step(stage, seed)
    assert dict(OrderedDict.items(registry)) == {"tanh": nn.Tanh, "relu": nn.ReLU}
    assert (dict.get(table, "a"), list.__getitem__(items, 0), counting.asked) == (1.0, 1.0, 0)


def test_a_trace_keeps_no_object_alive_that_is_referred_to_weakly() -> None:
    thing = Thing()
    held = weakref.WeakValueDictionary(a=THING, b=thing)
    stage = make_stage("graph", Way(lambda held, y: y * len(held), held), 1)
    step(stage, 0)
    del thing
    assert len(held) == 1
    step(stage, 1)


def counting_globally(held: Any, y: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1
    return y


def counting_in_a_class(held: Any, y: Tensor) -> Tensor:
    type(held).scale += 1
    return y


def counting_in_a_closure() -> tuple[Callable[[Any, Tensor], Tensor], Callable[[], int]]:
    calls = 0

    def way(held: Any, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return y

    return way, lambda: calls


def doing(act: Callable[[Any], object]) -> Callable[[Any, Tensor], Tensor]:
    """A forward that acts on what is held."""

    def way(held: Any, y: Tensor) -> Tensor:
        act(held)
        return y

    return way


CLOSURE, CALLS = counting_in_a_closure()
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], Any], Callable[[Any], Any], Stated]] = {
    "a global": (counting_globally, lambda: None, lambda held: TOTAL, ("TOTAL",)),
    "a class": (counting_in_a_class, Doubling, lambda held: Doubling.scale, ("Doubling.scale",)),
    "a closure": (CLOSURE, lambda: None, lambda held: CALLS(), ("calls",)),
    "a slot": (doing(Private.double), Private, Private.scale, ("held",)),
    "an attribute of a dict": (doing(lambda held: setattr(held, "scale", 2.0)), Doubling, lambda held: vars(held).copy(), ("held",)),
    "an entry that a read inserts": (doing(lambda held: held["new"]), lambda: defaultdict(list), dict, ("held",)),
    "an order": (
        doing(lambda held: held.move_to_end("a")),
        lambda: OrderedDict(a=1, b=2),
        list,
        ("held",),
    ),
    "a full deque": (doing(lambda held: held.append(3)), lambda: deque([1, 2], 2), list, ("held",)),
    "an array": (doing(lambda held: held.__iadd__(1)), lambda: np.zeros((2, 3)), lambda held: held.tolist(), ("held",)),
    "a view of an array": (doing(lambda held: held.__iadd__(1)), lambda: np.zeros((4, 3)).T[::2], lambda held: held.tolist(), ("held",)),
    "an array of Python": (doing(lambda held: held.append(1.0)), lambda: array("d", [0.0]), lambda held: held.tolist(), ("held",)),
    "bytes": (doing(lambda held: held.append(1)), lambda: bytearray(b"ab"), bytes, ("held",)),
    "a weak dict": (doing(lambda held: held.update(b=OTHER)), lambda: weakref.WeakValueDictionary(a=THING), dict, ("held",)),
    "Python's random numbers": (doing(lambda held: random.random()), lambda: None, lambda held: random.getstate(), ("random", "Python")),
    "a generator of numpy": (
        doing(lambda held: held.random()),
        lambda: np.random.default_rng(0),
        lambda held: held.bit_generator.state,
        ("random", "held"),
    ),
    "numpy's random numbers": (
        doing(lambda held: np.random.rand()),
        lambda: None,
        lambda held: np.random.get_state()[1].tolist(),  # type: ignore[index]
        ("random", "numpy"),
    ),
    "an iterator": (doing(next), lambda: iter([1, 2]), lambda held: held.__length_hint__(), ("held", "list_iterator")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_forward_leaves_all_it_changed(name: str) -> None:
    way, make, content, stated = REFUSED[name]
    module = Way(way, make())
    before = content(module.held)
    with raises(zb.InputError, *stated, 'split={1: "deferred"}'):
        make_stage("graph", module, 1).forward(0, (torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True),))
    assert content(module.held) == before
