"""A batch split into microbatches, and the outputs of microbatches joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.step.input_gradients import InputGradients
from zerobubble.runtime.values.payload import Payload, Tensors, constant_of, flatten_pytree, tensors_in, unflatten_pytree

GIVEN_AS_LIST = 0
"""The `batch_size` of microbatches that the user gave as a list."""

BatchDims = Mapping[str, int | None]
"""The dimension of the batch in arguments where it is not the first, by name; None for an argument that all microbatches share."""


class SplitBatch(NamedTuple):
    """The `microbatches` of a batch, how many samples each has, and the batch's own number of samples or `GIVEN_AS_LIST`."""

    microbatches: list[Any]
    sizes: list[int]
    batch_size: int


NO_BATCH = SplitBatch([], [], GIVEN_AS_LIST)
"""On a rank that is given none."""


def split_batch(batch: Any, num_microbatches: int, what: str, gradients: InputGradients, batch_dims: BatchDims) -> SplitBatch:
    """`batch` cut into microbatches that differ by one sample at most, bigger ones first.

    A tensor, or a tuple or dict whose tensors are cut along their first dimension or the one in `batch_dims`, and whose other parts go to
    every microbatch. So do tensors without dimensions, and those of size 1 in a larger batch, as in broadcasting. A list has the
    microbatches themselves. `gradients` gathers those of tensors that require one. Raises `InputError` for other types, tensors that cannot
    be cut or have other batch sizes, fewer samples than microbatches, and a list of another length.
    """
    if isinstance(batch, list):
        return _from_list(batch, num_microbatches, what, gradients)
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    tensors: list[Tensor] = []
    structure = flatten_pytree(batch, tensors, opaque=True)
    dims = _dims_in(batch, tensors, batch_dims)
    size = _batch_size(batch, [(t, dim) for t, dim in zip(tensors, dims, strict=True) if dim is not None], num_microbatches, what)
    rows = rows_of(size, num_microbatches)
    is_cut = [dim is not None and tensor.shape[dim] == size for tensor, dim in zip(tensors, dims, strict=True)]
    parts = [gradients.parts(t, what, rows, dim if cut else None) for t, dim, cut in zip(tensors, dims, is_cut, strict=True)]
    microbatches = [unflatten_pytree(structure, iter(of_one)) for of_one in zip(*parts, strict=True)]
    return SplitBatch(microbatches, [own.stop - own.start for own in rows], size)


def dim_named(tensor: Tensor, name: str, batch_dims: BatchDims) -> int | None:
    """What `batch_dims` says of a tensor in the argument `name`; raises `InputError` where the tensor has no such dimension."""
    dim = batch_dims[name]
    if dim is not None and dim >= tensor.dim():
        raise InputError(f"batch_dims names dimension {dim} of {name!r}, counted from 0, and its shape is {tuple(tensor.shape)}")
    return dim


def _dims_in(batch: Any, tensors: list[Tensor], batch_dims: BatchDims) -> list[int | None]:
    """The dimension of the batch in each of the `tensors` of `batch`; None for those that all microbatches share."""
    dims: list[int | None] = [0 if tensor.dim() else None for tensor in tensors]
    if isinstance(batch, dict) and not batch_dims.keys().isdisjoint(batch):
        names = [name for name, value in batch.items() for _ in tensors_in(value)]
        named = zip(names, tensors, dims, strict=True)
        dims = [dim_named(tensor, name, batch_dims) if name in batch_dims else dim for name, tensor, dim in named]
    return dims


def _batch_size(batch: Any, cut: list[tuple[Tensor, int]], num_microbatches: int, what: str) -> int:
    """The number of samples of a batch that has it in these dimensions of these tensors; raises `InputError` where it cannot be cut."""
    if not cut:
        got = "no tensor with a batch" if tensors_in(batch) else type(batch).__name__
        raise InputError(
            f"{what} must be a tensor, a tuple or a dict, its tensors with the batch as their first dimension, or a list of "
            f"{num_microbatches} microbatches; got {got}"
        )
    for tensor, _ in cut:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else f"sparse ({tensor.layout})"
            raise InputError(f"a tensor of {what} is {kind} and cannot be cut; give a list of its {num_microbatches} microbatches")
    sizes = {tensor.shape[dim] for tensor, dim in cut}
    sizes = sizes - {1} or sizes
    if len(sizes) > 1:
        raise InputError(
            f"the tensors of {what} must share their batch size, got {sorted(sizes)}; give them by name, and Pipeline the dimension of the "
            "batch where it is not the first, None for what all microbatches share: batch_dims={'position_ids': 1, 'mask': None}"
        )
    size = sizes.pop()
    if size < num_microbatches:
        raise InputError(f"{what} of batch size {size} cannot be cut into {num_microbatches} microbatches; {_remedy_for(size)}")
    return size


def _remedy_for(size: int) -> str:
    return f"give at least one sample each, or call it with num_microbatches={size} on every rank" if size else "leave out an empty batch"


@lru_cache(64)
def rows_of(size: int, num_microbatches: int) -> tuple[slice, ...]:
    """The samples of each microbatch of a batch of `size`, as `torch.tensor_split` has them."""
    rest = size % num_microbatches
    ends = [size // num_microbatches * j + min(j, rest) for j in range(num_microbatches + 1)]
    return tuple(slice(start, end) for start, end in pairwise(ends))


def _from_list(given: list[Any], num_microbatches: int, what: str, gradients: InputGradients) -> SplitBatch:
    if len(given) != num_microbatches:
        raise InputError(
            f"{what} is a list of {len(given)}, and a list has one item for each of the {num_microbatches} microbatches; "
            "give the tensors of a whole batch as a tuple"
        )
    microbatches, sizes = [], []
    for j, item in enumerate(given):
        tensors: list[Tensor] = []
        structure = flatten_pytree(dict(item) if isinstance(item, Mapping) else item, tensors, opaque=True)
        if not isinstance(item, (Tensor, tuple, list, Mapping)) or not tensors:
            raise InputError(f"microbatch {j} of {what} must be a tensor, or a tuple or dict with tensors, got {type(item).__name__}")
        microbatches.append(unflatten_pytree(structure, (gradients.part(tensor, what) for tensor in tensors)))
        sizes.append(next((tensor.size(0) for tensor in tensors if tensor.dim()), 1))
    return SplitBatch(microbatches, sizes, GIVEN_AS_LIST)


def as_arguments(microbatch: Any) -> Tensors:
    """A microbatch as the arguments of the first stage: a tuple as positional ones, a dict by name."""
    if isinstance(microbatch, Tensor):
        return (microbatch,)
    if isinstance(microbatch, (tuple, list)) and all(isinstance(part, Tensor) for part in microbatch):
        return tuple(microbatch)
    tensors: list[Tensor] = []
    structure = flatten_pytree(microbatch, tensors, opaque=True)
    return Payload.of(tensors, structure)


def join_outputs(outputs: Sequence[Any]) -> Any:
    """The outputs of all microbatches as one: tensors concatenated along dimension 0, scalars stacked, what is equal in all kept.

    Tuples, dicts and dataclasses, such as the outputs of Transformers, are joined item by item. What cannot be joined comes as a list with
    an item for each microbatch, such as tensors of other lengths and objects of other classes, which are never compared.
    """
    first = outputs[0]
    kind = type(first)
    if all(isinstance(output, Tensor) for output in outputs):
        return _joined_tensors(list(outputs))
    if isinstance(first, Mapping) and all(isinstance(output, Mapping) and output.keys() == first.keys() for output in outputs):
        joined = {key: join_outputs([output[key] for output in outputs]) for key in first}
        return kind(**joined) if is_dataclass(kind) else joined
    if is_dataclass(kind) and not isinstance(first, Mapping) and all(type(output) is kind for output in outputs):
        names = [field.name for field in fields(kind) if field.init]
        return replace(first, **{name: join_outputs([getattr(output, name) for output in outputs]) for name in names})
    is_row = isinstance(first, (tuple, list)) and kind is not torch.Size
    if is_row and all(type(output) is kind and len(output) == len(first) for output in outputs):
        items = [join_outputs(of_each) for of_each in zip(*outputs, strict=True)]
        return kind(*items) if hasattr(kind, "_make") else kind(items)
    return first if _are_the_same(outputs) else list(outputs)


def _are_the_same(outputs: Sequence[Any]) -> bool:
    """Whether these are one object, or equal constants. Only constants are compared: `==` of any other class may give an array or raise."""
    first = outputs[0]
    if all(output is first for output in outputs):
        return True
    if isinstance(first, torch.Size):
        return all(isinstance(output, torch.Size) and output == first for output in outputs)
    constant = constant_of(first)
    return constant is not None and all(constant_of(output) == constant for output in outputs)


def _joined_tensors(outputs: list[Tensor]) -> Tensor | list[Tensor]:
    if any(output.is_nested for output in outputs):
        return outputs
    sizes_of_a_sample = {tuple(output.shape[1:]) if output.dim() else None for output in outputs}
    if len(sizes_of_a_sample) > 1:
        return outputs
    return torch.stack(outputs) if sizes_of_a_sample == {None} else torch.cat(outputs)


def refuse_other_size(what: str, size: int, batch_size: int) -> None:
    """Raise `InputError` where `what` has another number of samples than the first rank's inputs, both being given whole."""
    if GIVEN_AS_LIST not in (size, batch_size) and size != batch_size:
        raise InputError(
            f"inputs have batch size {batch_size} and {what} {size}, so that their microbatches would not belong together; "
            "give both as long, or as lists of the microbatches"
        )
