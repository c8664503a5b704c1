"""The tensors that a traced graph takes, and what it depends on of each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn


def kind_of(tensor: Tensor) -> Hashable:
    """What a graph depends on of one of its inputs."""
    if not is_traceable(tensor):
        return type(tensor), tensor.layout, tensor.requires_grad
    is_lazy = tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, is_lazy


def shared_memory(tensors: Sequence[Tensor]) -> Hashable:
    """Which of several inputs share memory: for each the first that does."""
    if len(tensors) < 2:
        return None
    storages = [tensor.untyped_storage().data_ptr() if is_traceable(tensor) else None for tensor in tensors]
    return tuple([storages.index(storage) for storage in storages])


def is_traceable(tensor: Tensor) -> bool:
    """Whether a graph has one input for this tensor: its numbers lie in one strided memory, and operations on it are torch's own."""
    is_of_torch = type(tensor) in (Tensor, nn.Parameter) or type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return is_of_torch and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def described(tensor: Tensor) -> str:
    """What a tensor is that no graph takes, for a message."""
    kind = type(tensor).__name__
    return f"nested {kind}" if tensor.is_nested else f"{kind} of type {tensor.dtype} and layout {tensor.layout}"
