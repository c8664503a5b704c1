"""Splits a batch into microbatches, and joins the outputs of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.arguments import wrong
from zerobubble.error_reports.user_code import warn_user
from zerobubble.errors import InputError
from zerobubble.runtime.step.batch_objects import FROM_NUMPY, NamedBatch, cut_structures
from zerobubble.runtime.step.batch_objects import BatchDims as BatchDims
from zerobubble.runtime.step.input_gradients import InputGradients
from zerobubble.runtime.values.payload import (
    Constant,
    Container,
    Payload,
    Structure,
    Tensors,
    constant_of,
    flatten_pytree,
    is_plain_dataclass,
    opaque_types_in,
    unflatten_pytree,
)

OUTPUTS = "outputs"
"""The name of the outputs of the model in `batch_dims`."""
GIVEN_AS_LIST = 0
"""The `batch_size` of microbatches that the user gave as a list."""


_CALLS = {
    "inputs": "call pipe.step(x, targets) or pipe.eval_step(x)",
    "targets": "call pipe.step(x, targets), or pipe.eval_step(x) for outputs alone",
}
"""The calls that have an argument."""


class StepInputs(NamedTuple):
    """The user's arguments for one step; see `Pipeline.step`."""

    inputs: Any
    targets: Any
    kwargs: Any
    batch_dims: BatchDims
    scaler: torch.amp.GradScaler | None = None

    def refuse_missing(self, rank: int, *, is_first: bool, needs_targets: bool) -> None:
        """Raises `InputError` if `rank` needs inputs or targets but got none."""
        for what, value, where, needed in (("inputs", self.inputs, "first", is_first), ("targets", self.targets, "last", needs_targets)):
            if needed and value is None:
                message = "{argument} are missing: rank {rank} holds the {stage} stage and needs them; {remedy}"
                raise InputError(message, argument=what, rank=rank, stage=where, remedy=_CALLS[what])


class SplitBatch(NamedTuple):
    """The `microbatches` of a batch, the number of samples of each, and the batch size or `GIVEN_AS_LIST`."""

    microbatches: list[Any]
    sizes: list[int]
    batch_size: int


NO_BATCH = SplitBatch([], [], GIVEN_AS_LIST)
"""For a rank that needs no batch."""


def split_batch(
    batch: Any, num_microbatches: int, what: str, gradients: InputGradients, batch_dims: BatchDims, names: Sequence[str] = ()
) -> SplitBatch:
    """Splits `batch` into microbatches whose sizes differ by at most one, larger ones first.

    `batch` is a tensor, or a tuple, dict or dataclass with tensors, which are split along dimension 0, or the one in `batch_dims`. All
    other values go to every microbatch (see `cut_structures` for objects), as do tensors without dimensions, and tensors of size 1 in a
    larger batch, which broadcast. A list holds the microbatches themselves. `gradients` collects the gradients of tensors that require one.
    `names` are those of positional arguments, for `batch_dims`.

    Raises `InputError` for other types, tensors that cannot be split or whose batch sizes differ, fewer samples than microbatches, and
    lists of another length.
    """
    if isinstance(batch, list):
        return _from_list(batch, num_microbatches, what, gradients)
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    tensors, structure = flatten_pytree(batch, opaque=True)
    _refuse_meta(tensors, what)
    named = NamedBatch(what, tensors, structure, names)
    dims = _dims_in(named, batch_dims)
    size = _batch_size(named, dims, num_microbatches)
    rows = sample_slices(size, num_microbatches)
    is_cut = [dim is not None and tensor.shape[dim] == size for tensor, dim in zip(tensors, dims, strict=True)]
    parts = [gradients.parts(t, what, rows, dim if cut else None) for t, dim, cut in zip(tensors, dims, is_cut, strict=True)]
    structures = cut_structures(named, rows, batch_dims, is_cut)
    microbatches = [
        unflatten_pytree(structure, iter(tensors)) for structure, tensors in zip(structures, zip(*parts, strict=True), strict=True)
    ]
    return SplitBatch(microbatches, [part.stop - part.start for part in rows], size)


def _refuse_meta(tensors: Sequence[Tensor], what: str) -> None:
    """Raises `InputError` for tensors without values."""
    if any(tensor.is_meta for tensor in tensors):
        message = "{argument} has a tensor on the meta device, which has no values"
        raise InputError(message, argument=what, remedy="give tensors with values")


def dim_named(tensor: Tensor, name: str, batch_dims: BatchDims) -> int | None:
    """Returns the dimension in `batch_dims` for a tensor in the argument `name`. Raises `InputError` if the tensor does not have it."""
    dim = batch_dims[name]
    if dim is not None and dim >= tensor.dim():
        raise InputError(
            "batch_dims gives {name!r} the batch dimension {dim}, counted from 0, which its shape {shape} does not have",
            name=name,
            dim=dim,
            shape=tuple(tensor.shape),
        )
    return dim


def _dims_in(batch: NamedBatch, batch_dims: BatchDims) -> list[int | None]:
    """Returns the batch dimension of each tensor of `batch`; None for tensors that all microbatches share."""
    places = zip(batch.tensors, batch.places(), strict=True)
    first = [0 if tensor.dim() else None for tensor in batch.tensors]
    if not batch_dims:
        return first
    return [dim_named(t, name, batch_dims) if name in batch_dims else dim for (t, (name, _)), dim in zip(places, first, strict=True)]


def _batch_size(batch: NamedBatch, dims: Sequence[int | None], num_microbatches: int) -> int:
    """Returns the batch size of tensors with these batch dimensions. Raises `InputError` if they cannot be split."""
    what = batch.what
    places = zip(batch.tensors, dims, batch.places(), strict=True)
    cut = [(tensor, dim, where) for tensor, dim, (_, where) in places if dim is not None]
    if not cut:
        raise _without_batch(batch, num_microbatches)
    for tensor, _, where in cut:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind, remedy = "nested", f"give a list of the {num_microbatches} microbatches"
            if not tensor.is_nested:  # stages do not send it
                kind = f"sparse ({tensor.layout})"
                remedy = f"pass it .to_dense(), make it a buffer of the model, or {remedy} if only the first stage reads it"
            raise InputError("{place} is a tensor that is {got} and cannot be split", place=where, got=kind, remedy=remedy)
    sizes = {tensor.shape[dim]: where for tensor, dim, where in reversed(cut)}
    sizes = {size: where for size, where in sizes.items() if size != 1} or sizes  # size 1 broadcasts
    if len(sizes) > 1:
        raise InputError(
            "the tensors of {argument} must share their batch size, got {got}: {places}",
            argument=what,
            got=sorted(sizes),
            places=", ".join(f"{size} of {where}" for size, where in sorted(sizes.items())),
            remedy="give Pipeline their batch dimensions by name, None for tensors that all microbatches share: "
            "batch_dims={'position_ids': 1, 'mask': None}; for a list with an entry for each sample, give a list of microbatches",
        )
    (size,) = sizes
    if size < num_microbatches:
        raise InputError(
            "{argument} of batch size {got} cannot be split into {expected} microbatches",
            argument=what,
            got=size,
            expected=num_microbatches,
            remedy=f"give at least one sample for each microbatch, or num_microbatches={size} on every rank"
            if size
            else "leave out an empty batch",
        )
    return size


def _without_batch(batch: NamedBatch, num_microbatches: int) -> InputError:
    """Returns the error of a batch in which no tensor is cut."""
    arrays = [where for _, where, part in batch.items() if any("ndarray" in kind.__name__ for kind in opaque_types_in(part))]
    got = "no tensor with a batch" if batch.tensors else _kind_of(batch.structure)
    return InputError(
        "{argument} must be {expected}; got {got}{places}",
        argument=batch.what,
        expected=f"a tensor, tuple or dict, with the batch in dimension 0 of each tensor, or a list of {num_microbatches} microbatches",
        got=got,
        places=f" with arrays in {', '.join(arrays)}" if arrays and got != "ndarray" else "",
        remedy=FROM_NUMPY if arrays else "",
    )


def _kind_of(structure: Structure) -> str:
    return structure.kind.__name__ if isinstance(structure, (Constant, Container)) else str(structure)


@lru_cache(64)
def sample_slices(size: int, num_microbatches: int) -> tuple[slice, ...]:
    """Returns the samples of each microbatch of a batch of `size` samples, like `torch.tensor_split`."""
    rest = size % num_microbatches
    ends = [size // num_microbatches * j + min(j, rest) for j in range(num_microbatches + 1)]
    return tuple(slice(start, end) for start, end in pairwise(ends))


def _from_list(listed: list[Any], num_microbatches: int, what: str, gradients: InputGradients) -> SplitBatch:
    if len(listed) != num_microbatches:
        message = "{argument} is a list of {got}, but a list has one item for each of the {expected} microbatches"
        raise InputError(message, argument=what, got=len(listed), expected=num_microbatches, remedy=_grouped(len(listed), num_microbatches))
    microbatches, sizes = [], []
    for j, item in enumerate(listed):
        tensors, structure = flatten_pytree(dict(item) if isinstance(item, Mapping) else item, opaque=True)
        if not (isinstance(item, (Tensor, tuple, list, Mapping)) or is_plain_dataclass(item)) or not tensors:
            remedy = FROM_NUMPY if type(item).__name__ == "ndarray" else ""
            raise wrong(f"microbatch {j} of {what}", item, "a tensor, or a tuple or dict with tensors", remedy)
        _refuse_meta(tensors, f"microbatch {j} of {what}")
        microbatches.append(unflatten_pytree(structure, (gradients.part(tensor, what) for tensor in tensors)))
        sizes.append(len(item) if _has_samples(item) else next((tensor.size(0) for tensor in tensors if tensor.dim()), 1))
    return SplitBatch(microbatches, sizes, GIVEN_AS_LIST)


def _grouped(num_samples: int, num_microbatches: int) -> str:
    """Returns how to group a list with an entry for each sample."""
    group_size, rest = divmod(num_samples, num_microbatches)
    group = f"[samples[j:j + {group_size}] for j in range(0, {num_samples}, {group_size})]"
    how = f"as {group}" if group_size and not rest else f"into {num_microbatches} lists"
    return f"unpack a batch of inputs and targets, pipe.step(*batch); give several inputs as a tuple, and group a list with samples {how}"


def _has_samples(item: Any) -> bool:
    """Returns whether a microbatch is a list with a dict or dataclass for each sample, such as the targets of detection."""
    return isinstance(item, list) and all(isinstance(sample, Mapping) or is_plain_dataclass(sample) for sample in item)


def as_target(target: Any) -> Any:
    """Returns a target as `loss_fn` takes it: a tuple of one becomes its item."""
    return target[0] if isinstance(target, tuple) and len(target) == 1 else target


def as_arguments(microbatch: Any) -> Tensors:
    """Returns a microbatch as the arguments of the first stage: a tuple as positional ones, a dict as named ones, or one object."""
    if isinstance(microbatch, Tensor):
        return (microbatch,)
    if is_plain_dataclass(microbatch):
        microbatch = (microbatch,)
    if isinstance(microbatch, (tuple, list)) and all(isinstance(part, Tensor) for part in microbatch):
        return tuple(microbatch)
    tensors, structure = flatten_pytree(microbatch, opaque=True)
    return Payload.from_tensors(tensors, structure)


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int] = (), dim: int = 0, *, takes_first: bool = False) -> Any:
    """Joins the outputs of all microbatches: tensors are concatenated along the batch, scalars stacked, and equal values kept once.

    The batch is `dim` if that has the `sizes` of the microbatches, or they are not known, or another one, see `_batch_dims`. If several are
    possible, it is the first one with `takes_first`, and else none, with a warning. Tuples, dicts and dataclasses, such as the outputs of
    Transformers, are joined item by item. Outputs that cannot be joined, such as tensors of different sizes, are returned as a list with an
    item per microbatch. Objects of other classes are never compared. The output of a single microbatch is returned as it is.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(isinstance(output, Tensor) for output in outputs):
        return _joined_tensors(list(outputs), sizes, dim, takes_first=takes_first)
    items = _items_of_all(outputs)
    if items is None:
        return first if _are_the_same(outputs) else list(outputs)
    join = partial(join_outputs, sizes=sizes, dim=dim, takes_first=takes_first)
    return _with_items(first, {name: join([of_one[name] for of_one in items]) for name in items[0]})


def _items_of_all(outputs: Sequence[Any]) -> list[dict[Any, Any]] | None:
    """Returns the items of each output by their names or places; None if they are not containers of one form."""
    items = [named for output in outputs if (named := _items(output)) is not None]
    are_alike = all(isinstance(output, Mapping) for output in outputs) or len({type(output) for output in outputs}) == 1
    are_alike = are_alike and len(items) == len(outputs) and all(named.keys() == items[0].keys() for named in items)
    return items if are_alike else None


def _items(output: Any) -> dict[Any, Any] | None:
    if isinstance(output, Mapping):
        return dict(output)
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in fields(output) if field.init}
    return dict(enumerate(output)) if isinstance(output, (tuple, list)) and not isinstance(output, torch.Size) else None


def _with_items(container: Any, items: dict[Any, Any]) -> Any:
    """Returns a container of the same class with other items; a dict in place of other mappings than dataclasses."""
    kind = type(container)
    if isinstance(container, Mapping):
        return kind(**items) if is_dataclass(kind) else items
    if is_dataclass(kind):
        return replace(container, **items)
    values = items.values()
    return container._make(values) if hasattr(container, "_make") else kind(values)


def _are_the_same(outputs: Sequence[Any]) -> bool:
    """Whether all are one object, or equal constants. Only constants are compared: `==` of other classes may return an array or raise."""
    first = outputs[0]
    if all(output is first for output in outputs):
        return True
    if isinstance(first, torch.Size):
        return all(isinstance(output, torch.Size) and output == first for output in outputs)
    constant = constant_of(first)
    return constant is not None and all(constant_of(output) == constant for output in outputs)


def _joined_tensors(outputs: list[Tensor], sizes: Sequence[int], dim: int, *, takes_first: bool) -> Tensor | list[Tensor]:
    if any(output.is_nested for output in outputs) or len({output.dim() for output in outputs}) > 1:
        return outputs
    shapes = [output.shape for output in outputs]
    if not shapes[0]:
        return outputs if dim else torch.stack(outputs)
    possible = _batch_dims(shapes, sizes, dim) if len(sizes) == len(outputs) and all(sizes) else [dim]
    if len(possible) > 1 and not takes_first:
        _warn_of_dims(shapes[0], sizes[0], possible)
        return outputs
    batch_dim = next(iter(possible), len(shapes[0]))
    if batch_dim >= len(shapes[0]) or len({(*shape[:batch_dim], *shape[batch_dim + 1 :]) for shape in shapes}) > 1:
        return outputs
    return torch.cat(outputs, batch_dim)


def _batch_dims(shapes: Sequence[torch.Size], sizes: Sequence[int], first: int) -> list[int]:
    """Returns the dimensions in which tensors with these shapes may have the batch, for microbatches of these sizes.

    It is `first` if that has the sizes, or else one that has. Several rows for each sample, such as those of its tokens, or a number of
    rows that depends on it are in dimension 0.
    """
    of_dims = list(zip(*shapes, strict=True))
    having = [dim for dim, lengths in enumerate(of_dims) if list(lengths) == list(sizes)]
    if first in having:
        return [first]
    varying = [dim for dim, lengths in enumerate(of_dims) if len(set(lengths)) > 1]
    rows_of_sample = {divmod(rows, size) for rows, size in zip(of_dims[0], sizes, strict=True)}
    has_rows = len(rows_of_sample) == 1 and all(rest == 0 for _, rest in rows_of_sample)
    return sorted({*having, *([0] if has_rows or varying == [0] else [])})


def _warn_of_dims(shape: torch.Size, samples: int, possible: Sequence[int]) -> None:
    warn_user(
        f"eval_step returns a list of outputs, one for each microbatch: in the shape {tuple(shape)} of a microbatch of {samples} samples, "
        f"the batch may be in dimension {' or '.join(map(str, possible))}; return it in dimension 0, or give "
        f"zb.Pipeline(..., batch_dims={{{OUTPUTS!r}: {possible[-1]}}})"
    )


def refuse_other_size(what: str, size: int, batch_size: int, of_rank: int | None = None) -> None:
    """Raises `InputError` if the batch size of `what` differs from that of the first stage's inputs, unless one was given as a list.

    `of_rank` is the rank that gave the inputs, if it is not this one.
    """
    if GIVEN_AS_LIST not in (size, batch_size) and size != batch_size:
        where = "" if of_rank is None else f" of rank {of_rank}"
        raise InputError(
            "inputs{where} have batch size {expected}, but {argument} have {got}, so their microbatches do not match",
            where=where,
            expected=batch_size,
            argument=what,
            got=size,
            remedy=f"give {'every rank the same batch' if where else 'both with the same batch size'}, or lists of microbatches",
        )
