"""Which weight gradients can wait: those that go to `.grad` and nowhere else, unwatched, from tensors our Functions understand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zerobubble.runtime.split.work import WeightWork, pending_work

CAN_SEE_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
"""Whether torch tells who saves tensors, and with it who runs in a checkpoint: from 2.8 on."""


def work_for(weight: Tensor, x: Tensor) -> WeightWork | None:
    """Where a layer that multiplies `x` by `weight` may leave its weight gradient, None when it is to be computed at once."""
    if torch.compiler.is_compiling():
        return None
    work = pending_work()
    if work is None or not torch.is_grad_enabled() or type(x) is not Tensor or torch._C._are_functorch_transforms_active():
        return None
    return work if type(weight) is nn.Parameter and weight.requires_grad and not is_watched(weight) else None


def is_watched(weight: Tensor) -> bool:
    """Whether a hook is to see the gradient of `weight`."""
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)) or weight in _kept


_kept: set[Tensor] = set()
"""The parameters of the stages in a step whose accumulators somebody keeps; within a Function that cannot be told any more."""


@contextmanager
def watching(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Find out whose accumulators are kept, for the length of a step."""
    kept = {parameter for parameter in parameters if parameter.requires_grad and accumulator_is_kept(parameter)}
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
    """Whether `weight` is a plain parameter with a gradient of its own, which nobody is set to watch."""
    plain = type(weight) is nn.Parameter and weight.is_floating_point() and weight.requires_grad
    return plain and not accumulator_is_kept(weight)  # type: ignore[arg-type]


def unaliased(y: Tensor) -> Tensor:
    """`y` for the code after a Function, which may change an alias in place (a ReLU, say) but not a view made inside."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
