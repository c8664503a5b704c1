"""Cuts the batch of a data loader into microbatches of the same structure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.frameworks import sample_slices

MOST_ELEMENTS = 1 << 18
"""The number of elements of a tensor up to which a digest has all of them."""
Dims = Mapping[str, int | None]
"""By name of an argument, its batch dimension, if that is not 0; None for an argument that all microbatches share."""


def num_samples(batch: Any, dims: Dims | None = None) -> int:
    """Returns the number of samples of a batch: the size of its tensors along the first dimension, or the one in `dims`.

    Raises `InputError` if there is no tensor, or if these sizes differ.
    """
    _refuse_dicts_of_samples(batch)
    sizes = {tensor.shape[dim] for tensor, dim in _with_dims(batch, dims or {}) if dim is not None and dim < tensor.ndim}
    sizes = sizes - {1} or sizes  # a tensor of size 1 goes to every microbatch
    if len(sizes) == 1:
        return sizes.pop()
    raise InputError(
        "the tensors of a {argument} must have the samples in their first dimension, got {got}",
        argument="batch",
        got=f"sizes {sorted(sizes)}" if sizes else f"{type(batch).__name__} without a tensor",
        remedy="give tensors in tuples, lists, dicts or dataclasses, with one row for each sample: several rows as one by "
        "tensor.view(samples, k, ...), and what all samples share as a number, with a first dimension of 1 by tensor[None], or in a dict "
        "by name, with batch_dims={'table': None}",
    )


def _refuse_dicts_of_samples(batch: Any) -> None:
    """Raises `InputError` for a list with a dict of tensors for each sample, such as the labels of object detection."""
    items = batch if isinstance(batch, Mapping) else {}
    sizes = {len(item) for item in items.values() if isinstance(item, Tensor) and item.ndim}
    for name, item in items.items():
        if isinstance(item, list) and len(item) in sizes and all(isinstance(sample, Mapping) and _tensors(sample) for sample in item):
            raise InputError(
                "{name!r} of a {argument} is a list with a dict of tensors for each of {count} samples, which cannot be cut",
                argument="batch",
                name=name,
                count=len(item),
                remedy="let the data collator pad them to tensors with a row for each sample, such as boxes of shape (samples, 9, 4), and "
                "let forward of the model make the dicts",
            )


def cut(batch: Any, num_microbatches: int, dims: Dims | None = None) -> tuple[list[Any], list[int]]:
    """Returns the microbatches of a batch, and the number of samples of each.

    Cuts tensors along their first dimension, or the one in `dims`, and lists that have one item per sample and no tensors. Everything
    else, such as a tensor of size 1, goes to every microbatch.
    """
    size = num_samples(batch, dims)
    rows = sample_slices(size, num_microbatches)
    return [_cut(batch, samples, size, dims or {}) for samples in rows], [samples.stop - samples.start for samples in rows]


def samples_of(batch: Any, rows: Sequence[int], dims: Dims | None = None) -> Any:
    """Returns the batch of only these samples."""
    return _cut(batch, list(rows), num_samples(batch, dims), dims or {})


def with_new_containers(batch: Any) -> Any:
    """Returns the batch with the same tensors in new dicts, lists and dataclasses, for code that changes these."""
    return _cut(batch, slice(None), -1, {})


def refuse_different_batches(batch: Any, group: dist.ProcessGroup) -> None:
    """Raises `InputError` on every rank of a pipeline if they have different batches, or draw different random numbers."""
    digests = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest_of((batch, torch.get_rng_state())), group=group)
    refuse_different_digests(
        digests,
        "load the same batches and draw the same random numbers",
        "call lightning.seed_everything(0, workers=True), leave samplers to Lightning, and draw on all ranks alike",
    )


def refuse_different_digests(digests: Sequence[str], must: str, remedy: str) -> None:
    """Raises `InputError` if the ranks of a pipeline have different digests of their batches. `must` is what they must do instead."""
    if len(set(digests)) > 1:
        raise InputError(
            "the ranks of a pipeline must {must}, but ranks {got} have others than the first",
            must=must,
            argument="batch",
            got=", ".join(str(rank) for rank, digest in enumerate(digests) if digest != digests[0]),
            remedy=remedy,
        )


def digest_of(batch: Any) -> str:
    """Returns a digest of the values of a batch, to compare the batches of ranks. Of a large tensor, it has a part of the elements."""
    digest = hashlib.sha256()
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().flatten()
            flat = flat[:: len(flat) // MOST_ELEMENTS | 1].cpu().contiguous()  # an odd step, so that images are not read along columns
            digest.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            digest.update(flat.view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:16]


def _leaves(value: Any) -> list[Any]:
    """Returns the tensors, strings and numbers of a batch."""
    if isinstance(value, (Tensor, str, bytes, int, float)):
        return [value]
    return [leaf for item in _items(value) for leaf in _leaves(item)]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def _with_dims(batch: Any, dims: Dims) -> list[tuple[Tensor, int | None]]:
    if isinstance(batch, Mapping) and not dims.keys().isdisjoint(batch):
        return [(tensor, dims.get(name, 0)) for name, item in batch.items() for tensor in _tensors(item)]
    return [(tensor, 0) for tensor in _tensors(batch)]


def _cut(value: Any, rows: slice | list[int], size: int, dims: Dims) -> Any:
    if isinstance(value, Mapping):
        parts = {name: _cut_along(item, rows, size, dims.get(name, 0)) for name, item in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    return _cut_along(value, rows, size, 0)


def _cut_along(value: Any, rows: slice | list[int], size: int, dim: int | None) -> Any:
    if dim is None:
        return value
    if isinstance(value, Tensor):
        return value[(slice(None),) * dim + (rows,)] if value.ndim > dim and value.shape[dim] == size else value
    if isinstance(value, Mapping):
        return _cut(value, rows, size, {})
    if isinstance(value, (list, tuple)):
        return _cut_sequence(value, rows, size, dim)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _cut_along(getattr(value, field.name), rows, size, dim) for field in fields(value) if field.init}
        return replace(value, **parts)
    return value


def _cut_sequence(value: Any, rows: slice | list[int], size: int, dim: int) -> Any:
    """Cuts a list or tuple with one item per sample, or the items of another one."""
    kind, is_named = type(value), hasattr(value, "_make")
    if not is_named and len(value) == size and not _tensors(value):
        return value[rows] if isinstance(rows, slice) else kind(value[row] for row in rows)
    items = [_cut_along(item, rows, size, dim) for item in value]
    return kind(*items) if is_named else kind(items)
