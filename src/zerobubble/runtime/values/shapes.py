"""The shapes of a message's tensors and the structure of its payload, which the sender announces once.

In the first step with new inputs, an announcement precedes each activation message; a receive needs a tensor of the right size. Gradients
have the shapes of their activations. They come with flags that say which of them exist, since a stage may ignore an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.errors import with_article
from zerobubble.program import Channel
from zerobubble.rules import Value
from zerobubble.runtime.values.payload import Constant, Structure, flatten_pytree
from zerobubble.runtime.values.plain_values import read_plain, write_plain


class TensorShape(NamedTuple):
    """The size and dtype of a tensor at a stage boundary, and whether a gradient for it flows back."""

    size: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    def __str__(self) -> str:
        return f"{tuple(self.size)} {str(self.dtype).removeprefix('torch.')}"


Shapes = tuple[TensorShape, ...]


class KnownMessages(dict[Value, Shapes]):
    """The shapes of a step's messages, learned in an earlier step with the same inputs.

    `structures` has the structures of messages that are more than positional tensors. `missing_gradients` are the channels on which a
    gradient was missing. `memo` is free for hooks to use: see `StepHook`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.structures: dict[Value, Structure] = {}
        self.missing_gradients: set[Channel] = set()
        self.memo: dict[str, Any] = {}


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Returns the shapes of a message; `requires_grad` of a tensor says whether a gradient flows back."""
    return tuple(TensorShape(_size_of(t), t.dtype, t.requires_grad) for t in tensors)


def _size_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns the size of a tensor; of a nested tensor, such as a first stage may get, the sizes of its parts."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return tuple(size for part in tensor.unbind() for size in (part.dim(), *part.shape))
    return tuple(tensor.shape)


def describe_tensors(tensors: Sequence[Tensor], structure: Structure) -> str:
    """Describes a pytree by its tensors: `(2, 5, 6) float32`, or `a dict of 'hidden': (2, 5, 6) float32`."""
    shapes = ", ".join(map(str, shapes_of(tensors))) or "no tensor"
    return shapes if structure is None else f"a {structure}: {shapes}"


def describe_pytree(value: Any) -> str:
    """Describes a pytree like `describe_tensors`, and any other object by its type."""
    tensors, structure = flatten_pytree(value, opaque=True)
    return with_article(structure.kind.__name__) if isinstance(structure, Constant) else describe_tensors(tensors, structure)


def are_same_but_for_gradients(before: Shapes, now: Shapes) -> bool:
    """Returns whether these shapes differ at most in the tensors that gradients flow back for."""
    return [shape[:2] for shape in before] == [shape[:2] for shape in now]


def have_shapes(tensors: Sequence[Tensor], shapes: Shapes) -> bool:
    """Returns whether these tensors have these shapes."""
    if len(tensors) != len(shapes):
        return False
    for tensor, (size, dtype, differentiable) in zip(tensors, shapes, strict=True):
        if tensor.shape != size or tensor.dtype != dtype or tensor.requires_grad != differentiable:
            return False
    return True


def write_announcement(shapes: Shapes, structure: Structure, device: torch.device) -> Tensor:
    """Returns the announcement, as bytes, that precedes a message of unknown shapes."""
    return write_plain((shapes, structure)).to(device)


def read_announcement(announcement: Tensor) -> tuple[Shapes, Structure]:
    """Returns the shapes and the structure of an announcement; the structure is None for positional tensors."""
    shapes, structure = read_plain(announcement)
    return shapes, structure
