"""Cutting a batch into microbatches, and putting outputs back together."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError, near
from zerobubble.runtime.stage.stage import Tensors
from zerobubble.runtime.values.payload import Payload, put_together, take_apart, tensors_in

UNCUT = 0
"""The size of a batch that came as microbatches."""


class Cut(NamedTuple):
    """The microbatches of a batch, how many samples each has, and how many the batch had before it was cut, or `UNCUT`."""

    parts: list[Any]
    sizes: list[int]
    whole: int


def split_batch(batch: Any, num_microbatches: int, what: str) -> Cut:
    """`batch` cut along dimension 0 into microbatches that differ by one sample at most, bigger ones first.

    A tensor, or a tuple or dict whose tensors are cut and whose other parts go to every microbatch. A list has the microbatches
    themselves. Raises `InputError` for other types, tensors of different batch size, fewer samples than microbatches, and a list of
    another length.
    """
    if isinstance(batch, list):
        return _given_apart(batch, num_microbatches, what)
    tensors: list[Tensor] = []
    layout = take_apart(dict(batch) if isinstance(batch, Mapping) else batch, tensors, opaque=True)
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        got = "a tensor without dimensions" if tensors else type(batch).__name__
        raise InputError(
            f"{what} must be a tensor, a tuple or a dict, its tensors with the batch as their first dimension, or a list of "
            f"{num_microbatches} microbatches; got {got}"
        )
    found = {tensor.shape[0] for tensor in tensors}
    if len(found) > 1:
        raise InputError(
            f"the tensors of {what} must share their batch size, got {sorted(found)}; what belongs to every microbatch goes by kwargs"
        )
    size = found.pop()
    if size < num_microbatches:
        raise InputError(f"{what} of batch size {size} cannot be cut into {num_microbatches} microbatches; give at least one sample each")
    sizes = sizes_of(size, num_microbatches)
    chunks = [torch.split(tensor, sizes) for tensor in tensors]
    return Cut([put_together(layout, (chunk[j].detach() for chunk in chunks)) for j in range(num_microbatches)], sizes, size)


def sizes_of(size: int, num_microbatches: int) -> list[int]:
    """The samples of each microbatch, as `torch.tensor_split` has them."""
    return [size // num_microbatches + (j < size % num_microbatches) for j in range(num_microbatches)]


def _given_apart(parts: list[Any], num_microbatches: int, what: str) -> Cut:
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
        apart.append(put_together(layout, (tensor.detach() for tensor in tensors)))
    return Cut(apart, [next((len(t) for t in tensors_in(part) if t.dim()), 1) for part in apart], UNCUT)


def arguments(microbatch: Any) -> Tensors:
    """A microbatch as the arguments of the first stage: a tuple as positional ones, a dict by name."""
    if isinstance(microbatch, Tensor):
        return (microbatch,)
    if isinstance(microbatch, (tuple, list)) and all(isinstance(part, Tensor) for part in microbatch):
        return tuple(microbatch)
    tensors: list[Tensor] = []
    layout = take_apart(microbatch, tensors, opaque=True)
    return Payload.of(tensors, layout)


def spread_kwargs(kwargs: Any, modules: Mapping[int, nn.Module], num_microbatches: int, size: int) -> dict[int, list[dict[str, Any]]]:
    """For each stage of a rank that takes any of `kwargs`, the ones it takes for every microbatch.

    Tensors whose first dimension is the batch's `size` are cut as the batch is, everything else goes to every microbatch; a list has a
    dict for each. Raises `InputError` for a name that no stage takes.
    """
    if not isinstance(kwargs, (dict, list)) or not all(isinstance(part, dict) for part in (kwargs if isinstance(kwargs, list) else ())):
        raise InputError(f"kwargs must be a dict, or a list of a dict for each microbatch, got {type(kwargs).__name__}")
    if isinstance(kwargs, list) and len(kwargs) != num_microbatches:
        raise InputError(f"kwargs is a list of {len(kwargs)}, one dict for each of the {num_microbatches} microbatches is needed")
    each = kwargs if isinstance(kwargs, list) else [_share(kwargs, num_microbatches, size, j) for j in range(num_microbatches)]
    names = dict.fromkeys(name for part in each for name in part)
    takers = {stage: {name for name in names if _takes(module, name)} for stage, module in modules.items()}
    homeless = [name for name in names if not any(name in taken for taken in takers.values())]
    if homeless:
        known = sorted({parameter for module in modules.values() for parameter in inspect.signature(module.forward).parameters})
        raise InputError(
            f"no stage of this rank takes {', '.join(map(repr, homeless))}: {near(homeless[0], known)}"
            f"the forward of stage {', '.join(map(str, modules))} takes {', '.join(known) or 'nothing'}"
        )
    return {stage: [{k: v for k, v in part.items() if k in taken} for part in each] for stage, taken in takers.items() if taken}


def _share(kwargs: dict[str, Any], num_microbatches: int, size: int, microbatch: int) -> dict[str, Any]:
    tensors: list[Tensor] = []
    layout = take_apart(kwargs, tensors, opaque=True)
    sizes = sizes_of(size, num_microbatches)
    start = sum(sizes[:microbatch])
    cut = (t.detach()[start : start + sizes[microbatch]] if size and t.dim() and len(t) == size else t.detach() for t in tensors)
    shared: dict[str, Any] = put_together(layout, cut)
    return shared


def _takes(module: nn.Module, name: str) -> bool:
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    return name in parameters and parameters[name].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
