"""Takes sparse tensors apart into the plain tensors that they consist of, and joins these again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that return the parts of a sparse tensor, by layout."""


def is_sparse(tensor: Tensor) -> bool:
    """Returns whether `tensor` has a sparse layout."""
    return tensor.layout in _PARTS


def is_compressed(tensor: Tensor) -> bool:
    """Returns whether `tensor` has a sparse layout with compressed indices, such as CSR."""
    return is_sparse(tensor) and tensor.layout is not torch.sparse_coo


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Returns the indices and values of a sparse tensor, in their own memory; any other tensor alone."""
    return [getattr(tensor, part)() for part in _PARTS[tensor.layout]] if is_sparse(tensor) else [tensor]


class TensorForm(NamedTuple):
    """What a tensor is besides its numbers: its shape, its layout, and the shape and dtype of its `parts_of`."""

    shape: tuple[int, ...]
    layout: str
    is_coalesced: bool
    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        layout = str(tensor.layout).removeprefix("torch.")
        is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        return cls(tuple(tensor.shape), layout, is_coalesced, tuple((tuple(part.shape), part.dtype) for part in parts_of(tensor)))

    def empty_parts(self, device: torch.device) -> list[Tensor]:
        """Returns memory for the parts of a tensor of this form."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.parts]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the tensor of this form that consists of `parts`."""
        layout = getattr(torch, self.layout)
        if layout is torch.sparse_coo:
            indices, values = parts
            return torch.sparse_coo_tensor(indices, values, self.shape, is_coalesced=self.is_coalesced, check_invariants=False)
        if layout in _PARTS:
            compressed, plain, values = parts
            return torch.sparse_compressed_tensor(compressed, plain, values, self.shape, layout=layout, check_invariants=False)
        (whole,) = parts
        return whole
