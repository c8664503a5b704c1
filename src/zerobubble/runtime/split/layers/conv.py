"""Convolutions with a deferred weight gradient. The bias gradient is computed in B."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.runtime.split.layers.eligibility import unaliased, work_for
from zerobubble.runtime.split.layers.weight_work import WeightWork

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Ints = list[int]


class _Shape(NamedTuple):
    """The geometry of a convolution."""

    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups)

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, of_input: bool) -> Tensor:
        """Returns the gradient of the input or of the weight."""
        rest = self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups
        wanted = [of_input, not of_input, False]
        gradient: Tensor = torch.ops.aten.convolution_backward(dy, x, weight, None, *rest, wanted)[0 if of_input else 1]
        return gradient


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None, shape: _Shape, work: WeightWork) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        ctx.shape = shape
        ctx.work = work
        return unaliased(shape.forward(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        shape: _Shape = ctx.shape
        dx = shape.backward(dy, x, weight, True) if ctx.needs_input_grad[1] else None
        bias_gradient = dy.sum([0, *range(2, dy.dim())]) if ctx.needs_input_grad[2] else None
        if not ctx.work.can_defer(ctx):
            return shape.backward(dy, x, weight, False), dx, bias_gradient, None, None
        parameter = ctx.parameter
        ctx.work.defer(parameter, lambda x, dy: shape.backward(dy, x, _with_shape_of(parameter, dy), False), x, dy)
        return None, dx, bias_gradient, None, None


def _with_shape_of(parameter: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor with the shape of `parameter`, for a kernel that reads only the shape. Works for parameters with freed storage."""
    return parameter.detach() if parameter.untyped_storage().nbytes() else like.new_empty(1).expand(parameter.shape)


def forward(layer: Conv, x: Tensor) -> Tensor:
    """`forward` of `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`."""
    weight = layer.weight
    bias = layer.bias
    spatial = len(layer.kernel_size)
    work = work_for(weight, x)
    if work is None or torch.is_autocast_enabled(x.device.type):
        y: Tensor = layer._conv_forward(x, weight, bias)
        return y
    x, padding = _pad(layer, x)
    shape = _Shape(list(layer.stride), padding, list(layer.dilation), layer.groups)
    is_batch = x.dim() == spatial + 2
    y = _Convolution.apply(weight, x if is_batch else x.unsqueeze(0), bias, shape, work)  # type: ignore[no-untyped-call]
    return y if is_batch else y.squeeze(0)


def _pad(layer: Conv, x: Tensor) -> tuple[Tensor, Ints]:
    """Applies the padding that the kernel does not support; returns the padded input and the padding left for the kernel."""
    spatial = len(layer.kernel_size)
    before_after = layer._reversed_padding_repeated_twice
    if layer.padding_mode != "zeros":
        return nn.functional.pad(x, before_after, mode=layer.padding_mode), [0] * spatial
    if not isinstance(layer.padding, str):
        return x, list(layer.padding)
    before = before_after[::2]
    after = before_after[1::2]
    more = [pad for b, a in zip(before, after, strict=True) for pad in (0, a - b)]
    return (nn.functional.pad(x, more) if any(more) else x), before[::-1]
