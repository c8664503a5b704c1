"""The backward pass in two: B computes input gradients and queues weight work, W does it later.

For the length of a step the `forward` of every plain `nn.Linear` in a stage is shadowed on the instance: same kernel, same
output, but its backward leaves `weight.grad` for later. Everything else in the stage is untouched and gets its gradients in B, and so
do Linears that are compiled, watched by hooks, under autocast, or whose weight is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zerobubble.runtime.split.work import WeightWork, is_in_backward, pending_work


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, work: WeightWork) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight  # checkpointing gives back an alias of what was saved, and the gradient belongs to the parameter
        ctx.work = work
        y = nn.functional.linear(x, weight, bias)
        # A view made inside a Function may not be changed in place by the code after it (a ReLU, say); an alias may.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        work: WeightWork = ctx.work
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dy.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        bias_gradient = dy.sum(0) if ctx.needs_input_grad[2] else None
        x = x.reshape(-1, x.shape[-1])
        if not is_in_backward(work):  # the model asks for a gradient within its own forward, perhaps to go back through it
            return dx, dy.t().mm(x), bias_gradient, None
        work.defer(ctx.parameter, lambda: dy.t().mm(x), x, dy)
        return dx, None, bias_gradient, None


@contextmanager
def shadowing(module: nn.Module) -> Iterator[None]:
    """Shadow every plain Linear of `module`; each call then decides whether its weight gradient can wait."""
    shadowed = [part for part in module.modules() if isinstance(part, nn.Linear) and _is_plain(part)]
    for linear in shadowed:
        linear.__dict__["forward"] = MethodType(_forward, linear)
    try:
        yield
    finally:
        for linear in shadowed:
            linear.__dict__.pop("forward", None)


def _is_plain(linear: nn.Linear) -> bool:
    weight = linear._parameters.get("weight")  # `linear.weight` may be computed, and computing it may change buffers
    own = type(linear).forward is nn.Linear.forward and "forward" not in linear.__dict__
    return own and type(weight) is nn.Parameter and weight.is_floating_point() and weight.requires_grad and not _accumulator_is_kept(weight)


def _accumulator_is_kept(weight: Tensor) -> bool:
    """Whether somebody keeps the node that adds to `weight.grad`, as they must who hook it; else it lives only while it is used."""
    of_its_node = get_gradient_edge(weight).node.metadata
    return get_gradient_edge(weight).node.metadata is of_its_node


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    weight = linear.weight
    work = None if torch.compiler.is_compiling() else pending_work()
    if work is None or not _can_wait(weight, x):
        return nn.functional.linear(x, weight, linear.bias)
    y: Tensor = _DeferredLinear.apply(x, weight, linear.bias, work)  # type: ignore[no-untyped-call]
    return y


def _can_wait(weight: Tensor, x: Tensor) -> bool:
    """Whether the gradient would go to `weight.grad` and nowhere else, unwatched, from tensors that our Function understands."""
    watched = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    trains = type(weight) is nn.Parameter and weight.requires_grad and torch.is_grad_enabled()
    transformed = torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active()
    return trains and type(x) is Tensor and not watched and not transformed
