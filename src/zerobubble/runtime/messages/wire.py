"""What a rank knows about a message before it arrives: the shapes of its tensors, told once by the sender.

The first time a step with new input shapes runs, every activation message is preceded by a note. Gradients need none: they look like
the activations they belong to.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.skips import Laden, laden, names_of

NOTE_LENGTH = 256
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


class TensorShape(NamedTuple):
    """Size and dtype of a tensor on a stage boundary, and whether a gradient for it flows back."""

    size: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    def __str__(self) -> str:
        return f"{tuple(self.size)} {str(self.dtype).removeprefix('torch.')}"


Shapes = tuple[TensorShape, ...]


def shapes_of(tensors: tuple[Tensor, ...]) -> Shapes:
    """The shapes of a message; `requires_grad` of a tensor says whether a gradient flows back."""
    return laden(tuple(TensorShape(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors), tensors)


def look_like(tensors: tuple[Tensor, ...], shapes: Shapes) -> bool:
    """Whether these tensors have these shapes and names."""
    if len(tensors) != len(shapes) or names_of(tensors) != names_of(shapes):
        return False
    for tensor, (size, dtype, differentiable) in zip(tensors, shapes, strict=True):
        if tensor.shape != size or tensor.dtype != dtype or tensor.requires_grad != differentiable:
            return False
    return True


def write_note(shapes: Shapes, device: torch.device) -> Tensor:
    """The note that announces a message: int64, `NOTE_LENGTH` long."""
    numbers = [len(shapes)]
    for size, dtype, differentiable in shapes:
        if dtype not in _DTYPES:
            raise InputError(f"tensors of {dtype} cannot cross a stage boundary; known are {', '.join(map(str, _DTYPES))}")
        numbers += [_DTYPES.index(dtype), int(differentiable), len(size), *size]
    names = json.dumps(names_of(shapes)).encode() if names_of(shapes) else b""
    numbers += [len(names), *(int.from_bytes(names[at : at + 7]) for at in range(0, len(names), 7))]
    if len(numbers) > NOTE_LENGTH:
        raise InputError(f"a stage boundary of {len(shapes)} tensors is too wide to announce; pass fewer or stacked tensors")
    return torch.tensor(numbers + [0] * (NOTE_LENGTH - len(numbers)), dtype=torch.int64, device=device)


def read_note(note: Tensor) -> Shapes:
    """The shapes a note announces."""
    numbers = iter(note.tolist())
    shapes = []
    for _ in range(next(numbers)):
        dtype, differentiable, dims = next(numbers), next(numbers), next(numbers)
        shapes.append(TensorShape(tuple(next(numbers) for _ in range(dims)), _DTYPES[dtype], bool(differentiable)))
    length = next(numbers)
    names = b"".join(next(numbers).to_bytes(min(7, length - at)) for at in range(0, length, 7))
    return Laden(shapes, tuple(json.loads(names))) if names else tuple(shapes)
