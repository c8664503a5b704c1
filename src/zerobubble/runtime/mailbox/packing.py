"""Packs all tensors of a pass into one message: several share a buffer, at offsets that both ends compute from the shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Form = tuple[tuple[int, ...], torch.dtype]
"""The size and dtype of a tensor."""
_ALIGN = 64
"""Tensors begin at multiples of this many bytes: it suits vector instructions and is a multiple of the size of any dtype."""


def packed(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns what to send for contiguous `tensors`: a single one as it is, several in one buffer of bytes on their device."""
    if len(tensors) < 2:
        return tensors
    buffer, places = _buffer([(t.shape, t.dtype) for t in tensors], tensors[0].device)
    for tensor, place in zip(tensors, places, strict=True):
        place.copy_(tensor)
    return (buffer,)


def unpacked(forms: Sequence[Form], device: torch.device) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
    """Returns what to receive for tensors of these forms, and the tensors; they are valid once everything is received."""
    if len(forms) < 2:
        alone = tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in forms)
        return alone, alone
    buffer, tensors = _buffer(forms, device)
    return (buffer,), tensors


def _buffer(forms: Iterable[Form], device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns an empty buffer for tensors of these forms, and the tensors in it."""
    places, end = [], 0
    for size, dtype in forms:
        places.append((end, tuple(size), dtype))
        end += -(-math.prod(size) * dtype.itemsize // _ALIGN) * _ALIGN
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    return buffer, tuple(_inside(buffer, *place) for place in places)


def _inside(buffer: Tensor, start: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor over bytes of the buffer, with its own version counter; views would all share one."""
    empty = torch.empty(0, dtype=dtype, device=buffer.device)
    return empty.set_(buffer.untyped_storage(), start // dtype.itemsize, size)  # type: ignore[call-overload, no-any-return]
