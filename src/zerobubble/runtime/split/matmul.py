"""Matrix products of a module's own parameters (experts, raw projections) whose weight gradient waits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.split.eligibility import unaliased, work_for
from zerobubble.runtime.split.linear import as_rows
from zerobubble.runtime.split.weight_work import WeightWork

Call = Callable[..., Tensor]


class _Product(torch.autograd.Function):
    """`x @ weight`, or `weight @ x` where the weight stands `first`, plus `bias`.

    Gradients are those of complex numbers, too: torch wants the conjugate of the other factor. What was broadcast gets the sum.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None, first: bool, work: WeightWork) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        ctx.first = first
        ctx.work = work
        ctx.bias_size = None if bias is None else bias.shape
        a, b = (weight, x) if first else (x, weight)
        return unaliased(a @ b) if bias is None else torch.baddbmm(bias, a, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        first = ctx.first
        bias_gradient = _summed(dy, ctx.bias_size) if ctx.needs_input_grad[2] else None
        if weight.dim() == 2 and not first:
            dy = as_rows(dy)
            dx = dy.mm(weight.mH).view(x.shape) if ctx.needs_input_grad[1] else None
            x = as_rows(x)
        else:
            dx = _summed(weight.mH @ dy if first else dy @ weight.mH, x.shape) if ctx.needs_input_grad[1] else None
        size = weight.shape

        def gradient(x: Tensor, dy: Tensor) -> Tensor:
            return _summed(dy @ x.mH if first else x.mH @ dy, size)

        if not ctx.work.may_take(ctx):
            return gradient(x, dy), dx, bias_gradient, None, None
        ctx.work.defer(ctx.parameter, gradient, x, dy)
        return None, dx, bias_gradient, None, None


class _Einsum(torch.autograd.Function):
    """`einsum` of two tensors, as which both gradients can be written, too."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, terms: tuple[str, str, str], work: WeightWork) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        ctx.terms = terms
        ctx.work = work
        of_x, of_weight, of_y = terms
        return unaliased(torch.einsum(f"{of_x},{of_weight}->{of_y}", x, weight))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_y = ctx.terms
        dx = torch.einsum(f"{of_y},{of_weight}->{of_x}", dy, weight.conj()) if ctx.needs_input_grad[1] else None

        def gradient(x: Tensor, dy: Tensor) -> Tensor:
            return torch.einsum(f"{of_x},{of_y}->{of_weight}", x.conj(), dy)

        if not ctx.work.may_take(ctx):
            return gradient(x, dy), dx, None, None
        ctx.work.defer(ctx.parameter, gradient, x, dy)
        return None, dx, None, None


class _Grouped(torch.autograd.Function):
    """A product of rows and a stack of matrices: rows `ends[i-1]` to `ends[i]` of `x` are multiplied by matrix `i` of `weight`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, ends: Tensor, product: Call, work: WeightWork) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.parameter = weight
        ctx.product = product
        ctx.work = work
        return product(x, weight, offs=ends)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, ends = ctx.saved_tensors
        product: Call = ctx.product
        dx = product(dy, weight.mT, offs=ends) if ctx.needs_input_grad[1] else None

        def gradient(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
            return product(x.mT, dy, offs=ends)

        if not ctx.work.may_take(ctx):
            return gradient(x, dy, ends), dx, None, None, None
        ctx.work.defer(ctx.parameter, gradient, x, dy, ends)
        return None, dx, None, None, None


def _work_outside_autocast(weight: Tensor, x: Tensor) -> WeightWork | None:
    """As `work_for`, and None under autocast: these Functions do not know the copy of the weight that autocast makes."""
    return None if torch.is_autocast_enabled(x.device.type) else work_for(weight, x)


def _summed(gradient: Tensor, size: torch.Size) -> Tensor:
    return gradient.sum_to_size(size) if gradient.shape != size else gradient


def product(original: Call, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a @ b`, one of which is a parameter; `original` computes what cannot wait."""
    first = type(a) is nn.Parameter
    weight, x = (a, b) if first else (b, a)
    work = _work_outside_autocast(weight, x)
    if work is None or min(a.dim(), b.dim()) < 2:
        return original(a, b) if bias is None else original(bias, a, b)
    y: Tensor = _Product.apply(weight, x, bias, first, work)  # type: ignore[no-untyped-call]
    return y


def sum_and_product(original: Call, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`torch.baddbmm`."""
    return product(original, a, b, bias)


def einsum(original: Call, equation: str, *operands: Tensor) -> Tensor:
    """`torch.einsum` of a parameter and another tensor, in which every index of one is in the other or in what comes out."""
    terms = re.fullmatch(r"(\w+),(\w+)->(\w*)", equation.replace(" ", "")) if isinstance(equation, str) else None
    if terms is None or len(operands) != 2:
        return original(equation, *operands)
    (of_a, of_b, of_y), (a, b) = terms.groups(), operands
    (of_x, of_weight), (x, weight) = ((of_b, of_a), (b, a)) if type(a) is nn.Parameter else ((of_a, of_b), (a, b))
    work = _work_outside_autocast(weight, x)
    summed_alone = (set(of_x) ^ set(of_weight)) - set(of_y)
    if work is None or summed_alone or any(len(set(term)) < len(term) for term in (of_x, of_weight)):
        return original(equation, a, b)
    y: Tensor = _Einsum.apply(weight, x, (of_x, of_weight, of_y), work)  # type: ignore[no-untyped-call]
    return y


def grouped(original: Call, a: Tensor, b: Tensor, *, offs: Tensor | None = None) -> Tensor:
    """`torch._grouped_mm`, and with it `nn.functional.grouped_mm`, of rows and a stack of matrices."""
    work = _work_outside_autocast(b, a)
    if work is None or offs is None or a.dim() != 2 or b.dim() != 3:
        return original(a, b) if offs is None else original(a, b, offs=offs)
    y: Tensor = _Grouped.apply(b, a, offs, original, work)  # type: ignore[no-untyped-call]
    return y
