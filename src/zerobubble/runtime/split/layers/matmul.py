"""Matrix products with a module's own parameters (experts, raw projections) or parts of them, with a deferred weight gradient."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.runtime.split.layers.eligibility import unaliased, work_for
from zerobubble.runtime.split.layers.linear import as_rows
from zerobubble.runtime.split.layers.parameter_parts import Gathered, Matrix, matrix_in
from zerobubble.runtime.split.layers.weight_work import WeightWork

Call = Callable[..., Tensor]


class _Use(NamedTuple):
    """How a product uses the `matrix` of a parameter: as `first` factor (`matrix @ x`) or second, and in which autocast region."""

    matrix: Matrix
    first: bool
    work: WeightWork
    region: object = None

    def gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """Returns the gradient of the matrix as stored, with the other factor conjugated as in torch."""
        a, b = (dy, x.mH) if self.first else (x.mH, dy)
        return b.mT @ a.mT if self.matrix.is_transposed else a @ b


class _Product(torch.autograd.Function):
    """`x @ matrix` or `matrix @ x`, plus `bias`. `copied` is the copy of the stored matrix that the model uses, such as autocast's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None, copied: Tensor | None, use: _Use) -> Tensor:
        matrix = use.matrix
        stored = matrix.stored_in(weight) if copied is None else copied
        used = matrix.used(stored)
        ctx.save_for_backward(x, used)
        ctx.use = use
        ctx.stored_size = stored.shape
        ctx.bias_size = None if bias is None else bias.shape
        a, b = (used, x) if use.first else (x, used)
        return unaliased(_product(a, b, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        x, used = ctx.saved_tensors
        use: _Use = ctx.use
        bias_gradient = _summed(dy, ctx.bias_size) if ctx.needs_input_grad[2] else None
        if used.dim() == 2 and not use.first:
            dy = as_rows(dy)
            dx = dy.mm(used.mH).view(x.shape) if ctx.needs_input_grad[1] else None
            x = as_rows(x)
        else:
            dx = _summed(used.mH @ dy if use.first else dy @ used.mH, x.shape) if ctx.needs_input_grad[1] else None
        size = ctx.stored_size
        matrix = use.matrix

        def gradient(x: Tensor, dy: Tensor) -> Tensor:
            return _summed(use.gradient(x, dy), size)

        deferred = _deferred(ctx, use.work, matrix, gradient, x, dy, region=use.region)
        if ctx.needs_input_grad[3]:
            return None, dx, bias_gradient, deferred, None
        return _expanded(deferred, matrix), dx, bias_gradient, None, None


class _Einsum(torch.autograd.Function):
    """`einsum` of two tensors whose gradients are also einsums."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, terms: tuple[str, str, str], matrix: Matrix, work: WeightWork) -> Tensor:
        used = matrix.used(matrix.stored_in(weight))
        ctx.save_for_backward(x, used)
        ctx.matrix = matrix
        ctx.terms = terms
        ctx.work = work
        of_x, of_weight, of_y = terms
        return unaliased(torch.einsum(f"{of_x},{of_weight}->{of_y}", x, used))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, used = ctx.saved_tensors
        matrix: Matrix = ctx.matrix
        of_x, of_weight, of_y = ctx.terms
        dx = torch.einsum(f"{of_y},{of_weight}->{of_x}", dy, used.conj()) if ctx.needs_input_grad[1] else None
        of_stored = f"{of_weight[:-2]}{of_weight[-1]}{of_weight[-2]}" if matrix.is_transposed else of_weight

        def gradient(x: Tensor, dy: Tensor) -> Tensor:
            return torch.einsum(f"{of_x},{of_y}->{of_stored}", x.conj(), dy)

        return _expanded(_deferred(ctx, ctx.work, matrix, gradient, x, dy), matrix), dx, None, None, None


class _Grouped(torch.autograd.Function):
    """Grouped product of rows and a stack of matrices: rows `ends[i-1]` to `ends[i]` of `x` are multiplied by matrix `i`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, ends: Tensor, product: Call, matrix: Matrix, work: WeightWork) -> Tensor:
        used = matrix.used(matrix.stored_in(weight))
        ctx.save_for_backward(x, used, ends)
        ctx.product = product
        ctx.matrix = matrix
        ctx.work = work
        return product(x, used, offs=ends)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, used, ends = ctx.saved_tensors
        product: Call = ctx.product
        matrix: Matrix = ctx.matrix
        dx = product(dy, used.mT, offs=ends) if ctx.needs_input_grad[1] else None

        def gradient(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
            return product(dy.mT, x, offs=ends) if matrix.is_transposed else product(x.mT, dy, offs=ends)

        return _expanded(_deferred(ctx, ctx.work, matrix, gradient, x, dy, ends), matrix), dx, None, None, None, None


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return a @ b
    if a.dim() == 2:
        return torch.addmm(bias, a, b)
    return nn.functional.linear(a, b.mT, bias) if b.dim() == 2 else torch.baddbmm(bias, a, b)


def _deferred(ctx: Any, work: WeightWork, matrix: Matrix, gradient: Call, *held: Tensor, region: object = None) -> Tensor | None:
    """Defers `gradient(*held)`, the gradient of the matrix as stored, and returns None; returns the gradient if it cannot be deferred."""
    if not work.can_defer(ctx):
        return gradient(*held)
    if isinstance(matrix.part, Gathered):  # repeated matrices are summed before they are added to `.grad`
        work.defer(matrix.parameter, lambda *held: _expanded(gradient(*held), matrix), *held, cast=region)
    else:
        work.defer(matrix.parameter, gradient, *held, cast=region, part=matrix.part)
    return None


def _expanded(gradient: Tensor | None, matrix: Matrix) -> Any:
    """Expands the gradient of the used part to the shape of the parameter."""
    if gradient is None or matrix.part is None:
        return gradient
    whole = torch.zeros_like(matrix.parameter, requires_grad=False)
    matrix.part.add(whole, gradient)
    return whole


def _work_outside_autocast(matrix: Matrix, x: Tensor) -> WeightWork | None:
    """Like `work_for`, but None under autocast: these Functions do not support autocast's copy of the weight."""
    return None if torch.is_autocast_enabled(x.device.type) else work_for(matrix.parameter, x)


def _summed(gradient: Tensor, size: torch.Size) -> Tensor:
    return gradient.sum_to_size(size) if gradient.shape != size else gradient


def _matrix_and_other(a: Tensor, b: Tensor) -> tuple[Matrix, Tensor, bool] | None:
    """Returns the factor that is a matrix of a parameter, the other factor, and whether the matrix is first."""
    matrix = matrix_in(b)
    if matrix is not None:
        return matrix, a, False
    matrix = matrix_in(a)
    return None if matrix is None else (matrix, b, True)


def _multiplied(matrix: Matrix, factor: Tensor, x: Tensor, bias: Tensor | None, first: bool) -> Tensor | None:
    """Returns `x` times a `factor` that is a matrix of a parameter, with a deferred gradient; None if it cannot be deferred."""
    work = work_for(matrix.parameter, x)
    if work is None or min(x.dim(), factor.dim()) < 2:
        return None
    region: object = None
    copied = factor.detach() if isinstance(matrix.part, Gathered) else None
    if torch.is_autocast_enabled(x.device.type):
        if torch.float64 in (x.dtype, matrix.parameter.dtype):  # autocast leaves float64 alone
            return None
        copies = work.context.copies
        region = copies.enter_region(x.device)
        x = copies.cast(x)
        bias = None if bias is None else copies.cast(bias)
        copied = copies.cast(matrix.parameter if matrix.part is None else matrix.stored_in(matrix.parameter.detach()))
        if matrix.part is not None:  # autocast caches casts only of whole parameters, so every other use is its own region
            region = object()
    y: Tensor = _Product.apply(matrix.parameter, x, bias, copied, _Use(matrix, first, work, region))  # type: ignore[no-untyped-call]
    return y


def product(original: Call, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a @ b`, where one factor is a matrix of a parameter; calls `original` if its gradient cannot be deferred."""
    operands = _matrix_and_other(a, b)
    y = None
    if operands is not None:
        matrix, x, first = operands
        y = _multiplied(matrix, a if first else b, x, bias, first)
    if y is not None:
        return y
    return original(a, b) if bias is None else original(bias, a, b)


def sum_and_product(original: Call, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`torch.addmm` and `torch.baddbmm`."""
    return product(original, a, b, bias)


def linear_of_part(original: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear` with a part of a parameter, or a transposed parameter, as its weight."""
    matrix = matrix_in(weight)
    y = None if matrix is None else _multiplied(matrix.transposed(), weight, x, bias, first=False)
    return original(x, weight, bias) if y is None else y


def einsum(original: Call, equation: str, *operands: Tensor) -> Tensor:
    """`torch.einsum` of a parameter and another tensor, where every index of one is in the other or in the result."""
    terms = re.fullmatch(r"(\w+),(\w+)->(\w*)", equation.replace(" ", "")) if isinstance(equation, str) else None
    operands_of = _matrix_and_other(*operands) if terms is not None and len(operands) == 2 else None
    if terms is None or operands_of is None:
        return original(equation, *operands)
    matrix, x, first = operands_of
    of_a, of_b, of_y = terms.groups()
    of_x, of_weight = (of_b, of_a) if first else (of_a, of_b)
    work = _work_outside_autocast(matrix, x)
    summed_alone = (set(of_x) ^ set(of_weight)) - set(of_y)
    if work is None or summed_alone or any(len(set(term)) < len(term) for term in (of_x, of_weight)):
        return original(equation, *operands)
    y: Tensor = _Einsum.apply(matrix.parameter, x, (of_x, of_weight, of_y), matrix, work)  # type: ignore[no-untyped-call]
    return y


def grouped(original: Call, a: Tensor, b: Tensor, *, offs: Tensor | None = None) -> Tensor:
    """`torch._grouped_mm`, and so `nn.functional.grouped_mm`, of rows and a stack of matrices."""
    matrix = matrix_in(b) if offs is not None and a.dim() == 2 and b.dim() == 3 else None
    work = None if matrix is None else _work_outside_autocast(matrix, a)
    if matrix is None or work is None:
        return original(a, b) if offs is None else original(a, b, offs=offs)
    y: Tensor = _Grouped.apply(matrix.parameter, a, offs, original, matrix, work)  # type: ignore[no-untyped-call]
    return y
