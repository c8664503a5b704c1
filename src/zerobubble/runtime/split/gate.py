"""Which weight gradients can wait: those that go to `.grad` and nowhere else, unwatched, from tensors our Functions understand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from zerobubble.runtime.split.work import WeightWork, pending_work

CAN_SEE_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
"""Whether torch tells who saves tensors, and with it who runs in a checkpoint: from 2.8 on."""


def work_for(weight: Tensor, x: Tensor) -> WeightWork | None:
    """Where a layer that multiplies `x` by `weight` may leave its weight gradient, None when it is to be computed at once."""
    if torch.compiler.is_compiling():
        return None
    work = pending_work()
    if work is None or weight not in work.can_wait or not weight.requires_grad or is_watched(weight):
        return None
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:  # our Functions reshape
        return None
    return work if torch.is_grad_enabled() and not _is_transformed() else None


def _is_transformed() -> bool:
    """Whether `vmap`, `grad` and their like are at work, or forward-mode differentiation: our Functions know backward alone."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def can_wait(module: nn.Module) -> frozenset[Tensor]:
    """The parameters of `module` whose gradients may wait for W: plain dense ones that no FSDP2 manages.

    A layer that FSDP2 manages computes with an unsharded copy of its parameter, and FSDP2 reduces the copy's gradient over the group and
    frees it as soon as B is over: what W added would come too late.
    """
    sharded = managed_by_fsdp(module)
    return frozenset(p for p in module.parameters() if type(p) is nn.Parameter and p.layout is torch.strided and p not in sharded)


def managed_by_fsdp(module: nn.Module) -> set[Tensor]:
    """The parameters below a part of `module` that `torch.distributed.fsdp.fully_shard` was applied to."""
    managers = (part for part in module.modules() if any(_is_fsdp2(kind) for kind in type(part).__mro__))
    return {parameter for manager in managers for parameter in manager.parameters()}


def _is_fsdp2(kind: type) -> bool:
    return kind.__name__ == "FSDPModule" and kind.__module__.startswith(
        "torch.distributed."
    )  # its module's name is not one in all versions


def is_watched(weight: Tensor) -> bool:
    """Whether a hook is to see the gradient of `weight`."""
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)) or weight in _kept


_kept: set[Tensor] = set()
"""The parameters of the stages in a step whose accumulators somebody keeps; within a Function that cannot be told any more."""


@contextmanager
def watching(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Find out whose accumulators are kept, for the length of a step."""
    dense = (parameter for parameter in parameters if parameter.requires_grad and parameter.layout is torch.strided)
    kept = {parameter for parameter in dense if accumulator_is_kept(parameter)}
    _kept.update(kept)
    try:
        yield
    finally:
        _kept.difference_update(kept)


def accumulator_is_kept(weight: Tensor) -> bool:
    """Whether somebody keeps the node that adds to `weight.grad`, as they must who hook it; else it lives only while it is used."""
    of_its_node = get_gradient_edge(weight).node.metadata
    return get_gradient_edge(weight).node.metadata is of_its_node


def can_train(weight: object) -> bool:
    """Whether `weight` is a plain, dense, real parameter with a gradient of its own, which nobody is set to watch."""
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        return False
    return weight.is_floating_point() and weight.requires_grad and not accumulator_is_kept(weight)


def unaliased(y: Tensor) -> Tensor:
    """`y` for the code after a Function, which may change an alias in place (a ReLU, say) but not a view made inside."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
