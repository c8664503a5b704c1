"""One message for all tensors of a pass: several travel in one buffer, each at a place that follows from those before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Form = tuple[tuple[int, ...], torch.dtype]
"""Size and dtype of a tensor."""
_ALIGN = 64
"""The bytes at whose multiples tensors begin in a buffer: what vector instructions like, and a multiple of any dtype's size."""


def packed(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """What to send for contiguous `tensors`: one alone as it is, more in a buffer of bytes on their device."""
    if len(tensors) < 2:
        return tensors
    buffer, places = _buffer([(t.shape, t.dtype) for t in tensors], tensors[0].device)
    for tensor, place in zip(tensors, places, strict=True):
        place.copy_(tensor)
    return (buffer,)


def unpacked(forms: Sequence[Form], device: torch.device) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
    """What to receive for tensors of these forms, and the tensors: each is there, with a version of its own, when all is received."""
    if len(forms) < 2:
        alone = tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in forms)
        return alone, alone
    buffer, tensors = _buffer(forms, device)
    return (buffer,), tensors


def _buffer(forms: Iterable[Form], device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """An empty buffer for tensors of these forms, and the tensors in it."""
    places, end = [], 0
    for size, dtype in forms:
        places.append((end, tuple(size), dtype))
        end += -(-math.prod(size) * dtype.itemsize // _ALIGN) * _ALIGN
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    return buffer, tuple(_inside(buffer, *place) for place in places)


def _inside(buffer: Tensor, start: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over bytes of the buffer; a view would share its version with all the others."""
    empty = torch.empty(0, dtype=dtype, device=buffer.device)
    return empty.set_(buffer.untyped_storage(), start // dtype.itemsize, size)  # type: ignore[call-overload, no-any-return]
