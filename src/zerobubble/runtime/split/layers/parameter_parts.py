"""Identifies which part of a parameter a product uses, and adds the gradient to that part of `.grad`.

Experts keep their matrices in one parameter, and each product uses a slice of it: `self.gate_up_proj[i]`, or the transposed stack. The
autograd graph of such a view leads to the parameter, and its geometry gives the slice of `.grad`. Autograd would instead pad the gradient
of every slice with zeros to the size of the parameter.
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
"""Autograd nodes of views in which each element of the base occurs at most once, unchanged."""
_GATHERING = "IndexBackward0"
_ACCUMULATING = "torch::autograd::AccumulateGrad"


class Slice(NamedTuple):
    """A view of a contiguous tensor, by its geometry."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def select(self, whole: Tensor) -> Tensor:
        """Returns the slice of `whole`, a view."""
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)

    def add(self, whole: Tensor, gradient: Tensor) -> None:
        """Adds `gradient` to the slice of `whole`."""
        self.select(whole).add_(gradient)


class Gathered:
    """Matrices gathered from a stack, `whole[indices]`, possibly with repetitions. `indices` is copied, since the model may change it.

    Compares by identity.
    """

    def __init__(self, indices: Tensor) -> None:
        self._indices = indices.clone()

    def select(self, whole: Tensor) -> Tensor:
        """Returns the matrices, copied from `whole`."""
        return whole[self._indices]

    def add(self, whole: Tensor, gradient: Tensor) -> None:
        """Adds the gradient of each matrix to its place in `whole`."""
        whole.index_put_((self._indices,), gradient.to(whole.dtype), accumulate=True)


class Matrix(NamedTuple):
    """The matrix that a product uses: a `part` of `parameter` (None for all), transposed relative to its storage if `is_transposed`."""

    parameter: nn.Parameter
    part: Slice | Gathered | None = None
    is_transposed: bool = False

    def stored_in(self, whole: Tensor) -> Tensor:
        """Returns the part of `whole`, the parameter or a copy of it, as stored."""
        return whole if self.part is None else self.part.select(whole)

    def used(self, stored: Tensor) -> Tensor:
        """Returns the stored matrix as the product uses it."""
        return stored.mT if self.is_transposed else stored

    def transposed(self) -> Matrix:
        """Returns the transposed matrix."""
        return self._replace(is_transposed=not self.is_transposed)


def matrix_in(tensor: object) -> Matrix | None:
    """Returns the matrix of a parameter that `tensor` is a view of or was gathered from.

    None for other tensors, such as those computed from parameters.
    """
    if type(tensor) is nn.Parameter:
        return Matrix(tensor)
    if type(tensor) is not Tensor or tensor.grad_fn is None or tensor._backward_hooks or tensor.retains_grad:
        return None
    base = tensor._base
    if base is None:
        return _gathered_in(tensor)
    if type(base) is not nn.Parameter or not base.is_contiguous() or not _passes_gradient_to(base, tensor):
        return None
    is_transposed = tensor.dim() >= 2 and tensor.stride(-2) == 1 != tensor.stride(-1)
    stored = tensor.detach()
    if is_transposed:
        stored = stored.mT
    if stored.shape == base.shape and stored.stride() == base.stride():
        return Matrix(base, None, is_transposed)
    place = Slice(tuple(stored.shape), stored.stride(), int(stored.storage_offset() - base.storage_offset()))
    return Matrix(base, place, is_transposed)


def _passes_gradient_to(base: nn.Parameter, view: Tensor) -> bool:
    """Returns whether autograd would pass the gradient of `view` unchanged to `base`."""
    node = view.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return _accumulates_in(node) is base


def note_indexing(result: object, tensor: object, index: object) -> None:
    """Records the indices `index` with which `result` was gathered from a stack in a parameter, `tensor[index]`.

    Autograd has saved them too, but reading them there would call the unpack hooks of saved tensors: a checkpoint around the module would
    recompute its forward.
    """
    if type(result) is Tensor and type(tensor) is nn.Parameter and type(index) is Tensor and index.dtype == torch.int64:
        result._zb_indices = index, index._version  # type: ignore[attr-defined]


def _gathered_in(tensor: Tensor) -> Matrix | None:
    """Returns the matrices gathered from a stack in a parameter by one index tensor, None for other tensors."""
    indices, version = getattr(tensor, "_zb_indices", (None, 0))
    node = tensor.grad_fn
    # Another version means that the model has changed the indices in place since.
    if indices is None or indices._version != version or node is None or node.name() != _GATHERING:
        return None
    parameter = _accumulates_in(node.next_functions[0][0])
    return Matrix(parameter, Gathered(indices)) if type(parameter) is nn.Parameter else None


def _accumulates_in(node: object) -> object:
    """Returns the tensor of an autograd node that adds to its `.grad`, None for other nodes."""
    return node.variable if node is not None and node.name() == _ACCUMULATING else None  # type: ignore[attr-defined]
