"""Python state that changes between steps of a traced stage: results match one device, or an error says why not.

A trace never runs in a Python state other than the one it was traced in.
"""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import random
import types
import warnings
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.models import batch, build, loss_fn, one_device
from tests.procs.ranks import Ranks
from tests.refusals import Stated, raises, states
from zerobubble.runtime.split.python_state import state
from zerobubble.runtime.stage.stage import Stage, make_stage

pytestmark = pytest.mark.in_process

WIDTH = 4
TEMPERATURE = 1.0
SCALES = {"output": 1.0}


class Way(nn.Module):
    """A Linear and a forward of one's own, which reads what is given by name."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.way = way
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, self.linear(x))


@dataclass
class Config:
    scale: float = 1.0
    nested: dict[str, list[float]] = field(default_factory=lambda: {"scales": [1.0, 2.0]})


class Computed(dict):  # type: ignore[type-arg]
    """A dict that computes its values on access."""

    def __getitem__(self, key: str) -> float:
        return 2 * float(super().__getitem__(key))

    def values(self) -> Any:
        raise NotImplementedError

    def copy(self) -> Any:
        raise NotImplementedError


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Norm(Enum):
    NONE = 0
    TANH = 1


class Adapted(nn.Module):
    """A Linear with an adapter that can be off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_adapted = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + self.adapter(x) if self.is_adapted else y


class OfClass(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Shared(nn.Module):
    """Three Linears; two of them share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return y


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)[None, None]
        return nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)[0, 0]


def scaled(module: Any, y: Tensor) -> Tensor:
    return y * module.scale


def closing_over(number: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda module, y: y * number


def by_global(module: Any, y: Tensor) -> Tensor:
    return y * TEMPERATURE


def by_global_dict(module: Any, y: Tensor) -> Tensor:
    return inner(y)


def inner(y: Tensor) -> Tensor:
    return y * SCALES["output"]


def of_scale(value: Any) -> Callable[[], nn.Module]:
    return lambda: Way(scaled, scale=value)


def put(path: str, value: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, module), name, value)

    return change


def put_in(name: str, key: Any, value: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        getattr(module, name)[key] = value

    return change


def swap_tied(module: Any) -> None:
    """Another two share a weight, of the same shapes in the same places."""
    module.c.weight = module.b.weight


def reorder(module: Any) -> None:
    module._modules["0"], module._modules["2"] = module._modules["2"], module._modules["0"]


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "a float": (of_scale(1.0), put("scale", 0.5)),
    "the sign of zero": (lambda: Way(lambda m, y: y + torch.atan2(torch.tensor(m.zero), torch.tensor(-1.0)), zero=0.0), put("zero", -0.0)),
    "an int that becomes a bool": (lambda: Way(lambda m, y: y * (2 if m.flag is True else 3), flag=1), put("flag", True)),
    "a string": (lambda: Way(lambda m, y: y.relu() if m.kind == "relu" else y.tanh(), kind="relu"), put("kind", "tanh")),
    "None": (lambda: Way(lambda m, y: y if m.scale is None else y * m.scale, scale=None), put("scale", 3.0)),
    "an enum": (lambda: Way(lambda m, y: y.tanh() if m.norm is Norm.TANH else y, norm=Norm.NONE), put("norm", Norm.TANH)),
    "a dtype": (lambda: Way(lambda m, y: y.to(m.kind).double(), kind=torch.float64), put("kind", torch.bfloat16)),
    "dropout": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)), put("1.p", 0.6)),
    "an activation": (lambda: Way(lambda m, y: m.act(y), act=nn.ReLU()), put("act", nn.GELU())),
    "a function": (lambda: Way(lambda m, y: m.act(y), act=torch.tanh), put("act", torch.relu)),
    "what a function closes over": (lambda: Way(closing_over(1.0)), put("way", closing_over(2.0))),
    "a partial": (lambda: Way(lambda m, y: m.act(y), act=functools.partial(torch.mul, 1.0)), put("act", functools.partial(torch.mul, 2.0))),
    "an adapter": (Adapted, put("is_adapted", False)),
    "frozen": (Adapted, lambda m: m.linear.requires_grad_(m.linear.weight.requires_grad is False)),
    "a dict": (lambda: Way(lambda m, y: y * m.scales["b"], scales={"a": 1.0, "b": 1.0}), put_in("scales", "b", 2.0)),
    "a dict of one's own kind": (
        lambda: Way(lambda m, y: y * m.scales["a"], scales=Computed(a=1.0)),
        lambda m: m.scales.update(a=3.0),
    ),
    "a number of numpy": (lambda: Way(lambda m, y: y * float(m.scale), scale=np.float32(1)), put("scale", np.float32(2))),
    "a list": (lambda: Way(lambda m, y: y * m.scales[1], scales=[1.0, 1.0]), put_in("scales", 1, 2.0)),
    "a long list": (lambda: Way(lambda m, y: y * m.scales[999], scales=[1.0] * 1000), put_in("scales", 999, 2.0)),
    "the order of a dict": (
        lambda: Way(lambda m, y: functools.reduce(lambda z, f: f(z), m.acts.values(), y), acts={"a": torch.tanh, "b": torch.exp}),
        lambda m: m.acts.update(a=m.acts.pop("a")),
    ),
    "a set": (lambda: Way(lambda m, y: y.tanh() if "tanh" in m.on else y, on=set()), lambda m: m.on.add("tanh")),
    "a dataclass": (lambda: Way(lambda m, y: y * m.config.scale, config=Config()), put("config.scale", 2.0)),
    "a list in a dict of a dataclass": (
        lambda: Way(lambda m, y: y * m.config.nested["scales"][1], config=Config()),
        lambda m: m.config.nested["scales"].reverse(),
    ),
    "a namespace": (lambda: Way(lambda m, y: y * m.config.scale, config=types.SimpleNamespace(scale=1.0)), put("config.scale", 2.0)),
    "slots": (lambda: Way(lambda m, y: y * m.config.scale, config=Slotted()), put("config.scale", 2.0)),
    "an array": (lambda: Way(lambda m, y: y * float(m.scale[1]), scale=np.ones(2)), put_in("scale", 1, 2.0)),
    "what is in a buffer": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), lambda m: m[1].running_mean.add_(1)),
    "another buffer": (lambda: nn.BatchNorm1d(WIDTH).eval(), put("running_mean", torch.ones(WIDTH, dtype=torch.float64))),
    "another parameter": (lambda: nn.Linear(WIDTH, WIDTH), lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach() * 2))),
    "training mode": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), lambda m: m.eval()),
    "weights that are shared": (Shared, swap_tied),
    "the order of submodules": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), reorder),
    "a submodule more": (lambda: nn.Sequential(nn.Linear(4, 4)), lambda m: m.append(nn.Tanh())),
    "a submodule less": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lambda m: m.__delitem__(1)),
    "a class": (lambda: OfClass(WIDTH, WIDTH), lambda m: setattr(OfClass, "scale", 3.0 - OfClass.scale)),
    "a global": (lambda: Way(by_global), lambda m: globals().update(TEMPERATURE=3.0 - TEMPERATURE)),
    "a global dict within a function": (lambda: Way(by_global_dict), lambda m: SCALES.update(output=3.0 - SCALES["output"])),
    "the default dtype": (lambda: Way(lambda m, y: y + torch.ones(()).div(3).double()), lambda m: torch.set_default_dtype(torch.float32)),
    "deterministic": (
        lambda: Way(lambda m, y: y * (1 + torch.are_deterministic_algorithms_enabled())),
        lambda m: torch.use_deterministic_algorithms(True),
    ),
}  # fmt: skip
SHARED_BY_MODULES = {"a class", "a global", "a global dict within a function", "the default dtype", "deterministic"}


@pytest.fixture(autouse=True)
def in_double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def step(stage: Stage, oracle: nn.Module, seed: int) -> None:
    """A step of two microbatches, whose gradients and outputs are those of autograd."""
    stage.begin(None)
    stage.module.zero_grad()
    oracle.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(2, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    for j, x in enumerate(xs):
        x, z = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.manual_seed(seed)
        (y,) = stage.forward(j, (x,))
        torch.manual_seed(seed)
        expected = oracle(z)
        assert torch.equal(y, expected)
        dy = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
        (dx,) = stage.backward(j, (dy,))
        stage.weight(j)
        expected.backward(dy)
        assert torch.equal(dx, z.grad)
    for p, q in zip(stage.module.parameters(), oracle.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_is_seen(name: str) -> None:
    build, change = CHANGES[name]
    torch.manual_seed(0)
    module = build()
    oracle = deepcopy(module)
    stage = make_stage("graph", module, 1)
    step(stage, oracle, 0)
    change(module)
    if name not in SHARED_BY_MODULES:
        change(oracle)
    step(stage, oracle, 1)
    step(stage, oracle, 2)
    assert len(stage.splitter.traces) <= 2


class Chosen(nn.Module):
    """Takes the first of two buffers of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("one", torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("two", torch.full((WIDTH,), 2.0, dtype=torch.float64))
        self.both = [self.one, self.two]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.both[0]


def test_buffers_that_change_places_are_seen() -> None:
    module = Chosen()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    step(stage, oracle, 0)
    module.both.reverse()
    oracle.both.reverse()
    step(stage, oracle, 1)
    assert len(stage.splitter.traces) == 2


MADE: list[int] = []


class Counted(nn.Module):
    """Counts its objects."""

    def __init__(self) -> None:
        super().__init__()
        MADE.append(1)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def test_state_that_only_init_reads_is_ignored() -> None:
    module = Counted()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    step(stage, oracle, 0)
    Counted()
    step(stage, oracle, 1)
    assert len(stage.splitter.traces) == 1


@pytest.mark.long
def test_a_parameter_that_is_replaced_is_let_go() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    step(stage, oracle, 0)
    before = weakref.ref(module.weight)
    for linear in (module, oracle):
        linear.weight = nn.Parameter(2 * linear.weight.detach())
    step(stage, oracle, 1)
    gc.collect()
    assert before() is None


def test_a_change_between_microbatches_is_seen() -> None:
    torch.manual_seed(0)
    module = Way(scaled, scale=1.0)
    stage = make_stage("graph", module, 1)
    stage.begin(None)
    x = torch.ones(2, WIDTH, requires_grad=True)
    (first,) = stage.forward(0, (x,))
    module.scale = 2.0
    (second,) = stage.forward(1, (x,))
    assert torch.equal(second, 2 * first)
    before, after = stage.backward(0, (torch.ones_like(first),))[0].clone(), stage.backward(1, (torch.ones_like(first),))[0]
    assert torch.equal(after, 3 * before)  # both gradients add up in one leaf


@pytest.mark.parametrize(
    ("attribute", "stated"),
    [
        (functools.reduce(lambda inner, _: [inner], range(5_000), 1.0), ("compared", "nested")),
        (list(range(30_000)), ("20,000", "Python", "table")),
    ],
)
def test_more_than_can_be_watched_is_refused(attribute: Any, stated: Stated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MOST_PLACES", 20_000)
    stage = make_stage("graph", Way(lambda module, x: x * len(module.table), table=attribute), 1)
    with raises(zb.InputError, *stated):
        stage.forward(0, (torch.ones(2, WIDTH, requires_grad=True),))


@cpu_only("the backends of attention are those of CPUs")
def test_the_backends_of_attention_are_seen() -> None:
    torch.manual_seed(0)
    module = Attending()
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            step(stage, oracle, 0)
    assert len(stage.splitter.traces) == 2


@pytest.mark.parametrize(
    ("text", "other"), [("10000000000", "10000000001"), ("'a text'", "'another text'"), ("b'bytes'", "b'other bytes'")]
)
def test_an_equal_value_in_another_object_is_no_change(text: str, other: str) -> None:
    module: Any = nn.Linear(2, 2)
    found = []
    for source in (text, text, other):
        module.scale = ast.literal_eval(source)
        found.append(state.read_state(module).values)
    assert found[0] == found[1] != found[2]


def test_going_to_and_fro_traces_each_state_once() -> None:
    module = Way(scaled, scale=1.0)
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for seed in range(4):
        module.scale = oracle.scale = (1.0, 0.25)[seed % 2]
        step(stage, oracle, seed)
    assert len(stage.splitter.traces) == 2


def test_a_number_that_always_changes_is_warned_of_and_holds_few_traces() -> None:
    module = Way(scaled, scale=1.0)
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(11):
            module.scale = oracle.scale = 1.0 / (seed + 1)
            step(stage, oracle, seed)
    message = [str(warning.message) for warning in caught if "9th" in str(warning.message) and warning.filename == __file__]
    assert len(message) == 1
    states(message[0], "stage 1")
    assert len(stage.splitter.traces) == 8


def counting_in_dict(module: Any, y: Tensor) -> Tensor:
    module.counts["calls"] += 1
    return y * module.counts["calls"]


def counting_in_config(module: Any, y: Tensor) -> Tensor:
    module.config.nested["scales"].append(1.0)
    return y


def drawing(module: Any, y: Tensor) -> Tensor:
    return y if random.random() < 0.5 else -y


def drawing_by_numpy(module: Any, y: Tensor) -> Tensor:
    return y * float(np.random.rand())


def keeping(module: Any, y: Tensor) -> Tensor:
    module.last = y
    return y


@functools.cache
def table(length: int) -> Tensor:
    return torch.arange(float(length))


def caching(module: Any, y: Tensor) -> Tensor:
    return y + table(WIDTH)


@functools.lru_cache(maxsize=1)
def factor(length: int) -> float:
    return 1.0 / length


def test_a_function_may_remember_numbers() -> None:
    """Its cache grows while the module is traced, and does not while the graph runs."""
    factor.cache_clear()
    module = Way(lambda m, y: y * factor(y.shape[0]))
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    step(stage, oracle, 0)
    step(stage, oracle, 1)
    assert len(stage.splitter.traces) == 1


REFUSED: dict[str, tuple[Callable[[], nn.Module], Stated]] = {
    "a counter in a dict": (lambda: Way(counting_in_dict, counts={"calls": 0}), ("counts['calls']",)),
    "a list that grows": (lambda: Way(counting_in_config, config=Config()), ("config.nested['scales']",)),
    "an output that is kept": (lambda: Way(keeping, last=None), ("last",)),
    "Python's random numbers": (lambda: Way(drawing), ("random", "Python")),
    "numpy's random numbers": (lambda: Way(drawing_by_numpy), ("random", "numpy")),
    "a generator of its own": (
        lambda: Way(lambda m, y: y * m.draw.random(), draw=random.Random(0)),
        ("random", "draw"),
    ),
    "a tensor in a tuple": (
        lambda: Way(lambda m, y: y * m.scales[0], scales=(torch.ones(2, WIDTH, dtype=torch.float64),)),
        ("tensor", "register_buffer"),
    ),
    "the number in a tensor in a tuple": (
        lambda: Way(lambda m, y: y * m.scales[0].item(), scales=(torch.ones(()),)),
        ("tensor", "buffer"),
    ),
    "an iterator": (lambda: Way(lambda m, y: y * next(m.ids), ids=itertools.count(1)), ("ids", "count")),
    "a cache of tensors": (lambda: Way(caching), ("cache",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_forward_that_changes_python_state_is_refused_and_leaves_it(name: str) -> None:
    build, stated = REFUSED[name]
    module = build()
    x = torch.ones(2, WIDTH, requires_grad=True)
    with raises(zb.InputError, *stated, 'split={1: "deferred"}'):
        make_stage("graph", module, 1).forward(0, (x,))
    if name == "a counter in a dict":
        assert module.counts == {"calls": 0}
    module(x).sum().backward()  # no traced tensor is left in the module
    assert getattr(module, "last", None) is None or type(module.last) is Tensor


class TwoNames(nn.Module):
    """A Linear under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.tanh(self.a(x)))
        return y


class TwoBuffers(nn.Module):
    """A buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("same", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.mean.add_(y.detach().mean(0))
        return y - self.same


def listed() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(linear, nn.Tanh(), linear, nn.ModuleList([nn.Identity(), linear])[1])


@pytest.mark.parametrize("build", [TwoNames, Shared, TwoBuffers, listed])
def test_tensors_and_modules_with_two_names_stay_one(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = build()
    before = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    oracle, stage = deepcopy(module), make_stage("graph", module, 1)
    for seed in range(3):
        step(stage, oracle, seed)
    after = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


class End(nn.Module):
    """The first or the last stage of a language model: a Linear's weight is given, one for both."""

    def __init__(self, weight: nn.Parameter, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.lm_head.weight = weight
        self.block = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(nn.functional.embedding(x, self.lm_head.weight)) if self.is_first else self.lm_head(self.block(x))
        return y


def share_a_parameter(group: Any, name: str, is_tied: bool) -> list[bool]:
    """Whether the gradients are those of one device, where rank 0 holds the first and the last stage, which share a parameter."""
    torch.manual_seed(0)
    num_stages = 2 * group.size()
    weight = nn.Parameter(torch.randn(11, 6, dtype=torch.float64))
    middle = [nn.Linear(6, 6) for _ in range(num_stages - 2)]
    stages = nn.ModuleList([End(weight, True), *middle, End(weight, False)]).double()
    oracle = deepcopy(stages)
    tied = [[(0, "lm_head.weight"), (num_stages - 1, "lm_head.weight")]] if is_tied else []
    with zb.Pipeline(lambda stage, _: stages[stage], name, 4, loss_fn, group=group, split="graph", tied=tied) as pipe:
        for seed in range(2):
            inputs, targets = batch(4, seed=seed)
            pipe.step(inputs, targets)
            one_device(list(oracle), 4, inputs, targets)
        pairs = [
            (p.grad, q.grad) for s, module in pipe.modules.items() for p, q in zip(module.parameters(), oracle[s].parameters(), strict=True)
        ]
        return [a is not None and b is not None and torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in pairs]


@pytest.mark.long
@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_of_one_rank_may_share_a_parameter_by_reference(world: Ranks, is_tied: bool) -> None:
    for same in world.run(share_a_parameter, "zb-v", is_tied, ranks=2):
        assert all(same)


def train_while_unfreezing(group: Any) -> bool:
    """Whether steps with a frozen block, a trained and again a frozen one leave the gradients of one device."""
    oracle = [build(stage, 2) for stage in range(2)]
    with zb.Pipeline(build, "zb-h1", 4, loss_fn, group=group, split="graph") as pipe:
        for seed, trains in enumerate((False, True, False)):
            for stage, module in [*pipe.modules.items(), *enumerate(oracle)]:
                module.get_submodule("1" if stage == 0 else "0").up.requires_grad_(trains)
            inputs, targets = batch(4, seed)
            pipe.step(inputs, targets)
            one_device(oracle, 4, inputs, targets)
        pairs = [
            (p.grad, q.grad) for s, module in pipe.modules.items() for p, q in zip(module.parameters(), oracle[s].parameters(), strict=True)
        ]
        return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


@pytest.mark.long
def test_unfreezing_between_steps_is_seen(world: Ranks) -> None:
    assert all(world.run(train_while_unfreezing, ranks=2))
