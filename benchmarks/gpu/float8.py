"""A linear layer whose three products are in FP8, with a weight gradient that waits for W.

Each tensor is scaled by its largest value before a cast: inputs and weights to E4M3, gradients to E5M2, as in arXiv 2209.05433.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import zerobubble as zb

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


class Scaled:
    """A matrix in FP8 and the number by which it is multiplied, a tensor without dimensions."""

    def __init__(self, matrix: Tensor, dtype: torch.dtype) -> None:
        self.scale = matrix.abs().amax().float().clamp_min(1e-12) / torch.finfo(dtype).max
        self.matrix = (matrix / self.scale).to(dtype)

    def times(self, other: Scaled, dtype: torch.dtype) -> Tensor:
        """Returns `self @ other.T` in `dtype`. The GPU's product reads both matrices row by row."""
        mine, theirs = self.matrix.contiguous(), other.matrix.contiguous()
        return torch._scaled_mm(mine, theirs.t(), self.scale, other.scale, out_dtype=dtype)

    def transposed(self) -> Scaled:
        """Returns its transpose, which shares the scale."""
        found = object.__new__(Scaled)
        found.matrix, found.scale = self.matrix.t(), self.scale
        return found


class _Product(torch.autograd.Function):
    """`x @ weight.T` for `x` of two dimensions."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.deferral = zb.nn.deferral(weight)
        return Scaled(x, FORWARD).times(Scaled(weight, FORWARD), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        weight, x = ctx.saved_tensors
        dx = Scaled(dy, BACKWARD).times(Scaled(weight, FORWARD).transposed(), dy.dtype)
        return ctx.deferral(ctx, _weight_gradient, x, dy), dx


def _weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    return Scaled(dy, BACKWARD).transposed().times(Scaled(x, FORWARD).transposed(), x.dtype)


class Float8Linear(nn.Linear):
    """An `nn.Linear` with products in FP8. Widths and the number of rows must be multiples of 16, as the GPU's product demands."""

    def forward(self, x: Tensor) -> Tensor:
        flat = _Product.apply(self.weight, x.reshape(math.prod(x.shape[:-1]), -1))
        out = flat.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def has_float8(device: torch.device) -> bool:
    """Returns whether the device multiplies FP8: the CPU, by torch's kernel, and NVIDIA GPUs from compute capability 8.9."""
    return device.type == "cpu" or (torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9))
