"""Cutting a batch into microbatches, and putting outputs back together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.stage import Tensors


def split_batch(batch: Any, num_microbatches: int, what: str) -> list[Tensors]:
    """`batch`, a tensor or a tuple of tensors, cut along dimension 0 into equal microbatches.

    Raises `InputError` for other types, for tensors of different batch size, and when the size is not a multiple.
    """
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    if not parts or not all(isinstance(part, Tensor) and part.dim() > 0 for part in parts):
        raise InputError(f"{what} must be a tensor or a tuple of tensors with a batch dimension, got {type(batch).__name__}")
    sizes = {part.shape[0] for part in parts}
    if len(sizes) > 1:
        raise InputError(f"the tensors of {what} must share their batch size, got {sorted(sizes)}")
    size = sizes.pop()
    if size % num_microbatches or size == 0:
        raise InputError(f"{what} of batch size {size} cannot be cut into {num_microbatches} equal microbatches; choose a multiple")
    chunks = [part.split(size // num_microbatches) for part in parts]
    return [tuple(chunk[j].detach() for chunk in chunks) for j in range(num_microbatches)]


def join_outputs(outputs: list[Any]) -> Any:
    """The outputs of all microbatches concatenated along dimension 0, tensor by tensor."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs)
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
