"""Decides which weight gradients can be deferred to W: the gradients that autograd would only add to `.grad`.

A parameter is not eligible if a hook observes its gradient, since autograd would call the hook in B. A call is not eligible if its tensors
are of types that our autograd Functions do not support.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from zerobubble.runtime.split.layers.weight_work import WeightWork, pass_in_progress

WATCHED = "a hook watches its gradient"
SUMMED_ELSEWHERE = "FSDP2 manages it (fully_shard) and reduces .grad; with main_grad, W adds elsewhere"


def work_for(weight: Tensor, x: Tensor, *, divided: bool = False) -> WeightWork | None:
    """Returns the work to which a layer that multiplies `x` by `weight` may defer its weight gradient, None to compute it immediately.

    With `divided`, the layer also supports both as DTensors.
    """
    if torch.compiler.is_compiling():
        return None
    work = pass_in_progress()
    if work is None or id(weight) not in work.context.deferrable or not weight.requires_grad or is_watched(weight):
        return None
    if type(weight) is not nn.Parameter:
        if not (divided and is_divided(weight) and is_divided(x)):
            return None
    elif type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:  # our Functions reshape
        return None
    return work if torch.is_grad_enabled() and not _is_transformed() else None


def _is_transformed() -> bool:
    """Returns whether functorch transforms or forward-mode differentiation are active: our Functions support only backward."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def reasons_not_to_wait(module: nn.Module, parameters: Iterable[nn.Parameter], *, in_grad: bool = True) -> dict[Tensor, str]:
    """Returns why the gradients of some `parameters` of `module` cannot be deferred in any layer. Call it when a step begins.

    FSDP2 parameters can be deferred while gathered if W adds to `.grad` (`in_grad`), because FSDP2 reduces `.grad`.

    Hooks on an `AccumulateGrad` node are not visible within a Function, so they are checked here. The check is slow, and `can_train` makes
    it for the layers of torch, so it is skipped if the module has parameters only in those.
    """
    parts = list(module.modules())
    managers = [] if in_grad else fsdp2_parts(module)
    reasons: dict[Tensor, str] = {parameter: SUMMED_ELSEWHERE for part in managers for parameter in part.parameters()}
    owns = any(part._parameters and not has_torch_forward(part) for part in parts)
    for parameter in parameters:
        if not (type(parameter) is nn.Parameter or is_divided(parameter)) or parameter.layout is not torch.strided:
            reasons.setdefault(parameter, f"it is a {_kind_of(parameter)}, and only gradients of dense parameters can be deferred")
        elif owns and parameter.requires_grad and accumulator_is_kept(parameter):
            reasons.setdefault(parameter, WATCHED)
    return reasons


def _kind_of(parameter: Tensor) -> str:
    kind = type(parameter).__name__
    return kind if parameter.layout is torch.strided else f"{kind} of layout {str(parameter.layout).removeprefix('torch.')}"


def fsdp2_parts(module: nn.Module) -> list[Any]:
    """Returns the modules in `module`, itself included, that `torch.distributed.fsdp.fully_shard` manages, outer ones first."""
    return [part for part in module.modules() if _is_fsdp2(type(part))]  # type: ignore[arg-type]  # classes are hashable


@lru_cache
def _is_fsdp2(kind: type) -> bool:
    """Returns whether `torch.distributed.fsdp.fully_shard` created this class for the modules it manages.

    A layer managed by FSDP2 computes with an unsharded copy of its parameter, and passes add to the `.grad` of that copy.
    """
    bases = (base for base in kind.__mro__ if base.__name__ == "FSDPModule")
    return any(base.__module__.startswith("torch.distributed.") for base in bases)  # the file depends on the version


def has_torch_forward(part: nn.Module) -> bool:
    """Returns whether the forward of `part` is torch's own or runs in TorchScript."""
    return is_scripted(part) or (type(part).forward.__module__ or "").startswith("torch.")


def is_scripted(part: nn.Module) -> bool:
    """Returns whether `part` runs in TorchScript: its class has no forward, and its operations are invisible to Python."""
    return isinstance(part, torch.jit.ScriptModule)


def is_watched(weight: Tensor) -> bool:
    """Returns whether `weight` has a hook on its gradient."""
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def accumulator_is_kept(weight: Tensor) -> bool:
    """Returns whether the `AccumulateGrad` node of `weight` is referenced elsewhere.

    The node exists only while something references it. A hook on it needs a reference, so a node that survives between two queries may be
    hooked.
    """
    of_its_node = get_gradient_edge(weight).node.metadata
    return get_gradient_edge(weight).node.metadata is of_its_node


def is_divided(tensor: Tensor) -> bool:
    """Returns whether `tensor` is a DTensor."""
    return hasattr(type(tensor), "full_tensor")


def can_train(weight: object) -> bool:
    """Returns whether `weight` is a dense floating-point parameter, plain or DTensor, that requires grad and has no hooked accumulator."""
    if (
        not isinstance(weight, nn.Parameter)
        or not (type(weight) is nn.Parameter or is_divided(weight))
        or weight.layout is not torch.strided
    ):
        return False
    return weight.is_floating_point() and weight.requires_grad and not accumulator_is_kept(weight)


def unaliased(y: Tensor) -> Tensor:
    """Returns `y` without its view relation: code after a Function may change its output in place only if it is not a view."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
