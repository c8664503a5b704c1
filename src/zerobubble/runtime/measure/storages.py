"""The storages of a tensor: one, or several for sparse tensors and subclasses made of other tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (Tensor, nn.Parameter)
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages_of(tensor: Tensor) -> tuple[torch.UntypedStorage, ...]:
    """Returns the storages that hold `tensor`; none if torch does not expose them."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    if tensor.layout in _PARTS:
        return _of_all(getattr(tensor, part)() for part in _PARTS[tensor.layout])
    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return _of_all(part for part in parts if isinstance(part, Tensor))
    return (tensor.untyped_storage(),) if tensor.layout is torch.strided else ()


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the addresses of the storages of `tensors`. Tensors that share memory share an address."""
    addresses = set()
    for tensor in tensors:
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:  # nearly all tensors; each B calls this for all that it keeps
            addresses.add(tensor.untyped_storage().data_ptr())
        else:
            addresses.update(storage.data_ptr() for storage in storages_of(tensor))
    return addresses


def _of_all(tensors: Iterable[Tensor]) -> tuple[torch.UntypedStorage, ...]:
    return tuple(storage for tensor in tensors for storage in storages_of(tensor))
