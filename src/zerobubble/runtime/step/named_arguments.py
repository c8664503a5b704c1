"""The named arguments of a step: which stages take them, and how they are split into microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zerobubble.arguments import wrong
from zerobubble.errors import InputError, near
from zerobubble.runtime.step.batch import GIVEN_AS_LIST, StepInputs, dim_named, sample_slices
from zerobubble.runtime.step.batch_objects import BatchDims, NamedBatch, cut_structures
from zerobubble.runtime.step.input_gradients import InputGradients
from zerobubble.runtime.values.payload import flatten_pytree, tensors_in, unflatten_pytree

NamedArguments = dict[int, list[dict[str, Any]]]
"""By stage, a dict of named arguments for each microbatch."""


def split_kwargs(
    kwargs: Any,
    modules: Mapping[int, nn.Module],
    num_microbatches: int,
    batch_size: int,
    gradients: InputGradients,
    batch_dims: BatchDims,
) -> NamedArguments:
    """Returns, for each stage of a rank that takes any of `kwargs`, its arguments for every microbatch.

    In a dict, tensors whose size in dimension 0, or in the one of `batch_dims`, is `batch_size` are split like the batch, and other values
    go to every microbatch. A list has a dict for each microbatch. Raises `InputError` for other types, lists of another length, names that
    no stage takes, and dimensions in `batch_dims` without the batch.
    """
    if kwargs is None:
        return {}
    of_microbatches = for_each_microbatch(kwargs, num_microbatches, batch_size, gradients, batch_dims)
    names = list(dict.fromkeys(name for named in of_microbatches for name in named))
    taken = names_taken(modules, names)
    _refuse_unknown(names, taken, modules)
    return {stage: [_only(named, names_of_stage) for named in of_microbatches] for stage, names_of_stage in taken.items() if names_of_stage}


def names_taken(modules: Mapping[int, nn.Module], names: Sequence[str]) -> dict[int, list[str]]:
    """Returns, by stage, those of `names` that it takes as arguments."""
    return {stage: [name for name in names if _takes(module, name)] for stage, module in modules.items()}


def positional_names(modules: Mapping[int, nn.Module], batch_dims: BatchDims) -> list[str]:
    """Returns the names of the positional arguments of the first stage, if it is in `modules` and `batch_dims` has names."""
    named = _parameters_of_class(modules[0]) if 0 in modules and batch_dims else []
    return [parameter.name for parameter in named if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def known_names(step_inputs: StepInputs, modules: Mapping[int, nn.Module]) -> set[str] | None:
    """Returns the names of arguments that this rank was given or that its stages take.

    Returns None if a stage takes every name, or if the targets are named, which may have other names in other calls.
    """
    parameters = [parameter for module in modules.values() for parameter in _parameters_of_class(module)]
    if isinstance(step_inputs.targets, Mapping) or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    mappings = [value for value in (step_inputs.inputs, step_inputs.kwargs) if isinstance(value, Mapping)]
    return {*(parameter.name for parameter in parameters), *(name for value in mappings for name in value)}


def _parameters_of_class(module: nn.Module) -> list[inspect.Parameter]:
    """Returns the parameters of the first forward among the module's classes that names any: a cut stage takes those of its model."""
    of_classes = (inspect.signature(vars(kind)["forward"]).parameters for kind in type(module).__mro__ if "forward" in vars(kind))
    every = [list(parameters.values())[1:] for parameters in of_classes]
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return next((of_class for of_class in every if any(parameter.kind not in unnamed for parameter in of_class)), every[0])


def names_of_arguments(modules: Mapping[int, nn.Module]) -> list[str] | None:
    """Returns the names of arguments that stages take; None if one of them takes every name."""
    parameters = {
        name: parameter for module in modules.values() for name, parameter in inspect.signature(module.forward).parameters.items()
    }
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return sorted(name for name in parameters if any(_takes(module, name) for module in modules.values()))


def for_each_microbatch(
    kwargs: Any, num_microbatches: int, batch_size: int, gradients: InputGradients, batch_dims: BatchDims
) -> list[dict[str, Any]]:
    """Returns the named arguments of each microbatch; see `split_kwargs`."""
    refuse_other_kwargs(kwargs)
    if isinstance(kwargs, Mapping):
        return _cut(dict(kwargs), num_microbatches, batch_size, gradients, batch_dims)
    if len(kwargs) != num_microbatches:
        message = "kwargs is a list of {got}, but needs a dict for each of the {expected} microbatches"
        raise InputError(message, got=len(kwargs), expected=num_microbatches)
    return [_detached(named, gradients) for named in kwargs]


def refuse_other_kwargs(kwargs: Any) -> None:
    """Raises `InputError` for named arguments that are neither a dict, nor a list of dicts, nor None."""
    is_list = isinstance(kwargs, list) and all(isinstance(named, Mapping) for named in kwargs)
    if kwargs is not None and not isinstance(kwargs, Mapping) and not is_list:
        raise wrong("kwargs", kwargs, "a dict, or a list with a dict for each microbatch")


def _cut(
    kwargs: dict[str, Any], num_microbatches: int, batch_size: int, gradients: InputGradients, batch_dims: BatchDims
) -> list[dict[str, Any]]:
    tensors, structure = flatten_pytree(kwargs, opaque=True)
    named = NamedBatch("kwargs", tensors, structure, ())
    dims = [_cut_dim(tensor, name, batch_size, batch_dims) for tensor, (name, _) in zip(tensors, named.places(), strict=True)]
    rows = sample_slices(batch_size, num_microbatches)
    parts = [iter(gradients.parts(tensor, "kwargs", rows, dim)) for tensor, dim in zip(tensors, dims, strict=True)]
    is_cut = batch_size != GIVEN_AS_LIST
    flags = [dim is not None for dim in dims]
    structures = cut_structures(named, rows, batch_dims, flags) if is_cut else [structure] * len(rows)
    return [unflatten_pytree(of_microbatch, map(next, parts)) for of_microbatch in structures]


def _cut_dim(tensor: Tensor, name: str, batch_size: int, batch_dims: BatchDims) -> int | None:
    """Returns the dimension along which a tensor is split; None if every microbatch gets all of it."""
    if batch_size == GIVEN_AS_LIST:
        return None
    if name not in batch_dims:
        return 0 if tensor.dim() and len(tensor) == batch_size else None
    dim = dim_named(tensor, name, batch_dims)
    if dim is not None and tensor.shape[dim] not in (1, batch_size):
        message = "batch_dims gives {name!r} the batch dimension {dim}, but its shape is {got} and the batch has {expected} samples"
        raise InputError(message, name=name, dim=dim, got=tuple(tensor.shape), expected=batch_size)
    return dim if dim is not None and tensor.shape[dim] == batch_size else None


def _detached(named: dict[str, Any], gradients: InputGradients) -> dict[str, Any]:
    """Returns the arguments of one microbatch, with tensors that require a gradient detached."""
    if not any(tensor.requires_grad for tensor in tensors_in(named)):
        return named
    tensors, structure = flatten_pytree(named, opaque=True)
    detached: dict[str, Any] = unflatten_pytree(structure, (gradients.part(tensor, "kwargs") for tensor in tensors))
    return detached


def _refuse_unknown(names: list[str], taken: Mapping[int, list[str]], modules: Mapping[int, nn.Module]) -> None:
    unknown = [name for name in names if not any(name in of_stage for of_stage in taken.values())]
    if unknown:
        taken_names = sorted({parameter for module in modules.values() for parameter in inspect.signature(module.forward).parameters})
        stages = ", ".join(map(str, modules))
        raise InputError(
            "no stage of this rank takes {got}",
            got=", ".join(map(repr, unknown)),
            remedy=f"{near(unknown[0], taken_names)}the forward of stage {stages} takes {', '.join(taken_names) or 'nothing'}",
        )


def _takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward takes an argument of this name."""
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    return name in parameters and parameters[name].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _only(named: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name in names}
