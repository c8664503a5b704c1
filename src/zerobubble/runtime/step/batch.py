"""Cutting a batch into microbatches, and putting outputs back together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.step.input_gradients import InputGradients
from zerobubble.runtime.values.payload import Payload, Tensors, put_together, take_apart, tensors_in

UNCUT = 0
"""The size of a batch that came as microbatches."""


class Cut(NamedTuple):
    """The microbatches of a batch, how many samples each has, and how many the batch had before it was cut, or `UNCUT`."""

    parts: list[Any]
    sizes: list[int]
    whole: int


def split_batch(batch: Any, num_microbatches: int, what: str, gradients: InputGradients) -> Cut:
    """`batch` cut along dimension 0 into microbatches that differ by one sample at most, bigger ones first.

    A tensor, or a tuple or dict whose tensors are cut and whose other parts go to every microbatch. A list has the microbatches
    themselves. `gradients` gathers those of tensors that require one. Raises `InputError` for other types, tensors of different batch
    size, fewer samples than microbatches, and a list of another length.
    """
    if isinstance(batch, list):
        return _given_apart(batch, num_microbatches, what, gradients)
    tensors: list[Tensor] = []
    layout = take_apart(dict(batch) if isinstance(batch, Mapping) else batch, tensors, opaque=True)
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        got = "a tensor without dimensions" if tensors else type(batch).__name__
        raise InputError(
            f"{what} must be a tensor, a tuple or a dict, its tensors with the batch as their first dimension, or a list of "
            f"{num_microbatches} microbatches; got {got}"
        )
    uncut = next((tensor for tensor in tensors if tensor.is_nested or tensor.layout is not torch.strided), None)
    if uncut is not None:
        kind = "nested" if uncut.is_nested else f"sparse ({uncut.layout})"
        raise InputError(f"a tensor of {what} is {kind} and cannot be cut; give a list of its {num_microbatches} microbatches")
    found = {tensor.shape[0] for tensor in tensors}
    if len(found) > 1:
        raise InputError(
            f"the tensors of {what} must share their batch size, got {sorted(found)}; what belongs to every microbatch goes by kwargs"
        )
    size = found.pop()
    if size < num_microbatches:
        raise InputError(f"{what} of batch size {size} cannot be cut into {num_microbatches} microbatches; give at least one sample each")
    rows = rows_of(size, num_microbatches)
    parts = [put_together(layout, (gradients.part(tensor, what, own) for tensor in tensors)) for own in rows]
    return Cut(parts, [own.stop - own.start for own in rows], size)


def rows_of(size: int, num_microbatches: int) -> list[slice]:
    """The samples of each microbatch of a batch of `size`, as `torch.tensor_split` has them."""
    rest = size % num_microbatches
    ends = [size // num_microbatches * j + min(j, rest) for j in range(num_microbatches + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def _given_apart(parts: list[Any], num_microbatches: int, what: str, gradients: InputGradients) -> Cut:
    if len(parts) != num_microbatches:
        raise InputError(
            f"{what} is a list of {len(parts)}, and a list has one item for each of the {num_microbatches} microbatches; "
            "give the tensors of a whole batch as a tuple"
        )
    apart = []
    for j, part in enumerate(parts):
        tensors: list[Tensor] = []
        layout = take_apart(dict(part) if isinstance(part, Mapping) else part, tensors, opaque=True)
        if not isinstance(part, (Tensor, tuple, list, Mapping)) or not tensors:
            raise InputError(f"microbatch {j} of {what} must be a tensor, or a tuple or dict with tensors, got {type(part).__name__}")
        apart.append(put_together(layout, (gradients.part(tensor, what) for tensor in tensors)))
    return Cut(apart, [next((t.size(0) for t in tensors_in(part) if t.dim()), 1) for part in apart], UNCUT)


def arguments(microbatch: Any) -> Tensors:
    """A microbatch as the arguments of the first stage: a tuple as positional ones, a dict by name."""
    if isinstance(microbatch, Tensor):
        return (microbatch,)
    if isinstance(microbatch, (tuple, list)) and all(isinstance(part, Tensor) for part in microbatch):
        return tuple(microbatch)
    tensors: list[Tensor] = []
    layout = take_apart(microbatch, tensors, opaque=True)
    return Payload.of(tensors, layout)


def join_outputs(outputs: Sequence[Any]) -> Any:
    """The outputs of all microbatches as one: tensors concatenated along dimension 0, scalars stacked, what is equal in all kept.

    What cannot be joined comes as a list with an item for each microbatch, such as tensors of other lengths.
    """
    first = outputs[0]
    kind = type(first)
    if all(isinstance(output, Tensor) for output in outputs):
        shapes = {tuple(output.shape[1:]) if output.dim() else None for output in outputs}
        if len(shapes) > 1:
            return list(outputs)
        return torch.stack(list(outputs)) if shapes == {None} else torch.cat(list(outputs))
    if isinstance(first, Mapping) and all(isinstance(output, Mapping) and output.keys() == first.keys() for output in outputs):
        return {key: join_outputs([output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)) and all(type(output) is kind and len(output) == len(first) for output in outputs):
        parts = [join_outputs(parts) for parts in zip(*outputs, strict=True)]
        return kind(*parts) if hasattr(kind, "_make") else kind(parts)
    if all(type(output) is kind for output in outputs) and not isinstance(first, Tensor) and all(output == first for output in outputs):
        return first
    return list(outputs)


def refuse_other_size(size: int, batch_size: int) -> None:
    """Raise `InputError` where targets and inputs were both given whole and with another number of samples."""
    if UNCUT not in (size, batch_size) and size != batch_size:
        raise InputError(
            f"inputs have batch size {batch_size} and targets {size}, so that their microbatches would not belong together; "
            "give both as long, or as lists of the microbatches"
        )
