"""What a graph can be traced of: which tensors it takes and what it depends on of each, and which modules have what it would run past."""

from __future__ import annotations

import gc
from collections.abc import Collection, Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from zerobubble.errors import InputError
from zerobubble.runtime.split.layers.eligibility import accumulator_is_kept, is_scripted, is_watched
from zerobubble.runtime.values.payload import Structure, opaque_types_in

_PASSING_ON = ("transformers.utils.output_capturing", "transformers.modeling_utils", "zerobubble.models.stages.stage_model")
"""Where forward hooks come from that a graph repeats, since they keep nothing: they hand outputs to the forward that runs, which returns
them, or give the output of an embedding a gradient, as the switch for checkpoints of Transformers does."""


def kind_of(tensor: Tensor) -> Hashable:
    """What a graph depends on of one of its inputs."""
    if not is_traceable(tensor):
        return type(tensor), tensor.layout, tensor.requires_grad
    is_lazy = tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, is_lazy


def layout_of(tensor: Tensor) -> Hashable:
    """What a graph with symbols for sizes depends on of one of its inputs: all but the sizes."""
    if not is_traceable(tensor):
        return kind_of(tensor)
    return type(tensor), tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_conj(), tensor.is_neg()


def shared_memory(tensors: Sequence[Tensor]) -> Hashable:
    """Which of several inputs share memory: for each the first that does."""
    if len(tensors) < 2:
        return None
    storages = [tensor.untyped_storage().data_ptr() if is_traceable(tensor) else None for tensor in tensors]
    return tuple([storages.index(storage) for storage in storages])


def is_traceable(tensor: Tensor) -> bool:
    """Whether a graph has one input for this tensor: its numbers lie in one strided memory, and operations on it are torch's own."""
    is_of_torch = type(tensor) in (Tensor, nn.Parameter) or type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return is_of_torch and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def refuse_untraceable(structure: Structure, inputs: Iterable[Tensor], owned: Iterable[Tensor]) -> None:
    """Raise `InputError` for inputs, in arguments of this `structure`, and for parameters and buffers `owned` that no graph takes."""
    for what, tensors in (("one of its inputs", inputs), ("a parameter or buffer of it", owned)):
        for tensor in tensors:
            if not is_traceable(tensor):
                raise InputError(f"{what} is a {_described(tensor)}, and a graph takes plain tensors")
    for kind in opaque_types_in(structure):
        raise InputError(f"it is given a {kind.__name__}, and a graph takes tensors and constants")


def refuse_recurrent_dropout(module: nn.Module) -> None:
    """Raise `InputError` for recurrent layers with dropout between them, for which a graph draws other numbers than eager mode."""
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase) and part.training and part.dropout and part.num_layers > 1:
            called = name or type(part).__name__
            raise InputError(
                f"module {called}: its layers drop out between them what torch draws in another way in a graph than in eager mode"
            )


def _described(tensor: Tensor) -> str:
    kind = type(tensor).__name__
    return f"nested {kind}" if tensor.is_nested else f"{kind} of type {tensor.dtype} and layout {tensor.layout}"


def hooked_parameters(module: nn.Module) -> list[str]:
    """The names of parameters with hooks on their gradients.

    To be asked before a step: a forward holds the nodes that add to gradients, and such a node that is held counts as hooked. Garbage holds
    them too, such as a frame of an earlier step in the traceback of an exception that inductor caught, so it is collected first.
    """
    if any(parameter.requires_grad and accumulator_is_kept(parameter) for parameter in module.parameters()):
        gc.collect()
    found = []
    for name, parameter in module.named_parameters():
        if is_watched(parameter) or (parameter.requires_grad and accumulator_is_kept(parameter)):
            found.append(name)
    return found


def refuse_hooks(module: nn.Module, hooked: Collection[str]) -> None:
    """Raise `InputError` for what a graph would run past: `hooked` parameters, hooks of modules, compiled modules and TorchScript."""
    for name, part in module.named_modules():
        if is_scripted(part):
            raise InputError(f"module {name or type(part).__name__} is TorchScript, and a graph is traced from Python code")
    if any(getattr(torch_module, f"_global_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")):
        raise InputError("there is a hook on all modules, which would run while tracing alone")
    for name in hooked:
        raise InputError(f"parameter {name} has a hook, or something made of it before the step is kept; a graph cannot honour hooks")
    for name, part in module.named_modules():
        called = f"module {name or type(part).__name__}"
        if isinstance(part, torch._dynamo.OptimizedModule) or part._compiled_call_impl is not None:
            raise InputError(f"{called} is compiled already, and a graph is traced from plain modules")
        forward = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
        watching = [hook for hook in forward if hook.__module__ not in _PASSING_ON]
        if watching or part._backward_hooks or part._backward_pre_hooks:
            raise InputError(f"{called} has a hook, which would run while tracing alone")
