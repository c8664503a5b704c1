"""Cuts what is neither a tensor nor a plain value in a batch, as `torch.distributed.pipelining` does, and refuses what would stay uncut."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from zerobubble.error_reports.user_code import warn_user
from zerobubble.errors import InputError
from zerobubble.runtime.values.payload import Constant, Container, Opaque, Structure, flatten_pytree, opaque_in
from zerobubble.runtime.values.stored import attributes_of, entries_of

BatchDims = Mapping[str, int | None]
"""By name of an argument, its batch dimension, if that is not 0; None for an argument that all microbatches share."""
_UNNAMED = 0


class NamedBatch(NamedTuple):
    """A batch, which errors call `what`: its tensors, its structure, and the name of each of its items, if it has items with names.

    The items of a tuple, and a batch that is a single tensor, have the names of the positional arguments `names` that they become.
    """

    what: str
    tensors: Sequence[Tensor]
    structure: Structure
    names: Sequence[str]

    def items(self) -> Iterator[tuple[Any, str, Structure]]:
        """Yields the name, the place and the structure of each item."""
        structure = self.structure
        if not isinstance(structure, Container):
            yield next(iter(self.names), None), self.what, structure
            return
        for number, part in enumerate(structure.parts):
            key = structure.keys[number] if structure.keys else number
            name = key if structure.keys or number >= len(self.names) else self.names[number]
            yield name, f"{self.what}[{key!r}]", part

    def places(self) -> list[tuple[Any, str]]:
        """Returns the name and the place of the item of each tensor."""
        return [(name, where) for name, where, part in self.items() for _ in range(num_tensors(part))]


def cut_structures(batch: NamedBatch, rows: Sequence[slice], batch_dims: BatchDims, is_cut: Sequence[bool]) -> list[Structure]:
    """Returns the structure of each microbatch: a `BlockMask` of flex attention is cut, and other objects go to every microbatch.

    `is_cut` states for each tensor whether it is cut. Raises `InputError` for an object with the batch inside, such as a NumPy array, and
    for a list with an entry for each sample, unless `batch_dims` has None for them, and for an argument in `batch_dims` without anything
    to cut. Warns once of a list of numbers or strings as long as the batch, which may be of all samples by chance.
    """
    flags = iter(is_cut)
    cut = []
    for name, where, part in batch.items():
        dim = batch_dims.get(name, _UNNAMED)
        if name in batch_dims and dim is not None and not _has_batch(part):
            remedy = "leave its name out of batch_dims, or give a tensor"
            raise InputError(
                "batch_dims gives {place} the batch dimension {dim}, but it has no tensor", place=where, dim=dim, remedy=remedy
            )
        cut.append(_cut(part, rows, where, dim))
        _flags_without_samples(part, flags, rows[-1].stop if rows and dim is not None else 0, where)
    if not isinstance(batch.structure, Container):
        return cut[0]
    return [batch.structure._replace(parts=parts) for parts in zip(*cut, strict=True)] if cut else [batch.structure] * len(rows)


def _flags_without_samples(structure: Structure, flags: Iterator[bool], size: int, where: str) -> list[bool]:
    """Returns whether each tensor of a pytree is cut. Refuses a list with uncut tensors for each of `size` samples, and warns of others."""
    if not isinstance(structure, Container):
        return [next(flags)] if structure is None else []
    keys = structure.keys or range(len(structure.parts))
    of_parts = [_flags_without_samples(part, flags, size, f"{where}[{key!r}]") for key, part in zip(keys, structure.parts, strict=True)]
    inside = [flag for part in of_parts for flag in part]
    if structure.kind in (list, tuple) and 1 < size == len(of_parts) and not any(inside):
        if inside and all(of_parts):
            raise InputError(
                "{place} is a {got} with an entry for each of {size} samples, but only tensors are cut",
                place=where,
                got=structure.kind.__name__,
                size=size,
                remedy=f"give a list of microbatches, each with its own samples; {_SHARED}",
            )
        if structure.kind is list and not inside:
            _warn_of_list(where, size)
    return inside


@cache
def _warn_of_list(where: str, size: int) -> None:
    warn_user(
        f"{where} is a list of {size} values, as many as the batch has samples, and goes whole to every microbatch. If it has an entry for "
        f"each sample, give a tensor, or a list of microbatches; {_SHARED}"
    )


def num_tensors(structure: Structure) -> int:
    """Returns the number of tensors in a pytree."""
    return sum(map(num_tensors, structure.parts)) if isinstance(structure, Container) else int(structure is None)


def _has_batch(structure: Structure) -> bool:
    """Returns whether anything in a pytree is cut."""
    return num_tensors(structure) > 0 or any(map(_is_mask, opaque_in(structure)))


def _cut(structure: Structure, rows: Sequence[slice], where: str, dim: int | None) -> list[Structure]:
    if dim is None or not rows:
        return [structure] * len(rows)
    if isinstance(structure, Container):
        if structure.kind is PackedSequence:
            message = "{place} is a PackedSequence, which cannot be cut into microbatches"
            raise InputError(message, place=where, remedy="give padded tensors, or a list of microbatches")
        cut = [_cut(part, rows, where, dim) for part in structure.parts]
        return [structure._replace(parts=parts) for parts in zip(*cut, strict=True)] if cut else [structure] * len(rows)
    if isinstance(structure, Constant) and isinstance(structure.value, Opaque):
        value = structure.value.value
        return [structure._replace(value=Opaque(part)) for part in _parts_of(value, rows, where, dim)]
    return [structure] * len(rows)


def _parts_of(value: Any, rows: Sequence[slice], where: str, dim: int) -> list[Any]:
    size = rows[-1].stop
    if _is_mask(value):
        return _cut_mask(value, rows, where, dim)
    shapes = [getattr(value, "shape", None), *(tensor.shape for tensor in _tensors_inside(value))]
    if size > 1 and any(shape and shape[0] == size for shape in shapes if isinstance(shape, tuple)):
        raise InputError(
            "{place} is of type {got} and holds the batch of {size} samples, but only tensors are cut",
            place=where,
            got=type(value).__name__,
            size=size,
            remedy=f"give its tensors ({_how_to_give(value)}), or a list of microbatches; {_SHARED}",
        )
    return [value] * len(rows)


FROM_NUMPY = "torch.from_numpy(array) gives a tensor"
_SHARED = "if all microbatches share it, give Pipeline batch_dims={name: None}"
_DEPTH = 3
"""How far the search for tensors goes: a cache of keys and values has layers, which have tensors."""


def _how_to_give(value: Any) -> str:
    return "as a plain dict" if isinstance(value, Mapping) else "torch.from_numpy(array) of an array"


def _tensors_inside(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yields the tensors that an object has as attributes or as entries, and those of objects in it; a module has no part of the batch."""
    if isinstance(value, (nn.Module, type)) or callable(value):
        return
    attributes = attributes_of(value) or {}
    entries = entries_of(value) if isinstance(value, (dict, MappingProxyType, list, tuple, set, frozenset, deque)) else ()
    tensors, structure = flatten_pytree([*attributes.values(), *entries], opaque=True)
    yield from tensors
    if depth > 1:
        for part in opaque_in(structure):
            yield from _tensors_inside(part, depth - 1)


def _is_mask(value: Any) -> bool:
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # nobody has such a mask before this module is imported
    return flex is not None and isinstance(value, flex.BlockMask)


def _cut_mask(mask: Any, rows: Sequence[slice], where: str, dim: int) -> list[Any]:
    """Returns the rows of a mask. Its function sees the samples' numbers in the whole batch."""
    size = mask.kv_num_blocks.size(0)
    if size == 1:
        return [mask] * len(rows)
    if size != rows[-1].stop or dim:
        message = "{place} is a BlockMask of batch size {got} in dimension 0, and the batch has {expected} samples"
        remedy = "create it for the batch, or with B=None for all samples"
        raise InputError(message, place=where, got=size, expected=rows[-1].stop, remedy=remedy)
    return [_rows_of_mask(mask, rows_of_one) for rows_of_one in rows]


def _rows_of_mask(mask: Any, rows: slice) -> Any:
    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return mask.mask_mod(b + rows.start, h, q, kv)

    full = mask.full_kv_num_blocks is not None
    return type(mask).from_kv_blocks(
        mask.kv_num_blocks[rows],
        mask.kv_indices[rows],
        mask.full_kv_num_blocks[rows] if full else None,
        mask.full_kv_indices[rows] if full else None,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=mask.seq_lengths,
    )
