"""The backward pass in two: B computes input gradients and queues weight work, W does it later.

For the length of a step the `forward` of every plain `nn.Linear` in a stage is shadowed on the instance: same kernel, same
output, but its backward leaves `weight.grad` for later. Everything else in the stage is untouched and gets its gradients in B.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.memory import Held, Meter


class WeightWork:
    """The weight gradients that one B has left to do, in the order B met them."""

    __slots__ = ("_entries", "_held", "_meter")

    def __init__(self, meter: Meter | None = None) -> None:
        self._entries: list[tuple[Tensor, Tensor, Tensor]] = []
        self._held: list[Held] = []
        self._meter = meter

    def add(self, weight: Tensor, x: Tensor, dy: Tensor) -> None:
        """Queue `weight.grad += dy^T x`; `x` is (rows, in), `dy` is (rows, out)."""
        self._entries.append((weight, x, dy))
        if self._meter is not None:
            self._held += [self._meter.hold(x), self._meter.hold(dy)]

    @torch.no_grad()
    def run(self) -> None:
        """Add every queued gradient into its weight's `.grad`. A weight used twice is summed first, as autograd does."""
        totals: dict[Tensor, Tensor] = {}
        for weight, x, dy in self._entries:
            gradient = dy.t().mm(x)
            totals[weight] = totals[weight] + gradient if weight in totals else gradient
        for weight, gradient in totals.items():
            if weight.grad is None:
                weight.grad = gradient
            else:
                weight.grad.add_(gradient)
        self._entries.clear()
        self._held.clear()


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, work: WeightWork) -> Tensor:
        ctx.save_for_backward(x, weight)
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
        ctx.work.add(weight, x.reshape(-1, x.shape[-1]), dy)
        return dx, None, bias_gradient, None


class Splitter:
    """Shadows the Linears of one stage. While `work` is set, their forwards queue weight gradients into it."""

    def __init__(self, module: nn.Module) -> None:
        self.work: WeightWork | None = None
        self._linears = [part for part in module.modules() if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward]

    @contextmanager
    def shadowing(self) -> Iterator[None]:
        """Shadow every Linear whose weight gradient can wait: a plain trainable parameter that nobody watches."""
        shadowed = [linear for linear in self._linears if _can_wait(linear)]
        for linear in shadowed:
            linear.__dict__["forward"] = partial(_forward, self, linear)
        try:
            yield
        finally:
            self.work = None
            for linear in shadowed:
                linear.__dict__.pop("forward", None)


def _can_wait(linear: nn.Linear) -> bool:
    weight = linear.weight
    watched = bool(weight._backward_hooks) or bool(getattr(weight, "_post_accumulate_grad_hooks", None))
    return type(weight) is nn.Parameter and weight.requires_grad and not watched and "forward" not in linear.__dict__


def _forward(splitter: Splitter, linear: nn.Linear, x: Tensor) -> Tensor:
    if splitter.work is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return nn.functional.linear(x, linear.weight, linear.bias)
    y: Tensor = _DeferredLinear.apply(  # type: ignore[no-untyped-call]
        x, linear.weight, linear.bias, splitter.work
    )
    return y
