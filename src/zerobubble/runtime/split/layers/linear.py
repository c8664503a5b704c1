"""Linear layers with a deferred weight gradient, with or without autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.split.layers.eligibility import unaliased, work_for
from zerobubble.runtime.split.layers.weight_work import WeightWork

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None, None]


class _Linear(torch.autograd.Function):
    """`cast_weight` is autocast's copy of the weight in `region`, None without autocast."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None, cast_weight: Tensor | None, work: WeightWork, region: object
    ) -> Tensor:
        used = weight if cast_weight is None else cast_weight
        ctx.save_for_backward(x, used)
        ctx.parameter = weight  # the saved tensor may be an alias under checkpointing, and the gradient belongs to the parameter
        ctx.work = work
        ctx.region = region
        return unaliased(nn.functional.linear(x, used, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        dy = as_rows(dy)
        dx = dy.mm(weight.conj()).view(x.shape) if ctx.needs_input_grad[1] else None
        bias_gradient = dy.sum(0) if ctx.needs_input_grad[2] else None
        x = as_rows(x)
        if ctx.work.can_defer(ctx):
            ctx.work.defer(ctx.parameter, _weight_gradient, x, dy, cast=ctx.region)
            return None, dx, bias_gradient, None, None, None
        gradient = _weight_gradient(x, dy)
        return (gradient, dx, bias_gradient, None, None, None) if ctx.region is None else (None, dx, bias_gradient, gradient, None, None)


def as_rows(x: Tensor) -> Tensor:
    """Flattens all dimensions but the last; unlike `reshape(-1, n)`, this works for `n` = 0."""
    dimensions = x.dim()
    if dimensions == 2:
        return x
    return x.flatten(0, -2) if dimensions > 1 else x.unsqueeze(0)


def _weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    return dy.t().mm(x.conj() if x.is_complex() else x)  # even for real tensors `conj` costs a dispatch


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear`, with the weight gradient deferred if possible."""
    work = work_for(weight, x, divided=True)
    if work is None or (type(x) is not Tensor and torch.is_autocast_enabled(x.device.type)):
        return nn.functional.linear(x, weight, bias)
    cast_weight = None
    region = None
    if torch.is_autocast_enabled(x.device.type):
        if torch.float64 in (x.dtype, weight.dtype):  # autocast does not cast float64
            return nn.functional.linear(x, weight, bias)
        copies = work.context.copies
        region = copies.enter_region(x.device)
        x = copies.cast(x)
        cast_weight = copies.cast(weight)
        bias = None if bias is None else copies.cast(bias)
    y: Tensor = _Linear.apply(weight, x, bias, cast_weight, work, region)  # type: ignore[no-untyped-call]
    return y


def forward(layer: nn.Linear, x: Tensor) -> Tensor:
    """`nn.Linear.forward`."""
    return linear(x, layer.weight, layer.bias)
