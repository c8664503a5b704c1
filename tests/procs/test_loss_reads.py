"""What `loss_fn` reads of the model itself equals one device, or all ranks refuse the step and the pipeline stays open."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.refusals import raises

Loss = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Linear):
    """Keeps in attributes what a loss or a metric may want."""

    def __init__(self) -> None:
        super().__init__(8, 8, dtype=torch.float64)
        self.early = 0.0
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        self.early = self.late = y.square().mean()
        self.weights = y.detach()
        self.kept = [y.mean()]
        self.length = len(x)
        return y


class Model(nn.Module):
    """Layers in a list, whose model keeps what lies between them and a constant that its user sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.register_buffer("scale", torch.tensor(1.25, dtype=torch.float64))
        self.beta = 0.5
        self.calls = 0
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))
        self.hidden: list[Tensor] = []
        self.recent: deque[Tensor] = deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.passes += 1
        self.hidden.clear()
        for index, layer in enumerate(self.layers):
            x = layer(x)
            self.hidden.append(x)
            self.recent.append(x)
            if index == 1:
                self.latent = x
        self.loss = x.abs().mean()
        return x

    def penalty(self) -> Tensor:
        return torch.stack([parameter.square().sum() for parameter in self.layers[1:].parameters()]).sum()


def over(model: Model, term: Callable[[Any], Tensor]) -> Tensor:
    return torch.stack([term(layer) for layer in model.layers]).sum()


class Case(NamedTuple):
    """A `term` of the loss, and the name of what is refused in it; empty if it equals one device."""

    term: Callable[[Model, Tensor], Tensor]
    refused: str = ""


CASES = {
    "penalty": Case(lambda m, o: m.penalty(), "layers.1.weight"),
    "no gradient": Case(lambda m, o: m.layers[1].weight.detach().norm() * o.mean(), "layers.1.weight"),
    "by name": Case(lambda m, o: dict(m.named_parameters())["layers.1.bias"].abs().sum(), "layers.1.bias"),
    "decoder": Case(lambda m, o: linear(o, m.layers[1].weight).mean(), "layers.1.weight"),
    "late": Case(lambda m, o: torch.stack([x.late for x in m.modules() if hasattr(x, "late")]).sum(), "late"),
    "early": Case(lambda m, o: o.mean() + sum(layer.early for layer in m.layers), "early"),
    "list": Case(lambda m, o: o.mean() + sum(sum(layer.kept) for layer in m.layers), "kept"),
    "maps": Case(lambda m, o: (o * m.layers[1].weights).mean(), "weights"),
    "length": Case(lambda m, o: o.sum() / m.layers[0].length, "length"),
    "latent": Case(lambda m, o: m.latent.square().mean(), "latent"),
    "hidden": Case(lambda m, o: torch.stack(m.hidden).square().mean(), "hidden"),
    "recent": Case(lambda m, o: o.mean() * m.recent[0].mean(), "recent"),
    "swallowed": Case(lambda m, o: o.mean() * swallowed(m), "latent"),
    "loss": Case(lambda m, o: m.loss, "loss"),
    "calls": Case(lambda m, o: o.mean() * m.calls, "calls"),
    "passes": Case(lambda m, o: o.mean() * m.passes, "passes"),
    "last weight": Case(lambda m, o: m.layers[3].weight.square().sum() * m.layers[3].weight.norm()),
    "last attribute": Case(lambda m, o: m.layers[3].late + m.layers[3].kept[0] * m.layers[3].weights.sum()),
    "last part": Case(lambda m, o: m.layers[3](o).mean()),
    "settings": Case(lambda m, o: o.mean() * m.beta * m.scale + len(m.layers) + sum(p.numel() for p in m.parameters())),
}


def swallowed(model: Model) -> float:
    try:
        return model.latent.mean().item()
    except Exception:
        return 0.0


def made() -> Model:
    torch.manual_seed(0)
    return Model()


X = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)


def one_device(model: Model, loss: Callable[[Model], Loss], count: int = 2) -> Tensor:
    losses = []
    for x in X.chunk(count):
        losses.append(loss(model)(model(x), x) / count)
        losses[-1].backward()
    return torch.stack(losses).sum().detach()


def plays(group: Any, schedule: str, is_warm: bool) -> dict[str, str]:
    """By case that is wrong, what is wrong with it: another error than expected, or other numbers than on one device."""
    wrong, now = {}, [CASES["settings"]]

    def loss(model: Model) -> Loss:
        return lambda output, target: mse_loss(output, target) + 0.1 * now[0].term(model, output)

    model = made()
    if is_warm:
        model(X)
    with zb.Pipeline(zb.split(model, example=X[:2]), schedule, 2, loss(model), group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
        for name, case in CASES.items():
            now[0] = case
            whole = made()
            expected = one_device(whole, loss)
            for call in (pipe.step, pipe.eval_step) if name not in ("penalty", "no gradient", "by name", "decoder") else (pipe.step,):
                text = ""
                try:
                    result = call(X, X)
                except zb.InputError as error:
                    text = str(error)
                    optimizer.zero_grad()
                    if not case.refused or repr(case.refused) not in text:
                        wrong[name] = text
                    continue
                value = result[0] if isinstance(result, tuple) else result
                if case.refused:
                    wrong[name] = f"{call.__name__} gives {value}, one device {expected}"
                elif abs(value - expected) > 1e-9:
                    wrong[name] = f"{value} for {expected}"
                elif call == pipe.step:
                    error = largest_error(pipe, model, whole)
                    if error > 1e-9:
                        wrong[name] = f"gradients differ by {error}"
            optimizer.step()
            optimizer.zero_grad()
    return wrong


def test_reads(world: Ranks) -> None:
    for schedule, is_warm in (("1f1b", False), ("zb-v", True)):
        assert world.run(plays, schedule, is_warm, ranks=2) == [{}, {}]


class Criterion(nn.Module):
    """A loss that holds a whole model, or some layers of it."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        penalty = torch.stack([parameter.abs().sum() for parameter in self.held.parameters()]).sum()
        return mse_loss(output, target) + 0.1 * penalty


def held(group: Any) -> tuple[str, float]:
    """The error for a criterion that holds the model, and the error of gradients of one that holds the last layer."""
    with raises(zb.InputError, name="layers.0.weight") as caught:
        model = made()
        zb.Pipeline(zb.split(model, example=X[:2]), "1f1b", 2, Criterion(model), group=group)
    model, whole = made(), made()
    one_device(whole, lambda model: Criterion(model.layers[3]))
    with zb.Pipeline(zb.split(model, example=X[:2]), "1f1b", 2, Criterion(model.layers[3]), group=group) as pipe:
        pipe.step(X, X)
        return str(caught.value), largest_error(pipe, model, whole)


def largest_error(pipe: zb.Pipeline, model: nn.Module, whole: nn.Module) -> float:
    own = set(pipe.parameters())
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    errors = [(ours.grad - theirs.grad).abs().max().item() for ours, theirs in pairs if ours in own]  # type: ignore[operator]
    return max(errors)


def test_modules_that_hold_the_model(world: Ranks) -> None:
    (first, _), (second, _) = results = world.run(held, ranks=2)
    assert first == second
    assert max(error for _, error in results) < 1e-12


class Returning(Model):
    """Returns what its loss needs, and adds the losses of its layers."""

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return output, self.latent


class Adding(Layer):
    """Adds to the loss what a layer computes."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        zb.nn.add_loss("late", 0.1 * self.late)
        return y


def remedied(group: Any) -> list[float]:
    """The errors of gradients with the three remedies."""

    def loss(output: Any, target: Tensor) -> Tensor:
        return mse_loss(output[0], target) + output[1].square().mean()

    model, whole = Returning(), Returning()
    for one in (model, whole):
        torch.manual_seed(0)
        one.layers = nn.ModuleList(Adding() for _ in range(4))
    for x in X.chunk(2):
        with zb.nn.collecting_losses() as added:
            output = whole(x)
        ((loss(output, x) + sum(added.values())) / 2).backward()
    with zb.Pipeline(zb.split(model, example=X[:2]), "1f1b", 2, loss, group=group) as pipe:
        pipe.step(X, X)
        errors = [largest_error(pipe, model, whole)]
        whole.penalty().backward()
        for parameter in set(pipe.parameters()) - set(model.layers[0].parameters()):
            assert parameter.grad is not None
            parameter.grad.add_(2 * parameter.detach())
        return [*errors, largest_error(pipe, model, whole)]


def test_remedies(world: Ranks) -> None:
    assert max(error for errors in world.run(remedied, ranks=2) for error in errors) < 1e-12


def after_late_faults(group: Any) -> list[tuple[bool, bool, float]]:
    """By schedule and accumulation: whether an error reports dropped gradients, whether all are None, and the error of the next step."""
    results = []
    for schedule in ("1f1b", "zb-v"):
        for accumulates in (False, True):
            model, whole, number = made(), made(), [0]

            def loss(output: Tensor, target: Tensor, model: Model = model, number: list[int] = number) -> Tensor:
                number[0] += 1
                return mse_loss(output, target) + (model.latent.mean() if number[0] == 3 else 0)

            with zb.Pipeline(zb.split(model, example=X[:2]), schedule, 4, loss, group=group) as pipe:
                if accumulates:
                    number[0] = 4
                    pipe.step(X, X)
                number[0] = 0
                with raises(zb.InputError, "latent") as caught:
                    pipe.step(X, X)
                are_none = all(parameter.grad is None for parameter in pipe.parameters())
                pipe.step(X, X)
                one_device(whole, lambda _: mse_loss, 4)
                results.append(("dropped" in str(caught.value), are_none, largest_error(pipe, model, whole)))
    return results


def test_a_fault_in_a_later_microbatch_leaves_no_gradient(world: Ranks) -> None:
    for results in world.run(after_late_faults, ranks=2):
        assert [found[:2] for found in results] == [(False, True), (True, True)] * 2
        assert max(error for *_, error in results) < 1e-12


class Recorder:
    """Keeps what hooks see."""

    def __init__(self) -> None:
        self.outputs: dict[int, Tensor] = {}
        self.log: list[float] = []
        self.last: Tensor | None = None

    def output(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs[id(layer.weight)] = output

    def attribute(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        layer.seen = output  # type: ignore[assignment]

    def latest(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.last = output

    def mean(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.log.append(output.mean().item())


def logged(record: Recorder, output: Tensor) -> float:
    record.log.append(output.mean().item())
    return 0.0


class Hooked(NamedTuple):
    """A hook on some layers, a term of the loss, and whether that is refused."""

    hook: Callable[[Recorder], Callable[..., None]]
    layers: slice
    term: Callable[[Recorder, Model, Tensor], Any]
    is_refused: bool = True


HOOKED = {
    "missing": Hooked(lambda r: r.output, slice(0, 1), lambda r, m, o: r.outputs[id(m.layers[0].weight)].mean()),
    "all": Hooked(lambda r: r.output, slice(0, 4), lambda r, m, o: sum(output.mean() for output in r.outputs.values())),
    "attribute": Hooked(lambda r: r.attribute, slice(0, 4), lambda r, m, o: sum(y.seen.mean() for y in m.layers if hasattr(y, "seen"))),
    "latest": Hooked(lambda r: r.latest, slice(1, 2), lambda r, m, o: 0.0 if r.last is None else r.last.mean()),
    "last part": Hooked(
        lambda r: r.output, slice(3, 4), lambda r, m, o: r.outputs[id(m.layers[3].weight)].square().mean(), is_refused=False
    ),
    "log": Hooked(lambda r: r.mean, slice(0, 4), lambda r, m, o: logged(r, o), is_refused=False),
    "unread": Hooked(lambda r: r.output, slice(0, 2), lambda r, m, o: 0.0, is_refused=False),
}


def with_hooks(group: Any, schedule: str) -> dict[str, str]:
    """By case that is wrong, what is wrong with two steps of a model that gets hooks once the pipeline stands."""
    wrong = {}
    for name, case in HOOKED.items():
        model, whole, ours, theirs = made(), made(), Recorder(), Recorder()

        def loss(output: Tensor, target: Tensor, record: Recorder, model: Model, case: Hooked = case) -> Any:
            return mse_loss(output, target) + case.term(record, model, output)

        with zb.Pipeline(zb.split(model, example=X[:2]), schedule, 2, partial(loss, record=ours, model=model), group=group) as pipe:
            for one, record in ((model, ours), (whole, theirs)):
                for layer in one.layers[case.layers]:  # type: ignore[union-attr]
                    layer.register_forward_hook(case.hook(record))
            one_device(whole, lambda whole, record=theirs, loss=loss: partial(loss, record=record, model=whole))  # type: ignore[misc]
            for _ in range(2):
                try:
                    pipe.step(X, X)
                except zb.InputError as error:
                    if not case.is_refused or "hook" not in str(error) or any(p.grad is not None for p in pipe.parameters()):
                        wrong[name] = str(error)
                    continue
                if case.is_refused:
                    wrong[name] = "no error"
                elif largest_error(pipe, model, whole) > 1e-12:
                    wrong[name] = "other gradients"
                for parameter in pipe.parameters():
                    parameter.grad = None
    return wrong


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_what_hooks_on_other_parts_store(world: Ranks, schedule: str) -> None:
    assert world.run(with_hooks, schedule, ranks=2) == [{}, {}]


def in_evaluation(group: Any, schedule: str) -> tuple[list[float], list[bool]]:
    """The losses of evaluations that depend on the modes of the model and of its first and last layer, and all modes afterwards."""
    model = made()
    model.layers[1].eval()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        modes = [model.training, model.layers[0].training, model.layers[3].training]
        return mse_loss(output, target) * (1 + modes.count(True))

    with zb.Pipeline(zb.split(model, example=X[:2]), schedule, 2, loss, group=group) as pipe:
        found = [float(pipe.eval_step(X, X)[0]) for _ in range(2)]  # type: ignore[arg-type]
        found.append(float(pipe.step(X, X)))
    return found, [part.training for part in model.modules()]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_an_evaluation_sets_the_mode_of_the_whole_model(world: Ranks, schedule: str) -> None:
    expected = mse_loss(made()(X), X).item()
    for found, modes in world.run(in_evaluation, schedule, ranks=2):
        assert found == pytest.approx([expected, expected, 4 * expected], rel=1e-12)
        assert [place for place, mode in enumerate(modes) if not mode] == [3]
