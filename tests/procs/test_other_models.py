"""`zb.split` of models other than causal language models: two steps match one device, including running statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from docs.other_models import cut_models
from tests.other_families import (
    FAMILIES,
    TOLERANCE,
    Example,
    loss_of_all_outputs,
    numbers,
    relative,
    sequence_to_sequence,
    shaken,
    without_cache,
)
from tests.procs.ranks import Ranks

pytestmark = pytest.mark.spread

MICROBATCHES = 2


class Doubling(nn.Module):
    """Two convolutions with statistics of the batch, of which the first is changed in place."""

    def __init__(self, given: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(given, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class UNet(nn.Module):
    """Lists of lists of parts, skips that are concatenated, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (3, 4, 4)
        self.down = nn.ModuleList(nn.ModuleList([Doubling(size), nn.Conv2d(4, 4, 2, stride=2)]) for size in sizes)
        self.up = nn.ModuleList(nn.ModuleList([nn.ConvTranspose2d(4, 4, 2, stride=2), nn.ModuleDict({"both": Doubling(8)})]) for _ in sizes)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4, 1, 1)) for _ in sizes)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(next(self.up.parameters()).dtype)
        kept: list[Tensor] = []
        down: Any = zip(self.scales, self.down, strict=True)
        for scale, (layer, smaller) in down:
            kept.append(self.act(layer(x)) * scale)
            x = smaller(kept[-1])
        up: Any = self.up
        for larger, parts in up:
            x = parts["both"](torch.cat([larger(x), kept.pop()], 1))
        return x


def u_net() -> Example:
    return Example(shaken(UNet()), {"x": numbers(4, 3, 16, 16)})


TOLERANCES = {"ovis2": 1e-6, "swiftformer": 1e-10, "cvt": 1e-10, "googlenet": 1e-9}
"""For models with more rounding: one computes a part in float32, whatever type it is of; norms over two samples make the others' larger."""
CASES: dict[str, tuple[Callable[[], Example], str | None]] = {  # without a schedule: one planned for the layers of the model
    "u_net": (u_net, "zb-v"),
    "t5": (lambda: sequence_to_sequence("t5"), None),
}


def one_device(model: nn.Module, inputs: Mapping[str, Any], targets: Tensor) -> Tensor:
    """The loss of a step over the same microbatches, whose gradients are in the model."""
    total = torch.zeros((), dtype=torch.float64)
    for j, part in enumerate(microbatches(inputs)):
        loss = loss_of_all_outputs(model(**without_cache(model), **part), targets.tensor_split(MICROBATCHES)[j]) / MICROBATCHES
        loss.backward()
        total += loss.detach()
    return total


def microbatches(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{name: value.tensor_split(MICROBATCHES)[j] for name, value in inputs.items()} for j in range(MICROBATCHES)]


def differences(group: Any, example: Example, schedule: Any, **options: Any) -> dict[str, float]:
    """By name: how far losses, gradients of the first step, and parameters and buffers after two steps are from one device."""
    model, inputs = example
    plain, targets = copy.deepcopy(model), torch.zeros(4)
    worst: dict[str, float] = {}
    # Patches of images in rows are more than samples: then the microbatches are given themselves.
    is_cut = len({len(value) for value in inputs.values()}) > 1
    given = (microbatches(inputs), list(targets.tensor_split(MICROBATCHES))) if is_cut else (dict(inputs), targets)
    with zb.Pipeline(zb.split(model, example=inputs, **options), schedule, MICROBATCHES, loss_of_all_outputs, group=group) as pipe:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-4) for each in (pipe, plain)]
        for step in range(2):
            loss = pipe.step(*given)
            worst[f"loss {step}"] = relative(loss, one_device(plain, inputs, targets))
            if step == 0:
                worst |= _apart(pipe, plain, "gradient")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return worst | _apart(pipe, plain, "value") | _statistics(pipe, plain)


def _apart(pipe: zb.Pipeline, plain: nn.Module, what: str) -> dict[str, float]:
    names = dict(plain.named_parameters(remove_duplicate=False))
    found = {}
    for module in pipe.modules.values():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found[f"{what} {name}"] = relative(*(each.detach() if what == "value" else each.grad for each in (parameter, names[name])))
    return found


def _statistics(pipe: zb.Pipeline, plain: nn.Module) -> dict[str, float]:
    buffers = dict(plain.named_buffers(remove_duplicate=False))
    held = [pair for module in pipe.modules.values() for pair in module.named_buffers(remove_duplicate=False)]
    return {f"buffer {name}": relative(own.double(), buffers[name].double()) for name, own in held if own.isfinite().all()}


def judge(message: list[dict[str, float]], model: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Every parameter is held by some rank, and nothing differs from one device."""
    held = {name.removeprefix("value ") for of_rank in message for name in of_rank if name.startswith("value ")}
    assert held == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wrong = {name: error for of_rank in message for name, error in of_rank.items() if not error <= tolerance}
    assert not wrong


def train(group: Any, name: str) -> dict[str, float]:
    make, schedule = CASES[name]
    example = make()
    if schedule is not None:
        return differences(group, example, schedule)
    layers = zb.split(example.model, example=example.inputs).layers()
    return differences(group, example, zb.plan(layers, MICROBATCHES, placements=zb.Placement.vee(2), evaluations=0))


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_models_that_are_no_chain_train_with_the_numbers_of_one_device(world: Ranks, name: str) -> None:
    """A U-net with statistics of the batch, and T5, whose blocks share their position bias, on a plan for the times of its own layers."""
    judge(world.run(train, name, ranks=2), CASES[name][0]().model)


def train_family(group: Any, kind: str, name: str, schedule: str) -> dict[str, float]:
    return differences(group, FAMILIES[kind][name](), schedule)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # libraries of models warn of much
@pytest.mark.parametrize(("kind", "name"), cut_models())
def test_a_model_of_the_page_trains_with_the_numbers_of_one_device(world: Ranks, kind: str, name: str) -> None:
    """Every model that docs/other_models.md says can be cut, with two stages or with four."""
    schedule = "zb-v" if len(name) % 2 else "1f1b"
    results = world.run(train_family, kind, name, schedule, ranks=2, seconds=550)
    judge(results, FAMILIES[kind][name]().model, TOLERANCES.get(name, TOLERANCE))


class SplitsByLengths(nn.Module):
    """A part that takes a sequence apart where `lengths` says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.cat([self.linear(part).cumsum(0) for part in x.split(lengths.tolist())])


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SplitsByLengths() for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, lengths)
        return x


def test_parts_take_lengths_that_come_from_the_model_s_arguments() -> None:
    """Other stages do not run such a part with numbers, and know the lengths; others than the example's have their own forms."""
    model = Sequences().double()
    split = zb.split(model, example={"x": numbers(6, 4), "lengths": torch.tensor([2, 4])})
    stages = [split(stage, 3) for stage in range(3)]
    for lengths in ([2, 4], [5, 1], [1, 1, 4]):
        arguments = {"x": numbers(6, 4), "lengths": torch.tensor(lengths)}
        given: Any = arguments
        for stage in stages:
            given = stage(**given)
        assert torch.equal(given, model(**arguments))


class Remembering(nn.Module):
    """A part that keeps what it gave last, with its gradient, in an object of its own."""

    class State:
        last: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = self.State()

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.state.last = self.linear(x).tanh()
        return self.last


def test_a_model_that_ran_before_is_cut_though_its_parts_keep_what_they_computed() -> None:
    model = nn.Sequential(*(Remembering() for _ in range(3))).double()
    plain = copy.deepcopy(model)
    x = numbers(6, 4)
    expected = plain(x)
    expected.square().sum().backward()
    model(x)
    split = zb.split(model, example=x)
    given: Any = x
    for stage in range(3):
        given = split(stage, 3)(given) if stage == 0 else split(stage, 3)(**given)
    given.square().sum().backward()
    assert torch.equal(given, expected)
    assert split.layers()
    assert all(torch.equal(own.grad, other.grad) for own, other in zip(model.parameters(), plain.parameters(), strict=True))


def with_frozen_encoder() -> Example:
    """T5 whose encoder does not train; the embedding, which the decoder uses, too, does not either."""
    example = sequence_to_sequence("t5")
    example.model.get_encoder().requires_grad_(False)
    return example


def train_behind_a_frozen_encoder(group: Any) -> tuple[dict[str, float], list[str]]:
    example = with_frozen_encoder()
    cuts = ["encoder.block.3", "decoder.block.0", "decoder.block.2"]
    split = zb.split(example.model, example=example.inputs, cuts=cuts)
    with zb.Pipeline(split, "zb-h1", MICROBATCHES, loss_of_all_outputs, group=group) as pipe:
        message = str(pipe.describe(example.inputs, torch.zeros(4))).splitlines()
    return differences(group, example, "zb-h1", cuts=cuts), [line for line in message if line.startswith("stage")]


@pytest.mark.long
def test_a_frozen_encoder_has_forwards_alone_and_is_priced_so(world: Ranks) -> None:
    found = world.run(train_behind_a_frozen_encoder, ranks=4)
    model, inputs = with_frozen_encoder()
    judge([errors for errors, _ in found], model)
    assert all("only F, nothing trains here" in line for line in found[0][1][:2])
    layers = zb.split(model, example=inputs).layers()
    assert all((layer.backward, layer.weight) == (0, 0) for layer in layers if layer.name.startswith("encoder."))
    assert all(layer.weight > 0 for layer in layers if layer.name.startswith("decoder.block."))
