"""Decides which tensors can be sent, and returns the memory to send: a message is the contiguous elements of its tensors and no more."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerobubble.runtime.device import interface, is_host

_SAMPLED = 4096
"""Number of elements that are compared of a tensor whose values may change unseen."""
_SPACED = 64
"""The most elements that stand for a tensor."""
_PLAIN = (Tensor, nn.Parameter)
"""The types that their elements describe completely; other tensor subclasses would lose the rest of their state."""


def has_plain_type(tensor: Tensor) -> bool:
    """Returns whether `tensor` is a plain tensor or parameter and not of another subclass."""
    return type(tensor) in _PLAIN


def is_plain(tensor: Tensor) -> bool:
    """Returns whether the elements, size and type of `tensor` describe it completely, so that it can be sent."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place, 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def local_part(tensor: Tensor) -> Tensor:
    """Returns the local part of a DTensor, and any other tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def like_parameter(parameter: Tensor, numbers: Tensor) -> Tensor:
    """Returns `numbers` in the form of the parameter: as the local part of a DTensor if it is one."""
    local = numbers.view(local_part(parameter).shape)
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def why_not_sent(tensor: Tensor, device: torch.device) -> str | None:
    """Returns why `tensor` cannot be sent from a rank that computes on `device`, with the remedy; None if it can."""
    if not has_plain_type(tensor) and not tensor.is_nested:
        return f"is a {type(tensor).__name__}, whose numbers alone would arrive; {_remedy_for(tensor)}"
    if tensor.is_nested:
        return (
            "is a nested tensor; pass what it is made of, such as .values() and .offsets(), or pad it: for an nn.TransformerEncoder, which "
            "makes one in evaluation, set encoder.use_nested_tensor = False"
        )
    if tensor.layout is not torch.strided:
        return f"is sparse ({tensor.layout}); pass it .to_dense(), or its indices and values"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}); pass it .dequantize()d, or its .int_repr() and scale"
    if tensor.device.type != device.type:
        return f"is on {tensor.device}, and this rank computes on {device}; move it there"
    return None


def _remedy_for(tensor: Tensor) -> str:
    if hasattr(tensor, "full_tensor"):
        return "pass its .to_local() or .full_tensor(), and rebuild it in the next stage"
    return "pass plain tensors, as .as_subclass(torch.Tensor) or what it is made of, and rebuild it in the next stage"


def as_memory(tensor: Tensor) -> Tensor:
    """Returns the detached elements of `tensor` in contiguous memory, its own if that is contiguous already.

    Resolves lazy conjugates and negatives, and makes a sparse gradient dense.
    """
    elements = tensor.detach()
    if elements.layout is not torch.strided:
        elements = elements.to_dense()
    if elements.is_conj() or elements.is_neg():
        elements = elements.resolve_conj().resolve_neg()
    return elements.contiguous()


def is_memory(tensor: Tensor) -> bool:
    """Returns whether the memory of `tensor` can be sent as it is."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def in_host_memory(tensor: Tensor) -> Tensor:
    """Returns an accelerator's tensor as a copy in host memory, for which the host does not wait; any other tensor as it is."""
    return tensor if is_host(tensor.device) or not is_plain(tensor) else interface(tensor.device).copy_on_host(tensor)


def sampled_bytes(tensor: Tensor) -> Tensor:
    """Returns up to 4096 evenly spaced elements of a plain tensor that is not empty, as bytes in memory of their own."""
    with torch.no_grad():
        step = -(-tensor.numel() // _SAMPLED)
        sample = tensor.detach().reshape(-1)[::step].clone(memory_format=torch.contiguous_format)
        return sample.resolve_conj().resolve_neg().view(torch.uint8)


def spaced_elements(tensor: Tensor) -> Tensor:
    """Returns up to 64 evenly spaced elements of a plain tensor, with the first and the last, on its device."""
    return tensor.detach().take(_spaced_places(tensor.numel(), tensor.device))


@lru_cache(64)
def _spaced_places(count: int, device: torch.device) -> Tensor:
    return torch.linspace(0, count - 1, min(count, _SPACED), dtype=torch.float64, device="cpu").long().to(device)
