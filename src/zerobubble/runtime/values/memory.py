"""Which tensors can be sent, and the memory that is sent for them: a message is the numbers of its tensors, row after row, and no more."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_PLAIN = (Tensor, nn.Parameter)
"""The types whose numbers say all; other classes of tensors would lose what else they hold."""


def has_plain_type(tensor: Tensor) -> bool:
    """Whether `tensor` is of torch's own class and not of one that means more."""
    return type(tensor) in _PLAIN


def is_plain(tensor: Tensor) -> bool:
    """Whether the numbers of `tensor` and its size and type are all there is to it, so that it can be sent."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def local_part(tensor: Tensor) -> Tensor:
    """The numbers that this rank holds of a tensor which torch divides over ranks, a DTensor; any other tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def like_parameter(parameter: Tensor, numbers: Tensor) -> Tensor:
    """These `numbers` as a tensor of the parameter's form: as this rank's part where the parameter is a DTensor."""
    local = numbers.view(local_part(parameter).shape)
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def why_not_sent(tensor: Tensor, device: torch.device) -> str | None:
    """Why `tensor` cannot be sent from a rank that computes on `device`, with the remedy; None where it can."""
    if not has_plain_type(tensor) and not tensor.is_nested:
        return f"is a {type(tensor).__name__}, whose numbers alone would arrive; {_remedy_for(tensor)}"
    if tensor.is_nested:
        return "is a nested tensor; pass what it is made of, such as .values() and .offsets(), or pad it"
    if tensor.layout is not torch.strided:
        return f"is sparse ({tensor.layout}); pass it .to_dense(), or its indices and values"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}); pass it .dequantize()d, or its .int_repr() and scale"
    if tensor.device.type != device.type:
        return f"is on {tensor.device}, and this rank computes on {device}; move it there"
    return None


def _remedy_for(tensor: Tensor) -> str:
    if hasattr(tensor, "full_tensor"):
        return "pass its .to_local() or .full_tensor(), and make it anew in the next stage"
    return "pass plain tensors, as .as_subclass(torch.Tensor) or what it is made of, and make it anew in the next stage"


def as_memory(tensor: Tensor) -> Tensor:
    """The numbers of `tensor`, apart from its graph, in one contiguous piece of memory: `tensor`'s own where it is so already.

    A conjugate or negative that torch has only noted down is computed, and a sparse gradient is made dense.
    """
    apart = tensor.detach()
    if apart.layout is not torch.strided:
        apart = apart.to_dense()
    if apart.is_conj() or apart.is_neg():
        apart = apart.resolve_conj().resolve_neg()
    return apart.contiguous()


def is_memory(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` holds its numbers as they are to be sent."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
