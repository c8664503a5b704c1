"""Placeholders for tensors of other stages: of the right shape, dtype and device, and without memory."""

from __future__ import annotations

import torch
from torch import Tensor

from zerobubble.runtime.device import holds_values

IN_THE_LOOP = "update it in your loop, inside `with zb.gathered(model):` on all ranks, as a momentum encoder after each step"
"""How to change parameters that code around the parts changes, for errors."""


def placeholder_of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns one number for all elements: NaN if the dtype has it, else 0. On the CPU if `device` is the meta device."""
    device = device if holds_values(device) else torch.device("cpu")
    number = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), number, dtype=dtype, device=device).expand(shape)


def is_placeholder(tensor: Tensor) -> bool:
    """Returns whether `placeholder_of` may have made the tensor, which cannot be written to."""
    return tensor.layout is torch.strided and tensor.numel() > 1 and not any(tensor.stride())
