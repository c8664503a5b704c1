"""What a rank knows about a message before it arrives: the shapes of its tensors and the structure of its payload, told once by the sender.

The first time a step with new inputs runs, every activation message is preceded by an announcement of these. Gradients have the shapes of
the activations they belong to; with them comes which of them there are, for a stage may ignore what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.rules import Value
from zerobubble.runtime.values.payload import Structure
from zerobubble.runtime.values.plain_values import read_plain, write_plain


class TensorShape(NamedTuple):
    """Size and dtype of a tensor on a stage boundary, and whether a gradient for it flows back."""

    size: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    def __str__(self) -> str:
        return f"{tuple(self.size)} {str(self.dtype).removeprefix('torch.')}"


Shapes = tuple[TensorShape, ...]


class KnownMessages(dict[Value, Shapes]):
    """The shapes of a step's messages, learnt in an earlier one with the same inputs.

    `structures` are those of the messages that are more than tensors. `missing_gradients` are the channels on which a gradient was missing.
    `memo` is for whoever works out more about such steps: see `StepHook`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.structures: dict[Value, Structure] = {}
        self.missing_gradients: set[Channel] = set()
        self.memo: dict[str, Any] = {}


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """The shapes of a message; `requires_grad` of a tensor says whether a gradient flows back."""
    return tuple(TensorShape(_size_of(t), t.dtype, t.requires_grad) for t in tensors)


def _size_of(tensor: Tensor) -> tuple[int, ...]:
    """The size of a tensor; of a nested one that has none, such as a first stage may be given, the sizes of its parts."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return tuple(size for part in tensor.unbind() for size in (part.dim(), *part.shape))
    return tuple(tensor.shape)


def are_same_but_for_gradients(before: Shapes, now: Shapes) -> bool:
    """Whether these shapes differ at most in which tensors a gradient flows back for."""
    return [shape[:2] for shape in before] == [shape[:2] for shape in now]


def have_shapes(tensors: Sequence[Tensor], shapes: Shapes) -> bool:
    """Whether these tensors have these shapes."""
    if len(tensors) != len(shapes):
        return False
    for tensor, (size, dtype, differentiable) in zip(tensors, shapes, strict=True):
        if tensor.shape != size or tensor.dtype != dtype or tensor.requires_grad != differentiable:
            return False
    return True


def write_announcement(shapes: Shapes, structure: Structure, device: torch.device) -> Tensor:
    """What goes before a message whose shapes the receiver does not know: bytes that tell them."""
    return write_plain((shapes, structure)).to(device)


def read_announcement(announcement: Tensor) -> tuple[Shapes, Structure]:
    """The shapes that an announcement tells, and the structure, None where the tensors are positional arguments."""
    shapes, structure = read_plain(announcement)
    return shapes, structure
