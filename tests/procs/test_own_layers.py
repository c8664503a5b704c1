"""Custom layers defer their weight gradients to W with `zerobubble.nn.deferral`, and are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from benchmarks.split_matrix.kinds import D, Kind, Way, checkpointed, lin, parameter
from benchmarks.split_matrix.ways import Ours, Plain, difference, train
from tests.procs.programs import programs_of
from tests.refusals import raises

pytestmark = pytest.mark.in_process


class Product(torch.autograd.Function):
    """x @ weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.deferral = zb.nn.deferral(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        weight, x = ctx.saved_tensors
        flat_x, flat_dy = x.flatten(0, -2), dy.flatten(0, -2)
        return ctx.deferral(ctx, lambda x, dy: x.mT @ dy, flat_x, flat_dy), dy @ weight.mT


class Shifted(torch.autograd.Function):
    """x + weight. The gradient of the weight is that of the output, in the same memory."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.deferral = zb.nn.deferral(weight)
        return x + weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        return ctx.deferral(ctx, lambda dy: dy, dy), dy


class Forgetful(Product):
    """Defers a gradient that is right only when computed at once."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        weight, x = ctx.saved_tensors
        flat = dy.flatten(0, -2).clone()
        gradient = ctx.deferral(ctx, lambda x: x.flatten(0, -2).mT @ flat, x)
        flat.zero_()
        return gradient, dy @ weight.mT


def layer(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.last(torch.tanh(Product.apply(m.weight, x)))
    return y


def shifted_twice(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.last(x + Shifted.apply(m.other, Shifted.apply(m.weight, x.mean((0, 1)))))
    return y


def steered(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(torch.tanh(Product.apply(m.weight, place)).sum(), place)
    return layer(m, x + force)


def hooked() -> nn.Module:
    module = Way(layer, weight=parameter(D, D), last=lin(), seen=[])
    module.weight.register_post_accumulate_grad_hook(lambda weight: module.seen.append(weight.grad.clone()))
    return module


KINDS = {
    "in a stage": Kind(lambda: Way(layer, weight=parameter(D, D), last=lin())),
    "gradients in one memory": Kind(
        lambda: Way(shifted_twice, weight=parameter(D), other=parameter(D), last=lin()),
    ),
    "in a checkpoint": Kind(lambda: checkpointed(Way(layer, weight=parameter(D, D), last=lin()))),
    "gradient within": Kind(lambda: Way(steered, weight=parameter(D, D), last=lin())),
    "gradient within, in a checkpoint": Kind(lambda: checkpointed(Way(steered, weight=parameter(D, D), last=lin()))),
    "hooked": Kind(hooked),
    "computed weight": Kind(
        lambda: Way(lambda m, x: m.last(Product.apply(m.weight * 2, x)), weight=parameter(D, D), last=lin()),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_custom_function_matches_autograd(name: str) -> None:
    kind = KINDS[name]
    mine, oracle = train(kind.build, kind.takes, Ours), train(kind.build, kind.takes, Plain)
    assert difference(mine, oracle) == 0
    assert ("weight" in {n.rpartition(".")[2] for n in mine.waited if "last" not in n}) == (name not in ("hooked", "computed weight"))


def test_check_split_shows_what_waited() -> None:
    module = Way(lambda m, x: nn.functional.dropout(layer(m, x)), weight=parameter(D, D), last=lin())
    assert zb.nn.check_split(module, torch.randn(2, 3, D, requires_grad=True)) == ("weight", "last.weight")
    assert module.weight.grad is None


def test_check_split_names_what_is_wrong() -> None:
    module = Way(lambda m, x: Forgetful.apply(m.weight, x), weight=parameter(D, D))
    with raises(zb.InputError, "gradient", "weight", "split"):
        zb.nn.check_split(module, torch.randn(2, 3, D, requires_grad=True))


def test_check_split_allows_the_difference_that_it_is_given() -> None:
    module = Way(lambda m, x: Forgetful.apply(m.weight, x), weight=parameter(D, D))
    x = torch.randn(2, 3, D, requires_grad=True)
    assert zb.nn.check_split(module, x, tolerance=1.0) == ("weight",)
    with raises(zb.InputError, "weight"):
        zb.nn.check_split(module, x, tolerance=0.99)


def test_check_split_compares_gradients_that_are_missing() -> None:
    x = torch.randn(2, 3, D, requires_grad=True)
    unused = Way(lambda m, x: Product.apply(m.weight, x), weight=parameter(D, D), unused=parameter(D))
    assert zb.nn.check_split(unused, x) == ("weight",)

    def halfway(m: Any, x: Tensor) -> Tensor:
        from zerobubble.runtime.split.layers.weight_work import pass_in_progress

        y: Tensor = Product.apply(m.weight if pass_in_progress() is None else m.weight.detach(), x)
        return y

    with raises(zb.InputError, wrong="weight"):
        zb.nn.check_split(Way(halfway, weight=parameter(D, D)), x)


def test_check_split_compares_gradients_of_inputs() -> None:
    class Doubled(Product):
        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor]:
            gradient, of_x = Product.backward(ctx, dy)
            return gradient, of_x if gradient is not None else 2 * of_x

    y, x = torch.randn(2, 3, D), torch.randn(2, 3, D, requires_grad=True)
    with raises(zb.InputError, wrong="input 1"):
        zb.nn.check_split(Way(lambda m, y, x: Doubled.apply(m.weight, x) + y, weight=parameter(D, D)), y, x)


class Transposed(Product):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        weight, x = ctx.saved_tensors
        return ctx.deferral(ctx, lambda x, dy: dy.mT @ x, x, dy), dy @ weight.mT


def test_a_gradient_of_another_shape_is_refused() -> None:
    with raises(zb.InputError, "(6, 4)", "(2, 4, 6)"):
        train(lambda: Way(lambda m, x: Transposed.apply(m.weight, x), weight=parameter(D, 4)), "x", Ours)


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = programs_of("docs/split.md")
    exec(program, {"__name__": "page"})
    assert capsys.readouterr().out == "deferred to W: weight\n"
