"""What `loss_fn` sets of the model equals one device, or all ranks refuse the step, undo that, and the pipeline stays open."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.refusals import raises

RATE = 1.0
"""A variable that forwards read."""
CALLS = 0
"""A variable that only the loss uses."""


class Core(nn.Module):
    """A module inside of a part, with a temperature."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.factor = 1.0
        self.register_buffer("bias", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x / self.temperature * vars(self)["factor"] + self.bias).tanh()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.dropout = nn.Dropout(0.0)
        self.core = Core()
        self.calls = 0
        self.hidden: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is not None:
            x = x + self.hidden
        self.hidden = 1.0
        self.calls += 1
        self.latest = x.detach()
        return self.core(self.dropout(self.linear(x))) + 0 * self.latest


class Settings:
    def __init__(self) -> None:
        self.scale = self.unread = 1.0


class Model(nn.Module):
    """A model that anneals what its forward reads, in several forms, and counts what it does not read."""

    shared: ClassVar[float] = 1.0
    scale: Tensor
    other: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.temperature = 1.0
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("other", torch.ones((), dtype=torch.float64))
        self.by_name = {"temperature": 1.0, "nested": [1.0]}
        self.settings = Settings()
        self.plain = torch.ones((), dtype=torch.float64)
        self.iterations = 0
        self.log: dict[str, list[float]] = {"loss": []}
        self.register_buffer("count", torch.zeros(()))
        self.late = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x / self.temperature * self.scale * self.by_name["temperature"] * self.by_name["nested"][0]
        x = x * self.settings.scale * self.plain * rate() * self.shared * self.other
        for layer in self.layers:
            x = layer(x)
        return x * self.late

    def loss_function(self, output: Tensor, target: Tensor) -> Tensor:
        NOW[0](self)
        return mse_loss(output, target)


def rate() -> float:
    return RATE


def set_variable(_: Model) -> None:
    global RATE
    RATE *= 0.5


def count_calls(_: Model) -> None:
    global CALLS
    CALLS += 1


def halve(name: str) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, getattr(module, name) * 0.5)


def nothing(_: Model) -> None:
    pass


def on_class(model: Model) -> None:
    Model.shared *= 0.5


NOW: list[Callable[[Model], Any]] = [nothing]

REFUSED: dict[str, tuple[Callable[[Model], Any], str]] = {
    "attribute": (halve("temperature"), "temperature"),
    "late attribute": (halve("late"), "late"),
    "buffer in place": (lambda m: m.scale.mul_(0.5), "scale"),
    "buffer": (halve("other"), "other"),
    "entry": (lambda m: m.by_name.update(temperature=0.5), "by_name.temperature"),
    "nested": (lambda m: m.by_name["nested"].__setitem__(0, 0.5), "by_name.nested[0]"),
    "object": (lambda m: halve("scale")(m.settings), "settings.scale"),
    "tensor": (lambda m: m.plain.mul_(0.5), "plain"),
    "part": (lambda m: halve("temperature")(m.layers[0].core), "layers.0.core.temperature"),
    "module of torch": (lambda m: setattr(m.layers[0].dropout, "p", 0.5), "layers.0.dropout.p"),
    "by vars": (lambda m: halve("factor")(m.layers[0].core), "layers.0.core.factor"),
    "inner part": (lambda m: halve("temperature")(m.layers[1].core), "layers.1.core.temperature"),
    "buffer of a part": (lambda m: m.layers[0].core.bias.add_(0.5), "layers.0.core.bias"),
    "new buffer of a part": (lambda m: setattr(m.layers[0].core, "bias", torch.ones(())), "layers.0.core.bias"),
    "state": (lambda m: setattr(m.layers[0], "hidden", None), "layers.0.hidden"),
    "variable": (set_variable, f"{__name__}.RATE"),
    "class": (on_class, "Model.shared"),
}
ALLOWED: dict[str, Callable[[Model], Any]] = {
    "nothing": nothing,
    "counter": lambda m: setattr(m, "iterations", m.iterations + 1),
    "new attribute": lambda m: setattr(m, "last_loss", 0.5),
    "log": lambda m: m.log["loss"].append(0.5),
    "buffer": lambda m: m.count.add_(1),
    "part": lambda m: setattr(m.layers[0], "seen", 0.5),
    "last part": lambda m: halve("temperature")(m.layers[3].core),
    "object": lambda m: halve("unread")(m.settings),
    "variable": count_calls,
}


class Trainer:
    def __init__(self, model: Model) -> None:
        self.model = model

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.model.loss_function(output, target)


class Criterion(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = [model]

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.model[0].loss_function(output, target)


WAYS: dict[str, Callable[[Model], Any]] = {
    "method": lambda model: model.loss_function,
    "lambda": lambda model: lambda output, target: model.loss_function(output, target),
    "partial": lambda model: partial(Model.loss_function, model),
    "trainer": lambda model: Trainer(model).loss,
    "module": Criterion,
}


def made() -> Model:
    torch.manual_seed(0)
    return Model()


X = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)


def plays(group: Any, schedule: str, way: str, count: int) -> dict[str, str]:
    """By case that is wrong, what is wrong with it. All cases share a pipeline, since none changes anything."""
    wrong, model = {}, made()
    with zb.Pipeline(zb.split(model, example=X[:2]), schedule, count, WAYS[way](model), group=group) as pipe:
        NOW[0] = nothing
        before = pipe.step(X, X)
        NOW[0] = REFUSED["buffer of a part"][0]
        with raises(zb.InputError, "layers.0.core.bias"):
            pipe.eval_step(X, X)  # before an optimizer steps, when this rank has the tensors of others
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
        for name, (sets, refused) in REFUSED.items():
            optimizer.step()
            optimizer.zero_grad()
            for call in (pipe.step, pipe.eval_step):
                NOW[0] = sets
                try:
                    wrong[name] = f"{call.__name__} gives {call(X, X)}"
                except zb.InputError as error:
                    if repr(refused) not in str(error):
                        wrong[name] = str(error)
            if any(parameter.grad is not None for parameter in pipe.parameters()):
                wrong[name] = "leaves gradients"
            NOW[0] = nothing
            for layer in model.layers:
                layer.hidden = None
            after = pipe.step(X, X)
            if abs(after - before) > 1e-12:
                wrong[name] = f"is not undone: {after} for {before}"
    return wrong


CASES = [("1f1b", "method", 1), ("1f1b", "lambda", 2), ("zb-h1", "partial", 4), ("zb-v", "trainer", 2), ("1f1b", "module", 2)]


@pytest.mark.parametrize(("schedule", "way", "count"), CASES)
def test_what_forwards_read_is_refused_and_undone(world: Ranks, schedule: str, way: str, count: int) -> None:
    assert world.run(plays, schedule, way, count, ranks=2) == [{}, {}]


def on_two_routes(group: Any) -> str:
    model = made()
    with zb.Pipeline(zb.split(model, example=X[:2]), "dualpipe", 4, model.loss_function, group=group) as pipe:
        NOW[0] = ALLOWED["last part"]
        with raises(zb.InputError, "layers.3.core.temperature") as caught:
            pipe.step(X, X)
        return str(caught.value)


def test_what_each_of_two_ranks_would_set_for_its_microbatches_is_refused(world: Ranks) -> None:
    first, second = world.run(on_two_routes, ranks=2)
    assert first == second


def set_all(model: Model) -> None:
    for sets in ALLOWED.values():
        sets(model)


def losses_of(step: Callable[[], Tensor], parameters: Iterable[nn.Parameter]) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    NOW[0], losses = set_all, []
    for _ in range(3):
        losses.append(step().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def one_device(model: Model, count: int) -> Tensor:
    losses = []
    for x in X.chunk(count):
        losses.append(model.loss_function(model(x), x) / count)
        losses[-1].backward()
    return torch.stack(losses).sum().detach()


def trained(group: Any, schedule: str, way: str, count: int) -> tuple[list[float], list[float]]:
    """The losses of a pipeline and of one device, if `loss_fn` sets what no forward of another stage reads."""
    alone, model = made(), made()
    with zb.Pipeline(zb.split(model, example=X[:2]), schedule, count, WAYS[way](model), group=group) as pipe:
        losses = losses_of(lambda: pipe.step(X, X), pipe.parameters())
    return losses, losses_of(partial(one_device, alone, count), alone.parameters())


@pytest.mark.parametrize(("schedule", "way", "count"), CASES)
def test_what_no_forward_of_another_stage_reads_is_allowed(world: Ranks, schedule: str, way: str, count: int) -> None:
    for losses, expected in world.run(trained, schedule, way, count, ranks=2):
        assert losses == pytest.approx(expected, abs=1e-12)
