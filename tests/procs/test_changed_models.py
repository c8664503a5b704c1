"""A model that is changed after `zb.split` computes what it computes on one device with the same change, or all ranks raise `InputError`.

Each cell of the table is a place in the model and a kind of change, made before the pipeline is created or between its calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.refusals import raises, states
from zerobubble.errors import InputError, PipelineError

WIDTH, MICROBATCHES, TOLERANCE = 4, 4, 1e-9
loss_fn = nn.functional.mse_loss


class Scaled(nn.Module):
    """What can be changed in a place: an attribute, a buffer, a parameter, the mode, a child, the class and the forward."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.factors = {"all": [1.0]}
        self.gain: nn.Parameter | None = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("shift", torch.rand(WIDTH))
        self.act: nn.Module = nn.Tanh()

    def scaled(self, x: Tensor) -> Tensor:
        x = self.act((x if self.gain is None else x * self.gain) + self.shift) * self.factor * self.factors["all"][0]
        return x if self.training else 2 * x

    def inside(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.scaled(x))


class Deep(Scaled):
    pass


class Part(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.deep = Deep()

    def inside(self, x: Tensor) -> Tensor:
        return x + self.deep(self.fc(x))


class Body(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Part() for _ in range(4))

    def inside(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (1 if layer.training else 3) * layer.factor
        return x


class Plain(nn.Module):
    """A module without parameters around the parts."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.factors = {"all": [1.0]}
        self.register_buffer("shift", torch.rand(WIDTH))
        self.act: nn.Module = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x + self.shift) * self.factor * self.factors["all"][0]
        return x if self.training else 2 * x


class Net(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.plain = Plain()

    def inside(self, x: Tensor) -> Tensor:
        return self.plain(self.body(x)) * self.factor


def other_class(place: nn.Module) -> None:
    kind = type(place)
    place.__class__ = type(f"Other{kind.__name__}", (kind,), {"forward": lambda self, x: 1.5 * kind.forward(self, x)})  # type: ignore[assignment]


def other_forward(place: nn.Module) -> None:
    kind = type(place)
    place.forward = MethodType(lambda self, x: 1.5 * kind.forward(self, x), place)  # type: ignore[method-assign]


def load_assigned(place: nn.Module) -> None:
    place.load_state_dict({name: 1.25 * tensor for name, tensor in place.state_dict().items()}, assign=True)


def double_gradients(_: nn.Module, gradients: tuple[Tensor | None, ...], __: Any = None) -> tuple[Tensor | None, ...]:
    return tuple(gradient if gradient is None else 2 * gradient for gradient in gradients)


PLACES: dict[str, Callable[[Any], Any]] = {
    "root": lambda model: model,
    "around parts": lambda model: model.body,
    "part": lambda model: model.body.layers[1],
    "last part": lambda model: model.body.layers[3],
    "deep": lambda model: model.body.layers[1].deep,
    "without parameters": lambda model: model.plain,
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda place: setattr(place, "factor", 1.5),
    "entry of a list": lambda place: place.factors["all"].__setitem__(0, 1.5),
    "forward pre-hook": lambda place: place.register_forward_pre_hook(lambda _, args: (1.5 * args[0],)),
    "forward hook": lambda place: place.register_forward_hook(lambda _, __, output: 1.5 * output),
    "backward hook": lambda place: place.register_full_backward_hook(double_gradients),
    "backward pre-hook": lambda place: place.register_full_backward_pre_hook(double_gradients),
    "buffer": lambda place: setattr(place, "shift", 1.5 * place.shift),
    "buffer in place": lambda place: place.shift.mul_(1.5),
    "buffer through its data": lambda place: place.shift.data.mul_(1.5),
    "data of a buffer": lambda place: setattr(place.shift, "data", 1.5 * place.shift),
    "new buffer": lambda place: place.register_buffer("more", torch.ones(WIDTH)),
    "parameter": lambda place: setattr(place, "gain", nn.Parameter(1.5 * place.gain.detach())),
    "parameter in place": lambda place: place.gain.data.mul_(1.5),
    "new parameter": lambda place: setattr(place, "more", nn.Parameter(torch.ones(WIDTH))),
    "removed parameter": lambda place: setattr(place, "gain", None),
    "frozen": lambda place: place.gain.requires_grad_(False),
    "assigned state": load_assigned,
    "mode": lambda place: place.eval(),
    "class": other_class,
    "child": lambda place: setattr(place, "act", nn.ReLU()),
    "new child": lambda place: setattr(place, "act", nn.Sequential(place.act, nn.Linear(WIDTH, WIDTH).double())),
    "forward": other_forward,
}
WITHOUT_PARAMETERS = {"parameter", "parameter in place", "new parameter", "removed parameter", "frozen"}
CELLS = [(place, change) for place in PLACES for change in CHANGES if not (place == "without parameters" and change in WITHOUT_PARAMETERS)]
HOOKS = {name for name in CHANGES if "hook" in name}
NEVER = {
    *(("root", change) for change in {*HOOKS, "forward"}),
    *(("around parts", change) for change in ("forward", "backward hook")),
}
"""Cells that `zb.split` itself refuses."""
LATER = {
    *NEVER,
    *((place, change) for place in ("root", "around parts") for change in ("new parameter", "removed parameter", "new child")),
    *(("without parameters", change) for change in ("new child", "forward")),
}
"""Cells that are refused once the pipeline stands."""


def microbatches(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.chunk(MICROBATCHES) for tensor in tensors), strict=True)


class OneDevice:
    """The model on one device."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.model.zero_grad()
        losses = [loss_fn(self.model(a), b) / MICROBATCHES for a, b in microbatches(x, y)]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).sum().detach()

    def eval_step(self, x: Tensor, y: Tensor) -> Tensor:
        modes = {part: part.training for part in self.model.modules()}
        self.model.eval()
        with torch.no_grad():
            loss = loss_fn(self.model(x), y)
        for part, mode in modes.items():
            part.training = mode
        return loss


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, WIDTH, dtype=torch.float64, generator=draw) for _ in range(2))
    return x, y


def far(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if all(each is None or not each.any() for each in (ours, theirs)) else float("inf")
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-9)).item()


def error_of_calls(pipe: zb.Pipeline, single: OneDevice) -> float:
    """The largest error of the loss, the gradients of this rank and the loss of an evaluation."""
    for parameter in pipe.parameters():
        parameter.grad = None
    loss, expected = pipe.step(*batch()), single.step(*batch())
    theirs = dict(single.model.named_parameters(remove_duplicate=False))
    ours = [pair for module in pipe.modules.values() for pair in module.named_parameters(remove_duplicate=False)]
    found = [far(loss, expected), *(far(parameter.grad, theirs[name].grad) for name, parameter in ours)]
    evaluated, _ = pipe.eval_step(*batch())
    return max(*found, far(evaluated, single.eval_step(*batch())))


def outcome(group: Any, place: str, change: str, when: str, schedule: str, **options: Any) -> float | str:
    """The error of the changed model, or the text of its refusal."""
    torch.manual_seed(0)
    model = Net().double()
    single = OneDevice(copy.deepcopy(model))
    changing = [lambda model=model: CHANGES[change](PLACES[place](model)) for model in (single.model, model)]  # type: ignore[misc]
    split = zb.split(model, example=batch()[0][:2])

    def change_both() -> None:
        for apply in changing:
            torch.manual_seed(2)
            apply()

    try:
        if when == "before":
            change_both()
        with zb.Pipeline(split, schedule, MICROBATCHES, loss_fn, group=group, **options) as pipe:
            if when == "before":
                return error_of_calls(pipe, single)
            before = error_of_calls(pipe, single)
            change_both()
            try:
                return max(before, error_of_calls(pipe, single))
            except InputError as error:
                assert pipe._session.guard.closed is None
                return f"InputError: {error}"
    except (InputError, PipelineError) as error:
        return f"{type(error).__name__}: {error}"


def outcomes(group: Any, cells: list[tuple[str, str]], when: str, schedule: str, options: dict[str, Any]) -> list[float | str]:
    return [outcome(group, *cell, when, schedule, **options) for cell in cells]


def check(world: Ranks, cells: list[tuple[str, str]], when: str, schedule: str, **options: Any) -> None:
    refused = LATER if when == "after" else NEVER
    of_ranks = world.run(outcomes, cells, when, schedule, options, ranks=2, seconds=240)
    silent = {}
    for cell, *found in zip(cells, *of_ranks, strict=True):
        if cell in refused:
            good = str(found[0]).startswith("InputError") and len(set(found)) == 1
        else:
            good = all(isinstance(each, float) and each <= TOLERANCE for each in found)
        if not good:
            silent[cell] = found
    assert not silent, "\n".join(f"{cell}: {found}" for cell, found in silent.items())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.sweep
def test_no_change_is_ignored(world: Ranks, place: str, when: str) -> None:
    check(world, [cell for cell in CELLS if cell[0] == place], when, "zb-v" if when == "after" else "1f1b")


class Settings:
    """An object of the user's program, of which a forward reads one attribute."""

    def __init__(self) -> None:
        self.power = 1.0
        self.rate = 0.1


SETTINGS, TABLE, WEIGHT = Settings(), {"weight": 1.0}, 1.0


def counter() -> tuple[Callable[[], float], Callable[[float], None]]:
    """Returns functions that read and set a variable of a closure."""
    number = 1.0

    def put(value: float) -> None:
        nonlocal number
        number = value

    return lambda: number, put


read_number, put_number = counter()


def reset() -> None:
    """Gives all that a `Traced` reads elsewhere the values of the start."""
    SETTINGS.__dict__.update(vars(Settings()))
    TABLE["weight"] = 1.0
    globals()["WEIGHT"] = 1.0
    put_number(1.0)
    Traced.scale = 1.0
    Traced.elsewhere = ELSEWHERE
    globals()["times_weight"] = TIMES_WEIGHT


def times_weight(x: Tensor) -> Tensor:
    return x * WEIGHT


TIMES_WEIGHT = times_weight


class Traced(nn.Module):
    """A model without parts, which is traced."""

    shift: Tensor
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("shift", torch.rand(WIDTH))
        self.factor = 1.0
        self.array = np.ones(2)
        self.act = nn.Tanh()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = self.drop(self.act(x @ weight + self.shift)) * self.factor * float(self.array[1])
        return self.elsewhere(x)

    def elsewhere(self, x: Tensor) -> Tensor:
        return times_weight(x) * self.scale * SETTINGS.power * TABLE["weight"] * read_number()


ELSEWHERE = Traced.elsewhere


OF_TRACES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda _: None, True),
    "attribute": (lambda model: setattr(model, "factor", 2.0), False),
    "child": (lambda model: setattr(model, "act", nn.ReLU()), False),
    "buffer": (lambda model: setattr(model, "shift", 2 * model.shift), False),
    "buffer in place": (lambda model: model.shift.mul_(2), True),
    "parameter": (lambda model: model.weights.__setitem__(1, nn.Parameter(2 * model.weights[1].detach())), False),
    "parameter in place": (lambda model: model.weights[1].data.mul_(2), True),
    "frozen": (lambda model: model.weights[1].requires_grad_(False), True),
    "mode": (lambda model: model.eval(), True),
    "mode of a module": (lambda model: model.drop.eval(), False),
    "hook": (lambda model: model.register_forward_hook(lambda _, __, output: 2 * output), False),
    "deep hook": (lambda model: model.act.register_forward_hook(lambda _, __, output: 2 * output), False),
    "class": (other_class, False),
    "forward": (other_forward, False),
    "array in place": (lambda model: model.array.__setitem__(1, 2.0), False),
    "class attribute": (lambda _: setattr(Traced, "scale", 2.0), False),
    "equal class attribute": (lambda _: setattr(Traced, "scale", float("1.0")), True),
    "object of the program": (lambda _: setattr(SETTINGS, "power", 2.0), False),
    "attribute that no forward reads": (lambda _: setattr(SETTINGS, "rate", 2.0), True),
    "dict of the program": (lambda _: TABLE.update(weight=2.0), False),
    "variable of the program": (lambda _: globals().update(WEIGHT=2.0), False),
    "variable of a closure": (lambda _: put_number(2.0), False),
    "function of the program": (lambda _: globals().update(times_weight=lambda x: 3 * x), False),
    "method": (lambda _: setattr(Traced, "elsewhere", lambda _, x: 3 * x), False),
}


GRAPHS = [
    (place, change) for place in ("root", "part", "deep") for change in ("attribute", "class", "child", "mode", "buffer", "parameter")
]


@pytest.mark.long
def test_stages_split_by_their_graph_follow(world: Ranks) -> None:
    check(world, GRAPHS, "after", "1f1b", split="graph")


def outcomes_of_traces(group: Any) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, (change, _) in OF_TRACES.items():
        torch.manual_seed(0)
        reset()
        model = Traced().double()
        single = OneDevice(copy.deepcopy(model))
        with zb.Pipeline(zb.split(model, example=batch()[0]), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
            assert error_of_calls(pipe, single) <= TOLERANCE
            change(single.model)
            change(model)
            try:
                found[name] = error_of_calls(pipe, single)
            except InputError as error:
                found[name] = f"InputError: {error}"
    return found


def outcomes_before(group: Any, is_made: bool) -> dict[str, float | str]:
    """The error after a change between the trace of a split, in `describe` or as a stage is made, and the pipeline."""
    found: dict[str, float | str] = {}
    for name in BEFORE:
        change, _ = OF_TRACES[name]
        torch.manual_seed(0)
        reset()
        model = Traced().double()
        split = zb.split(model, example=batch()[0])
        stages = [split(group.rank(), 2)] if is_made else split
        split.describe(2)
        single = OneDevice(copy.deepcopy(model))
        change(single.model)
        change(model)
        try:
            with zb.Pipeline(stages, "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
                found[name] = error_of_calls(pipe, single)
        except InputError as error:
            found[name] = f"InputError: {error}"
    reset()
    return found


BEFORE = ["nothing", "attribute", "buffer in place", "variable of the program", "function of the program", "method"]


@pytest.mark.parametrize("is_made", [False, True])
def test_a_change_after_a_trace_and_before_the_pipeline_counts_or_is_refused(world: Ranks, is_made: bool) -> None:
    """It counts until the first stage is made, because the pipeline then traces again."""
    first, second = world.run(outcomes_before, is_made, ranks=2)
    for name, found in first.items():
        counts = OF_TRACES[name][1] or not is_made
        assert (isinstance(found, float) and max(found, second[name]) <= TOLERANCE) == counts, (name, found)
        assert counts or str(found).startswith("InputError"), (name, found)


def made_by_a_function(group: Any) -> list[Any]:
    """A model that each rank makes for its stages: its trace has a global variable, too, which then changes and changes back."""
    reset()
    with zb.Pipeline(zb.split(lambda: Traced().double(), example=batch()[0]), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        before = pipe.step(*batch())
        globals().update(WEIGHT=2.0)
        with pytest.raises(InputError) as error:
            pipe.step(*batch())
        reset()
        return [str(error.value), before, pipe.step(*batch())]


def test_a_trace_of_a_model_that_a_function_makes_refuses_changes(world: Ranks) -> None:
    for text, before, after in world.run(made_by_a_function, ranks=2):
        states(text, "WEIGHT")
        assert torch.equal(before, after)


def test_a_trace_has_changes_of_values_and_refuses_others(world: Ranks) -> None:
    first, second = world.run(outcomes_of_traces, ranks=2)
    for name, (_, counts) in OF_TRACES.items():
        if counts:
            assert max(first[name], second[name]) <= TOLERANCE, name
        else:
            assert str(first[name]).startswith("InputError"), name
            assert first[name] == second[name], name


def others(group: Any) -> list[float]:
    """The largest errors after changes of further kinds, one after the other in one pipeline."""
    torch.manual_seed(0)
    model = Net().double()
    single = OneDevice(copy.deepcopy(model))
    both = single.model, model
    with zb.Pipeline(zb.split(model, example=batch()[0][:2]), "zb-v", MICROBATCHES, loss_fn, group=group) as pipe:
        found = [error_of_calls(pipe, single)]
        handle = model.register_forward_hook(lambda _, __, output: 2 * output)
        calls = pipe.step, pipe.eval_step, pipe.profile, pipe.describe
        for call in calls:
            with raises(InputError, "forward_hooks"):
                call(*batch())
        handle.remove()
        found.append(error_of_calls(pipe, single))  # what was refused is undone
        for each in both:  # several at once, and a module that a stage has only by an attribute
            each.factor, each.body.layers[2].act, each.plain.act = 0.7, nn.Sigmoid(), nn.Sequential(nn.Tanh(), nn.Softplus())
        found.append(error_of_calls(pipe, single))
        for each in both:
            each.plain.act[1].beta, each.plain.training = 2, False
        found.append(error_of_calls(pipe, single))
        for module in pipe.modules.values():  # on the stages themselves
            module.factor = 1.3
        single.model.factor = 1.3
        found.append(error_of_calls(pipe, single))
        for each in both:
            each.train()
            each.body.layers[1].factor = each.body.layers[3].factor = 0.9  # which the code around the parts reads on all stages
        found.append(error_of_calls(pipe, single))
        hooks = [each.body.layers[0].register_forward_hook(lambda _, __, output: 3 * output) for each in both]
        found.append(error_of_calls(pipe, single))
        for hook in hooks:
            hook.remove()
        return [*found, error_of_calls(pipe, single)]


def test_changes_follow_each_other(world: Ranks) -> None:
    for found in world.run(others, ranks=2):
        assert max(found) <= TOLERANCE, found


class Ordered(nn.Module):
    """Layers that run in the order of an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))
        self.order = list(range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = x + self.layers[number](x)
        return x


def orders(group: Any, schedule: str) -> list[float]:
    """The largest errors after changes of the order of parts; an order that leaves a stage and comes back is refused."""
    torch.manual_seed(0)
    model = Ordered().double()
    single = OneDevice(copy.deepcopy(model))
    found = []
    with zb.Pipeline(zb.split(model, example=batch()[0][:2]), schedule, MICROBATCHES, loss_fn, group=group) as pipe:
        for skipped in ([], [1], [5], []):
            single.model.order = model.order = [number for number in range(6) if number not in skipped]
            found.append(error_of_calls(pipe, single))
            model.order = [5, 1, 2, 3, 4, 0]
            for call in (pipe.step, pipe.step, pipe.eval_step, pipe.profile, pipe.describe):
                with raises(InputError, "layers.1", "layers.5"):
                    call(*batch())
            model.order = single.model.order
        return [*found, error_of_calls(pipe, single)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_an_order_of_parts_that_stages_cannot_run_leaves_the_pipeline_open(world: Ranks, schedule: str) -> None:
    for found in world.run(orders, schedule, ranks=2):
        assert max(found) <= TOLERANCE, found


def types(group: Any, when: str) -> float:
    torch.manual_seed(0)
    model = Net()
    single = OneDevice(copy.deepcopy(model).double())
    split = zb.split(model, example=batch()[0][:2].float())
    if when == "before":
        model.double()
    with zb.Pipeline(split, "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        if when == "after":
            x, y = batch()
            pipe.step(x.float(), y.float())
            model.double()
        return error_of_calls(pipe, single)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_type_of_a_model_may_change(world: Ranks, when: str) -> None:
    assert max(world.run(types, when, ranks=2)) <= TOLERANCE


def test_a_part_that_came_or_went_is_counted_until_the_pipeline_stands(world: Ranks) -> None:
    for found in world.run(parts, ranks=2):
        assert found[0] <= TOLERANCE
        assert found[1:] == [True, True]


def parts(group: Any) -> list[Any]:
    torch.manual_seed(0)
    model = Net().double()
    split = zb.split(model, example=batch()[0][:2])
    del model.body.layers[3]
    single = OneDevice(copy.deepcopy(model))
    with zb.Pipeline(split, "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        found: list[Any] = [error_of_calls(pipe, single)]
        for change in (lambda: model.body.layers.append(Part().double()), lambda: setattr(model.body, "layers", model.body.layers[:2])):
            try:
                change()
                pipe.step(*batch())
                found.append(False)
            except InputError as error:
                found.append("module" in str(error))
    return found


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def shared_parameters(group: Any, is_replicated: bool) -> list[str]:
    """What a step says after one part has got another parameter, and the error of a step after that was undone."""
    torch.manual_seed(0)
    model = Tied().double()
    single = OneDevice(copy.deepcopy(model))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")) if is_replicated else None
    options: dict[str, Any] = {"mesh": mesh} if is_replicated else {"group": group}
    part, found = model.layers[1 if is_replicated else 0], []
    with zb.Pipeline(zb.split(model, example=batch()[0][:2]), "1f1b", MICROBATCHES, loss_fn, **options) as pipe:
        before = part.weight
        pipe.step(*batch())
        part.weight = nn.Parameter(before.detach().clone())
        for call in (pipe.step, pipe.eval_step):
            with pytest.raises(InputError) as error:
                call(*batch())
            found.append(str(error.value))
        part.weight = before
        assert error_of_calls(pipe, single) <= TOLERANCE
    return found


@pytest.mark.parametrize("is_replicated", [False, True])
def test_a_parameter_that_several_ranks_hold_may_not_be_replaced(world: Ranks, is_replicated: bool) -> None:
    """All ranks of a pipeline raise one error; replicas name their own ranks."""
    for texts in world.run(shared_parameters, is_replicated, ranks=4 if is_replicated else 2):
        for text in texts:
            states(text, "layers.1.weight" if is_replicated else "layers.0.weight")


class Cell(nn.Module):
    """A recurrent layer that continues from its last call."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = self.gru(x, self.hidden)
        self.hidden = hidden.detach()
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = cell(x)
        return x


def continues(group: Any) -> list[float]:
    """The losses less those of one device, of sequences of several batch sizes, with the hidden state cleared between these."""
    torch.manual_seed(0)
    model = Recurrent().double()
    single, found = copy.deepcopy(model), []
    with zb.Pipeline(zb.split(model, example=torch.rand(6, 3, WIDTH).double()), "1f1b", 1, loss_fn, group=group) as pipe:
        for size in (6, 4, 2):
            for whole in (model, single):
                for cell in whole.cells:
                    cell.hidden = None
            for _ in range(2):
                x = torch.rand(size, 3, WIDTH).double()
                found.append(float((pipe.step(x, x) - loss_fn(single(x), x)).detach()))
    return found


def test_a_cleared_hidden_state_begins_with_another_batch_size(world: Ranks) -> None:
    for found in world.run(continues, ranks=2):
        assert max(map(abs, found)) <= TOLERANCE, found
