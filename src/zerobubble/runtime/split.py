"""The backward pass in two: B computes input gradients and queues weight work, W does it later.

For the length of a step the `forward` of every plain `nn.Linear` in a stage is shadowed on the instance: same kernel, same
output, but its backward leaves `weight.grad` for later. Everything else in the stage is untouched and gets its gradients in B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.memory import Held, Meter


class WeightWork:
    """The weight gradients that one B has left to do, in the order B met them."""

    __slots__ = ("_entries", "_held", "_meter")

    def __init__(self, meter: Meter | None = None) -> None:
        self._entries: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self._held: list[Held] = []
        self._meter = meter

    def defer(self, weight: Tensor, gradient: Callable[[], Tensor], *held: Tensor) -> None:
        """Leave `weight.grad += gradient()` for W. `held` are the tensors kept alive for it, for the memory count."""
        self._entries.append((weight, gradient))
        if self._meter is not None:
            self._held += [self._meter.hold(tensor) for tensor in held]

    def run(self) -> None:
        """Add every queued gradient into its weight's `.grad`. A weight used twice is summed first, as autograd does."""
        totals: dict[Tensor, Tensor] = {}
        with torch.no_grad():
            for weight, compute in self._entries:
                totals[weight] = totals[weight] + compute() if weight in totals else compute()
            for weight, gradient in totals.items():
                if weight.grad is None:
                    weight.grad = gradient
                else:
                    weight.grad.add_(gradient)
        self._entries.clear()
        self._held.clear()


_collecting: dict[int, WeightWork | None] = {}
_recomputing: WeightWork | None = None


def collect_into(work: WeightWork | None, *, backward: bool = False) -> None:
    """From here on, deferred weight gradients of this thread go into `work`; with None they are computed at once.

    In a `backward`, autograd may run checkpointed forwards again on threads of its own, which then collect there too.
    """
    global _recomputing
    _collecting[get_ident()] = work
    if backward:
        _recomputing = work


def stop_collecting() -> None:
    """The step is over: no thread collects any more."""
    global _recomputing
    _collecting.clear()
    _recomputing = None


def pending_work() -> WeightWork | None:
    """Where the pass in progress collects weight gradients, None when it does not split.

    An autograd Function of the user's own reads this in its forward, and in its backward defers to it what can wait.
    """
    return _collecting.get(get_ident(), _recomputing)


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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dy.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        bias_gradient = dy.sum(0) if ctx.needs_input_grad[2] else None
        x = x.reshape(-1, x.shape[-1])
        ctx.work.defer(ctx.parameter, lambda: dy.t().mm(x), x, dy)
        return dx, None, bias_gradient, None


@contextmanager
def shadowing(module: nn.Module) -> Iterator[None]:
    """Shadow every Linear of `module` whose weight gradient can wait: a plain trainable parameter that nobody watches."""
    shadowed = [part for part in module.modules() if isinstance(part, nn.Linear) and _can_wait(part)]
    for linear in shadowed:
        linear.__dict__["forward"] = partial(_forward, linear)
    try:
        yield
    finally:
        for linear in shadowed:
            linear.__dict__.pop("forward", None)


def _can_wait(linear: nn.Linear) -> bool:
    weight = linear.weight
    own = type(linear).forward is nn.Linear.forward and "forward" not in linear.__dict__
    watched = bool(weight._backward_hooks) or bool(getattr(weight, "_post_accumulate_grad_hooks", None))
    return own and type(weight) is nn.Parameter and weight.requires_grad and not watched


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    work = pending_work()
    if work is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return nn.functional.linear(x, linear.weight, linear.bias)
    y: Tensor = _DeferredLinear.apply(x, linear.weight, linear.bias, work)  # type: ignore[no-untyped-call]
    return y
