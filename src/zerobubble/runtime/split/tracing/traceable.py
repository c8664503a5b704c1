"""Decides what can be traced: which tensors a graph takes, what it depends on, and which module features a graph would bypass."""

from __future__ import annotations

import gc
from collections.abc import Collection, Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from zerobubble.errors import InputError
from zerobubble.runtime.split.layers.eligibility import accumulator_is_kept, is_scripted, is_watched
from zerobubble.runtime.values.payload import Structure, opaque_types_in

_STATELESS_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils", "zerobubble.models.stages.stage_model")
"""Origins of stateless forward hooks, which a graph can repeat: they pass outputs to the running forward, which returns them, or make the
output of an embedding require grad, as in Transformers' gradient checkpointing.
"""


def kind_of(tensor: Tensor) -> Hashable:
    """Returns the properties of an input that a graph depends on."""
    if not is_traceable(tensor):
        return type(tensor), tensor.layout, tensor.requires_grad
    is_lazy = tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, is_lazy


def layout_of(tensor: Tensor) -> Hashable:
    """Returns the properties of an input that a symbolic graph depends on: all except the sizes."""
    if not is_traceable(tensor):
        return kind_of(tensor)
    return type(tensor), tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_conj(), tensor.is_neg()


def shared_memory(tensors: Sequence[Tensor]) -> Hashable:
    """Returns which inputs share memory: for each, the index of the first with the same storage."""
    if len(tensors) < 2:
        return None
    storages = [tensor.untyped_storage().data_ptr() if is_traceable(tensor) else None for tensor in tensors]
    return tuple([storages.index(storage) for storage in storages])


def is_traceable(tensor: Tensor) -> bool:
    """Returns whether a graph has one input for this tensor: it has one strided storage and no custom dispatch."""
    is_of_torch = type(tensor) in (Tensor, nn.Parameter) or type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return is_of_torch and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def refuse_untraceable(structure: Structure, inputs: Iterable[Tensor], owned: Iterable[Tensor]) -> None:
    """Raises `InputError` for inputs, arranged as in `structure`, and for tensors `owned` by the module that a graph cannot take."""
    for what, tensors in (("one of its inputs", inputs), ("a parameter or buffer of it", owned)):
        for tensor in tensors:
            if not is_traceable(tensor):
                raise InputError("{what} is a {got}, and a graph takes plain tensors", what=what, got=_described(tensor))
    for kind in opaque_types_in(structure):
        raise InputError("it is given a {kind}, and a graph takes tensors and constants", kind=str(kind.__name__))


def refuse_recurrent_dropout(module: nn.Module) -> None:
    """Raises `InputError` for recurrent layers with dropout in between, where a graph draws other random numbers than eager mode."""
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase) and part.training and part.dropout and part.num_layers > 1:
            called = name or type(part).__name__
            raise InputError(
                "module {called}: for dropout between its layers, a graph draws other random numbers than eager mode", called=called
            )


def _described(tensor: Tensor) -> str:
    kind = type(tensor).__name__
    return f"nested {kind}" if tensor.is_nested else f"{kind} of type {tensor.dtype} and layout {tensor.layout}"


def hooked_parameters(module: nn.Module) -> list[str]:
    """Returns the names of parameters with hooks on their gradients.

    Call it before a step: a forward references the `AccumulateGrad` nodes, and a referenced node counts as hooked. Garbage may reference
    them too, such as a frame of an earlier step in the traceback of an exception that inductor caught, so it is collected first.
    """
    if any(parameter.requires_grad and accumulator_is_kept(parameter) for parameter in module.parameters()):
        gc.collect()
    names = []
    for name, parameter in module.named_parameters():
        if is_watched(parameter) or (parameter.requires_grad and accumulator_is_kept(parameter)):
            names.append(name)
    return names


def refuse_hooks(module: nn.Module, hooked: Collection[str]) -> None:
    """Raises `InputError` for features that a graph would bypass: `hooked` parameters, module hooks, compiled modules and TorchScript."""
    for name, part in module.named_modules():
        if is_scripted(part):
            raise InputError("module {module} is TorchScript, and a graph is traced from Python code", module=name or type(part).__name__)
    if any(getattr(torch_module, f"_global_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")):
        raise InputError("there is a global module hook, which would run only during tracing")
    for name in hooked:
        raise InputError("parameter {name} has a hook, or a tensor computed from it is still alive; a graph cannot run hooks", name=name)
    for name, part in module.named_modules():
        called = f"module {name or type(part).__name__}"
        if isinstance(part, torch._dynamo.OptimizedModule) or part._compiled_call_impl is not None:
            raise InputError("{called} is compiled already, and a graph is traced from plain modules", called=called)
        if _has_hooks(part):
            raise InputError("{called} has a hook, which would run only during tracing", called=called)


def _has_hooks(part: nn.Module) -> bool:
    """Returns whether a module has hooks that a graph cannot repeat."""
    forward = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    has_backward = bool(part._backward_hooks or part._backward_pre_hooks)
    return has_backward or any(hook.__module__ not in _STATELESS_HOOKS for hook in forward)
