"""Cuts what is neither a tensor nor a plain value in a batch, as `torch.distributed.pipelining` does, and refuses what would stay uncut."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from zerobubble.errors import InputError
from zerobubble.runtime.values.payload import Constant, Container, Opaque, Structure
from zerobubble.runtime.values.stored import attributes_of

BatchDims = Mapping[str, int | None]
"""By name of an argument, its batch dimension, if that is not 0; None for an argument that all microbatches share."""
_UNNAMED = 0


def cut_structures(structure: Structure, rows: Sequence[slice], what: str, batch_dims: BatchDims) -> list[Structure]:
    """Returns the structure of each microbatch: a `BlockMask` of flex attention is cut, and other objects go to every microbatch.

    Raises `InputError` for an object with the batch inside, such as a NumPy array, unless `batch_dims` has None for it, and for an argument
    in `batch_dims` without anything to cut.
    """
    if not isinstance(structure, Container) or not structure.keys:
        return _cut(structure, rows, what, _UNNAMED)
    cut = [
        _cut_named(part, rows, f"{what}[{key!r}]", batch_dims.get(key, _UNNAMED), is_named=key in batch_dims)
        for key, part in zip(structure.keys, structure.parts, strict=True)
    ]
    return [structure._replace(parts=parts) for parts in zip(*cut, strict=True)]


def _cut_named(part: Structure, rows: Sequence[slice], where: str, dim: int | None, *, is_named: bool) -> list[Structure]:
    if is_named and dim is not None and not _has_batch(part):
        remedy = "leave its name out of batch_dims, or give a tensor"
        raise InputError("batch_dims gives {place} the batch dimension {dim}, but it has no tensor", place=where, dim=dim, remedy=remedy)
    return _cut(part, rows, where, dim)


def _has_batch(structure: Structure) -> bool:
    """Returns whether anything in a pytree is cut."""
    if isinstance(structure, Container):
        return any(map(_has_batch, structure.parts))
    return structure is None or (
        isinstance(structure, Constant) and isinstance(structure.value, Opaque) and _is_mask(structure.value.value)
    )


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
    tensors = (attributes_of(value) or {}).values()
    shapes = [getattr(value, "shape", None), *(tensor.shape for tensor in tensors if isinstance(tensor, Tensor))]
    if size > 1 and any(shape and shape[0] == size for shape in shapes if isinstance(shape, tuple)):
        raise InputError(
            "{place} is of type {got} and holds the batch of {size} samples, but only tensors are cut",
            place=where,
            got=type(value).__name__,
            size=size,
            remedy="give its tensors (torch.from_numpy(array) of an array), or a list of microbatches; if all microbatches share it, give "
            "Pipeline batch_dims={name: None}",
        )
    return [value] * len(rows)


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
    return [_rows_of_mask(mask, own) for own in rows]


def _rows_of_mask(mask: Any, own: slice) -> Any:
    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return mask.mask_mod(b + own.start, h, q, kv)

    full = mask.full_kv_num_blocks is not None
    return type(mask).from_kv_blocks(
        mask.kv_num_blocks[own],
        mask.kv_indices[own],
        mask.full_kv_num_blocks[own] if full else None,
        mask.full_kv_indices[own] if full else None,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=mask.seq_lengths,
    )
