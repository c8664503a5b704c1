"""Zeros in the place of numbers that a model lacks, without memory for them."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Asks the system not to have memory ready for all pages: a unit may be larger than this machine."""


def untouched_zeros(like: Tensor) -> Tensor:
    """Zeros with the strides of real ones, which grouped products ask for. They take no memory as long as they are only read.

    Those of torch.zeros may lie in memory that was freed, where they are written.
    """
    size = like.numel() * like.element_size()
    if size == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(like.shape, dtype=like.dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
