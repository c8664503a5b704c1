"""Zeros for missing weights, without memory."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Disables the memory reservation for the mapping (MAP_NORESERVE): a unit may be larger than this machine's memory."""


def untouched_zeros(like: Tensor) -> Tensor:
    """Returns zeros with real strides, as grouped products require. They take no memory while they are only read.

    `torch.zeros` may reuse freed memory, which it would then overwrite.
    """
    size = like.numel() * like.element_size()
    if size == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(like.shape, dtype=like.dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
