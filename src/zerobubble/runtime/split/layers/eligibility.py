"""Which weight gradients can wait for W: those that autograd would add to `.grad` and give to nobody else.

A parameter is no candidate where a hook is to see its gradient, and a call is none where its tensors are of kinds that our autograd
Functions do not handle.
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

CAN_SEE_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
"""Whether torch tells who saves tensors, and with it who runs in a checkpoint: from 2.8 on."""

WATCHED = "a hook watches its gradient"
SUMMED_APART = "FSDP2 manages it (fully_shard), and reduces what is in .grad; with main_grad, sums of W are elsewhere"


def work_for(weight: Tensor, x: Tensor, *, divided: bool = False) -> WeightWork | None:
    """Where a layer that multiplies `x` by `weight` may leave its weight gradient, None when it is to be computed at once.

    With `divided`, the layer also takes both divided over ranks.
    """
    if torch.compiler.is_compiling():
        return None
    work = pass_in_progress()
    if work is None or id(weight) not in work.context.can_wait or not weight.requires_grad or is_watched(weight):
        return None
    if type(weight) is not nn.Parameter:
        if not (divided and is_divided(weight) and is_divided(x)):
            return None
    elif type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:  # our Functions reshape
        return None
    return work if torch.is_grad_enabled() and not _is_transformed() else None


def _is_transformed() -> bool:
    """Whether `vmap`, `grad` and their like are at work, or forward-mode differentiation: our Functions know backward alone."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def reasons_not_to_wait(module: nn.Module, parameters: Iterable[nn.Parameter], *, in_grad: bool = True) -> dict[Tensor, str]:
    """Why the gradients of some `parameters` of `module` cannot wait for W, whatever layer uses them; asked when a step begins.

    What FSDP2 manages can wait while it is gathered, if W adds to `.grad` (`in_grad`): FSDP2 reduces what is there.

    Whether an `AccumulateGrad` node has hooks cannot be told within a Function, hence here. It takes time to find out, and `can_train`
    does so for the layers of torch: a module without parameters outside of these is not asked.
    """
    parts = list(module.modules())
    managers = [] if in_grad else fsdp2_parts(module)
    reasons: dict[Tensor, str] = {parameter: SUMMED_APART for part in managers for parameter in part.parameters()}
    owns = any(part._parameters and not is_torchs(part) for part in parts)
    for parameter in parameters:
        if not (type(parameter) is nn.Parameter or is_divided(parameter)) or parameter.layout is not torch.strided:
            reasons.setdefault(parameter, f"it is a {_kind_of(parameter)}, and only dense parameters are known to wait")
        elif owns and parameter.requires_grad and accumulator_is_kept(parameter):
            reasons.setdefault(parameter, WATCHED)
    return reasons


def _kind_of(parameter: Tensor) -> str:
    kind = type(parameter).__name__
    return kind if parameter.layout is torch.strided else f"{kind} of layout {str(parameter.layout).removeprefix('torch.')}"


def fsdp2_parts(module: nn.Module) -> list[Any]:
    """The modules in `module`, itself included, to which `torch.distributed.fsdp.fully_shard` was applied, outer ones first."""
    return [part for part in module.modules() if _is_fsdp2(type(part))]  # type: ignore[arg-type]  # classes are hashable


@lru_cache
def _is_fsdp2(kind: type) -> bool:
    """Whether `torch.distributed.fsdp.fully_shard` was applied to modules of this class, which it makes for them.

    A layer that FSDP2 manages computes with a copy of its parameter that is whole, to whose `.grad` passes add.
    """
    bases = (base for base in kind.__mro__ if base.__name__ == "FSDPModule")
    return any(base.__module__.startswith("torch.distributed.") for base in bases)  # in which file depends on the version


def is_torchs(part: nn.Module) -> bool:
    """Whether the forward of `part` is one of torch's own, or runs in TorchScript."""
    return is_scripted(part) or (type(part).forward.__module__ or "").startswith("torch.")


def is_scripted(part: nn.Module) -> bool:
    """Whether TorchScript runs `part`: its class has no forward, and Python sees nothing of what happens in it."""
    return isinstance(part, torch.jit.ScriptModule)


def is_watched(weight: Tensor) -> bool:
    """Whether a hook on `weight` is to see its gradient."""
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def accumulator_is_kept(weight: Tensor) -> bool:
    """Whether somebody keeps the node that adds to `weight.grad`, as they must who hook it; else it lives only while it is used."""
    of_its_node = get_gradient_edge(weight).node.metadata
    return get_gradient_edge(weight).node.metadata is of_its_node


def is_divided(tensor: Tensor) -> bool:
    """Whether torch divides `tensor` over ranks, which then is a DTensor."""
    return hasattr(type(tensor), "full_tensor")


def can_train(weight: object) -> bool:
    """Whether `weight` is a dense, real parameter, plain or divided, with a gradient of its own, which nobody is set to watch."""
    if (
        not isinstance(weight, nn.Parameter)
        or not (type(weight) is nn.Parameter or is_divided(weight))
        or weight.layout is not torch.strided
    ):
        return False
    return weight.is_floating_point() and weight.requires_grad and not accumulator_is_kept(weight)


def unaliased(y: Tensor) -> Tensor:
    """`y` for the code after a Function, which may change an alias in place (a ReLU, say) but not a view made inside."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
