"""Which part of a parameter a product uses, and where in the parameter's gradient the gradient of that part goes.

Experts keep their matrices in one parameter, and each product takes a slice of it: `self.gate_up_proj[i]`, or the whole stack transposed.
Such a view is told by its graph, and its gradient is added to the slice of `.grad` that has the same place. Nothing as large as the
parameter is made for it, whereas autograd fills the gradient of every slice up with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

_VIEWS = {
    "AliasBackward0",
    "PermuteBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "TBackward0",
    "TransposeBackward0",
    "UnbindBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
"""Nodes of autograd that show every element of a tensor at most once, and change none."""
_GATHERING = "IndexBackward0"
_ACCUMULATING = "torch::autograd::AccumulateGrad"


class Slice(NamedTuple):
    """A view of a contiguous tensor, by its geometry."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """The slice of `whole`, a view."""
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)

    def add(self, whole: Tensor, gradient: Tensor) -> None:
        """Add `gradient` to the slice of `whole`."""
        self.of(whole).add_(gradient)


class Gathered:
    """Matrices copied from a stack, `whole[numbers]`, in which one may come several times; `numbers` may be changed later.

    Two of these are never equal.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.clone()

    def of(self, whole: Tensor) -> Tensor:
        """The matrices, copied from `whole`."""
        return whole[self._numbers]

    def add(self, whole: Tensor, gradient: Tensor) -> None:
        """Add the gradient of each matrix to its own in `whole`."""
        whole.index_put_((self._numbers,), gradient.to(whole.dtype), accumulate=True)


class Matrix(NamedTuple):
    """What a product uses of `parameter`: a `part` of it, None for all, turned from how it is stored if it `is_transposed`."""

    parameter: nn.Parameter
    part: Slice | Gathered | None = None
    is_transposed: bool = False

    def stored_in(self, whole: Tensor) -> Tensor:
        """The part of `whole`, which is the parameter or a copy of it, as it is stored."""
        return whole if self.part is None else self.part.of(whole)

    def used(self, stored: Tensor) -> Tensor:
        """What is stored, as the product uses it."""
        return stored.mT if self.is_transposed else stored

    def turned(self) -> Matrix:
        """The same matrix transposed."""
        return self._replace(is_transposed=not self.is_transposed)


def matrix_in(tensor: object) -> Matrix | None:
    """The matrix of a parameter that `tensor` is, None for any other tensor: one computed from parameters, say."""
    if type(tensor) is nn.Parameter:
        return Matrix(tensor)
    if type(tensor) is not Tensor or tensor.grad_fn is None or tensor._backward_hooks or tensor.retains_grad:
        return None
    base = tensor._base
    if base is None:
        return _gathered_in(tensor)
    if type(base) is not nn.Parameter or not base.is_contiguous() or not _shows(tensor, base):
        return None
    is_transposed = tensor.dim() >= 2 and tensor.stride(-2) == 1 != tensor.stride(-1)
    stored = tensor.detach()
    if is_transposed:
        stored = stored.mT
    if stored.shape == base.shape and stored.stride() == base.stride():
        return Matrix(base, None, is_transposed)
    place = Slice(tuple(stored.shape), stored.stride(), int(stored.storage_offset() - base.storage_offset()))
    return Matrix(base, place, is_transposed)


def _shows(view: Tensor, base: nn.Parameter) -> bool:
    """Whether autograd would give `base` the gradient of `view` as it is."""
    node = view.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return _accumulates_in(node) is base


def note_indexing(result: object, tensor: object, index: object) -> None:
    """Remember by which numbers `result` was taken from a stack in a parameter, `tensor[index]`.

    Autograd has saved them, but asking it for them calls what packs and unpacks saved tensors: a checkpoint around the module would run its
    forward again.
    """
    if type(result) is Tensor and type(tensor) is nn.Parameter and type(index) is Tensor and index.dtype == torch.int64:
        result._zb_numbers = index, index._version  # type: ignore[attr-defined]


def _gathered_in(tensor: Tensor) -> Matrix | None:
    """The matrices that were taken from a stack in a parameter by one tensor of numbers."""
    numbers, version = getattr(tensor, "_zb_numbers", (None, 0))
    node = tensor.grad_fn
    if numbers is None or numbers._version != version or node is None or node.name() != _GATHERING:
        return None
    parameter = _accumulates_in(node.next_functions[0][0])
    return Matrix(parameter, Gathered(numbers)) if type(parameter) is nn.Parameter else None


def _accumulates_in(node: object) -> object:
    """The tensor to whose `.grad` this node of autograd adds, None for other nodes."""
    return node.variable if node is not None and node.name() == _ACCUMULATING else None  # type: ignore[attr-defined]
