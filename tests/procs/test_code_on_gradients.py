"""Code of a forward that acts on gradients, such as hooks: it gets the gradients of one device, or the split is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.refusals import raises, states
from zerobubble.schedules import with_recompute

WIDTH, MICROBATCHES = 4, 4
CALLS: list[int] = []


def limited(gradient: Tensor) -> Tensor:
    """Is not additive: half of a large gradient, and all of a small one."""
    CALLS.append(1)
    return gradient * 0.5 if gradient.norm() > 0.01 else gradient


def hooked(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(limited)
    return tensor


def hooked_together(tensor: Tensor) -> Tensor:
    """Registers a hook on several tensors, which runs after the last gradient."""
    if tensor.requires_grad:
        torch.autograd.graph.register_multi_grad_hook([tensor], lambda _: CALLS.append(1))
    return tensor


ACTS = {("in the layer", 0): hooked, ("on several", 1): hooked_together}


class Limited(torch.autograd.Function):
    """The identity, whose backward limits gradients that the example does not have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-1e3, 1e3)


class Reversed(Limited):
    """The identity, whose backward is linear."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


def halved_one(gradient: Tensor) -> Tensor:
    return gradient / 2


def narrowed(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def narrowly_hooked(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(narrowed)
    return tensor


class Narrowed(Limited):
    """The identity, whose backward limits gradients."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return narrowed(gradient)


FUNCTIONS = {"limited function": Limited, "reversed function": Reversed}


class Layer(nn.Linear):
    """A layer that has its own code on gradients: `act` gets its output."""

    def __init__(self, act: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.act = act

    def forward(self, x: Tensor, skipped: Tensor | None = None) -> Tensor:
        y = super().forward(x).tanh()
        if skipped is not None:
            y = y + hooked(skipped)
        return y if self.act is None else self.act(y)


class Around(nn.Module):
    """Four layers, with a hook around them at `place`."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(ACTS.get((place, number))) for number in range(4))
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 1:
                skipped = x
            if number == 1 and self.place in ("skip", "dropout"):
                skipped = x = hooked(x) if self.place == "skip" or self.training else x
            if number == 1 and self.place == "sum":
                skipped = x = hooked(x * 2)
            if number == 1 and self.place in FUNCTIONS:
                skipped = x = FUNCTIONS[self.place].apply(x)
            x = layer(x, skipped) if number == 3 and self.place == "of another layer" else layer(x)
            if number in (1, 3) and self.place in ("skip", "sum", "dropout", "in the layer", *FUNCTIONS):
                x = x + skipped
            if self.place == "dropout":
                x = dropout(x, 0.1, self.training)
            if number == 1 and self.place == "between stages":
                hooked(x)
            if number == 2 and self.place == "within a stage":
                x = hooked(x * 2)
        return hooked(x) if self.place == "at the end" else x


REFUSED = {"skip": 2, "sum": 2, "dropout": 2, "of another layer": 1, "limited function": 2}
"""Places of code on a tensor of which two stages have a share of the gradient, with the number of gradients in the stages."""


@pytest.mark.parametrize("place", REFUSED)
def test_a_hook_that_would_get_shares_of_a_gradient_is_refused(place: str) -> None:
    stated = ("Limited",) if place in FUNCTIONS else ("register_hook", "test_code_on_gradients.py")
    with raises(zb.InputError, *stated, 1, REFUSED[place]):
        zb.split(Around(place), example=torch.randn(2, WIDTH)).cut(2)


def one_device(model: nn.Module, x: Tensor) -> int:
    """Runs the microbatches one after another, and returns the number of gradients that hooks get."""
    CALLS.clear()
    for microbatch in x.chunk(MICROBATCHES):
        (mse_loss(model(microbatch), microbatch + 3) / MICROBATCHES).backward()
    return len(CALLS)


def difference(group: Any, schedule: str | zb.Schedule, make: Callable[[], nn.Module], **options: Any) -> tuple[float, int, int]:
    """Returns the rank's largest difference of a gradient from one device, and the gradients that hooks get here and there."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, WIDTH, dtype=torch.float64)
    with zb.Pipeline(zb.split(model, example=x[:2] / 1000), schedule, MICROBATCHES, mse_loss, group=group, **options) as pipe:
        CALLS.clear()
        pipe.step(x, x + 3)
        calls = len(CALLS)
        of_rank = [(name, parameter.grad) for module in pipe.modules.values() for name, parameter in module.named_parameters()]
    torch.manual_seed(0)
    whole = make()
    calls_of_one = one_device(whole, x)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert all((gradient is None) == (expected[name] is None) for name, gradient in of_rank)
    sizes = [(gradient - expected[name]).abs().max().item() for name, gradient in of_rank if gradient is not None]
    return max(sizes, default=0.0), calls, calls_of_one


RIGHT = {"between stages": 4, "within a stage": 4, "at the end": 4, "on several": 4, "in the layer": 4, "reversed function": 0}
"""Places of hooks on a tensor that one stage uses, with the number of their calls; "in the layer" is the remedy for a skip connection."""


def of_places(group: Any, schedule: str) -> dict[str, tuple[float, int, int]]:
    return {place: difference(group, schedule, partial(Around, place)) for place in RIGHT}


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-v", marks=pytest.mark.long)])
def test_a_hook_that_gets_the_whole_gradient_has_the_numbers_of_one_device(world: Ranks, schedule: str) -> None:
    first, second = world.run(of_places, schedule, ranks=2)
    for place in RIGHT:
        assert max(first[place][0], second[place][0]) < 1e-12, place
        assert first[place][1] + second[place][1] == first[place][2] == RIGHT[place], place


class OfInput(nn.Linear):
    """A layer with a hook on its input."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(hooked(x)).tanh()


def recomputed(group: Any) -> list[tuple[float, int, int]]:
    def layers() -> nn.Module:
        return nn.Sequential(*(OfInput() for _ in range(4)))

    schedule = with_recompute(zb.make("zb-v", 2, MICROBATCHES))
    return [difference(group, schedule, layers), difference(group, schedule, layers, recompute={"selective": [OfInput]})]


def test_hooks_run_once_where_a_forward_is_recomputed(world: Ranks) -> None:
    for first, second in zip(*world.run(recomputed, ranks=2), strict=True):
        assert max(first[0], second[0]) < 1e-12
        assert first[1] + second[1] == first[2] == 3 * MICROBATCHES


class UsesGradient(nn.Linear):
    """A layer whose forward uses the gradient of its weight; if `is_guarded`, only where its output has a gradient."""

    def __init__(self, use: Callable[[nn.Parameter], object], *, is_guarded: bool) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.use = use
        self.is_guarded = is_guarded

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad or not self.is_guarded:
            self.use(self.weight)
        return y


USES: dict[str, Callable[[nn.Parameter], object]] = {
    "register_hook": lambda weight: weight.register_hook(limited),
    "register_post_accumulate_grad_hook": lambda weight: weight.register_post_accumulate_grad_hook(lambda _: None),
    ".grad": lambda weight: weight.grad is None,
}


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_forward_that_uses_gradients_of_parameters_is_refused(use: str, is_guarded: bool) -> None:
    layers = [UsesGradient(USES[use], is_guarded=is_guarded) for _ in range(4)]
    with raises(zb.InputError, use, "test_code_on_gradients.py"):
        zb.split(nn.Sequential(*layers), example=torch.randn(2, WIDTH)).cut(2)


def with_hooks_in_a_forward(group: Any, split: str) -> str:
    def stage(_: int, __: int) -> nn.Module:
        return UsesGradient(lambda weight: weight.register_hook(halved_one), is_guarded=True)

    x = torch.randn(8, WIDTH, dtype=torch.float64)
    with zb.Pipeline(stage, "1f1b", MICROBATCHES, mse_loss, group=group, split=split) as pipe:
        try:
            pipe.step(x, x)
        except (zb.InputError, zb.PipelineError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("split", "stated"), [("deferred", "weight"), ("graph", "parameter")])
def test_stages_that_register_hooks_on_parameters_in_a_step_are_refused(world: Ranks, split: str, stated: str) -> None:
    for sentence in world.run(with_hooks_in_a_forward, split, ranks=2):
        states(sentence, "InputError", "hook", stated)


def in_graphs(group: Any) -> list[tuple[float, int, int]]:
    def acted(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for number, layer in enumerate(layers):
            x = Narrowed.apply(layer(x)) if number == 2 else layer(x)
            if number != 2 and x.requires_grad:
                x.register_hook(narrowed)
        return x

    def layers() -> nn.Module:
        return nn.Sequential(*(Layer(narrowly_hooked) for _ in range(4)))

    return [difference(group, "zb-h1", make, split="graph") for make in (layers, partial(Leaving, acted))]


def test_hooks_and_functions_have_the_numbers_of_one_device_in_graphs(world: Ranks) -> None:
    for first, second in zip(*world.run(in_graphs, ranks=2), strict=True):
        assert max(first[0], second[0]) < 1e-12


class Leaving(nn.Module):
    """Linear layers in code whose end does not run on the first stage."""

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, x)


def without_gradients(layers: nn.ModuleList, x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    x = layers[1](layers[0](x))
    torch.set_grad_enabled(before)
    return layers[3](layers[2](x))  # type: ignore[no-any-return]


def through(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def halved(_: nn.Module, gradients: tuple[Tensor, ...], __: object) -> tuple[Tensor, ...]:
    CALLS.append(1)
    return tuple(gradient / 2 for gradient in gradients)


def hooked_for_a_call(layers: nn.ModuleList, x: Tensor) -> Tensor:
    handle = layers[1].register_full_backward_hook(halved)  # type: ignore[arg-type]
    x = through(layers, x)
    handle.remove()
    return x


def finally_removed(layers: nn.ModuleList, x: Tensor) -> Tensor:
    handle = layers[1].register_full_backward_hook(halved)  # type: ignore[arg-type]
    try:
        return through(layers, x)
    finally:
        handle.remove()


def checkpointed_around(layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = checkpoint(lambda y: layers[1](y.sin()).sin(), layers[0](x), use_reentrant=False)
    return layers[3](layers[2](x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("run", "part"), [(hooked_for_a_call, "layers.1"), (checkpointed_around, "layers.1")])
def test_what_a_stage_leaves_undone_is_refused(run: Callable[[nn.ModuleList, Tensor], Tensor], part: str) -> None:
    with raises(zb.InputError, part):
        zb.split(Leaving(run), example=torch.randn(2, WIDTH)).cut(2)


def leaving(group: Any) -> list[tuple[float, int, int]]:
    found = [difference(group, "1f1b", partial(Leaving, run)) for run in (without_gradients, finally_removed)]
    assert torch.is_grad_enabled()
    return found


def test_a_stage_that_leaves_a_forward_has_the_numbers_of_one_device(world: Ranks) -> None:
    for first, second in zip(*world.run(leaving, ranks=2), strict=True):
        assert max(first[0], second[0]) < 1e-12
        assert first[1] + second[1] == first[2]
