"""The named arguments of a step: which stages take them, and what each microbatch gets of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zerobubble.errors import InputError, near
from zerobubble.runtime.step.batch import GIVEN_AS_LIST, BatchDims, dim_named, rows_of
from zerobubble.runtime.step.input_gradients import InputGradients
from zerobubble.runtime.values.payload import flatten_pytree, tensors_in, unflatten_pytree

NamedArguments = dict[int, list[dict[str, Any]]]
"""By stage, a dict of named arguments for each microbatch."""


def spread_kwargs(
    kwargs: Any,
    modules: Mapping[int, nn.Module],
    num_microbatches: int,
    batch_size: int,
    gradients: InputGradients,
    batch_dims: BatchDims,
) -> NamedArguments:
    """For each stage of a rank that takes any of `kwargs`, the ones it takes for every microbatch.

    Of a dict, tensors whose first dimension, or the one in `batch_dims`, is `batch_size` are cut as the batch is, and everything else goes
    to every microbatch; a list has a dict for each. Raises `InputError` for other types, a list of another length, names that no stage
    takes, and a dimension in `batch_dims` that does not have the batch.
    """
    each = for_each_microbatch(kwargs, num_microbatches, batch_size, gradients, batch_dims)
    names = list(dict.fromkeys(name for named in each for name in named))
    taken = names_taken(modules, names)
    _refuse_unknown(names, taken, modules)
    return {stage: [_only(named, own) for named in each] for stage, own in taken.items() if own}


def names_taken(modules: Mapping[int, nn.Module], names: Sequence[str]) -> dict[int, list[str]]:
    """By stage, those of `names` by which it can be given an argument."""
    return {stage: [name for name in names if _takes(module, name)] for stage, module in modules.items()}


def names_of_arguments(modules: Mapping[int, nn.Module]) -> list[str] | None:
    """The names by which stages can be given arguments; None where one takes every name."""
    found = {name: each for module in modules.values() for name, each in inspect.signature(module.forward).parameters.items()}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found.values()):
        return None
    return sorted(name for name in found if any(_takes(module, name) for module in modules.values()))


def for_each_microbatch(
    kwargs: Any, num_microbatches: int, batch_size: int, gradients: InputGradients, batch_dims: BatchDims
) -> list[dict[str, Any]]:
    """The named arguments of each microbatch; see `spread_kwargs`."""
    if isinstance(kwargs, dict):
        return _cut(kwargs, num_microbatches, batch_size, gradients, batch_dims)
    if not isinstance(kwargs, list) or not all(isinstance(named, dict) for named in kwargs):
        raise InputError(f"kwargs must be a dict, or a list of a dict for each microbatch, got {type(kwargs).__name__}")
    if len(kwargs) != num_microbatches:
        raise InputError(f"kwargs is a list of {len(kwargs)}, one dict for each of the {num_microbatches} microbatches is needed")
    return [_apart(named, gradients) for named in kwargs]


def _cut(
    kwargs: dict[str, Any], num_microbatches: int, batch_size: int, gradients: InputGradients, batch_dims: BatchDims
) -> list[dict[str, Any]]:
    tensors: list[Tensor] = []
    structure = flatten_pytree(kwargs, tensors, opaque=True)
    names = [name for name, value in kwargs.items() for _ in tensors_in(value)]
    dims = [_cut_dim(tensor, name, batch_size, batch_dims) for name, tensor in zip(names, tensors, strict=True)]
    rows = rows_of(batch_size, num_microbatches)
    parts = [iter(gradients.parts(tensor, "kwargs", rows, dim)) for tensor, dim in zip(tensors, dims, strict=True)]
    return [unflatten_pytree(structure, map(next, parts)) for _ in rows]


def _cut_dim(tensor: Tensor, name: str, batch_size: int, batch_dims: BatchDims) -> int | None:
    """Along which dimension the tensor of an argument is cut; None where every microbatch has all of it."""
    if batch_size == GIVEN_AS_LIST:
        return None
    if name not in batch_dims:
        return 0 if tensor.dim() and len(tensor) == batch_size else None
    dim = dim_named(tensor, name, batch_dims)
    if dim is not None and tensor.shape[dim] not in (1, batch_size):
        raise InputError(
            f"batch_dims names dimension {dim} of {name!r} for the batch, which has {batch_size} samples, and its shape is "
            f"{tuple(tensor.shape)}"
        )
    return dim if dim is not None and tensor.shape[dim] == batch_size else None


def _apart(named: dict[str, Any], gradients: InputGradients) -> dict[str, Any]:
    """The arguments of one microbatch as they were given, but for tensors that require a gradient."""
    if not any(tensor.requires_grad for tensor in tensors_in(named)):
        return named
    tensors: list[Tensor] = []
    structure = flatten_pytree(named, tensors, opaque=True)
    apart: dict[str, Any] = unflatten_pytree(structure, (gradients.part(tensor, "kwargs") for tensor in tensors))
    return apart


def _refuse_unknown(names: list[str], taken: Mapping[int, list[str]], modules: Mapping[int, nn.Module]) -> None:
    homeless = [name for name in names if not any(name in own for own in taken.values())]
    if homeless:
        known = sorted({parameter for module in modules.values() for parameter in inspect.signature(module.forward).parameters})
        raise InputError(
            f"no stage of this rank takes {', '.join(map(repr, homeless))}: {near(homeless[0], known)}"
            f"the forward of stage {', '.join(map(str, modules))} takes {', '.join(known) or 'nothing'}"
        )


def _takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward can be given an argument by this name."""
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    return name in parameters and parameters[name].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _only(named: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name in names}
