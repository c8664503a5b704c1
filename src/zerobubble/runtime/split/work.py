"""The weight work that B leaves for W, and which pass of which thread collects it."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory import Held, Meter


class WeightWork:
    """The weight gradients that one B has left to do, in the order B met them; `held` are the tensors kept for them."""

    __slots__ = ("_counted", "_entries", "_meter", "_versions", "held")

    def __init__(self, meter: Meter | None = None) -> None:
        self.held: list[Tensor] = []
        self._versions: list[int] = []
        self._entries: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self._counted: list[Held] = []
        self._meter = meter

    def defer(self, weight: Tensor, gradient: Callable[[], Tensor], *held: Tensor) -> None:
        """Leave `weight.grad += gradient()` for W; `held` are the tensors it reads, which nobody may change until then."""
        self._entries.append((weight, gradient))
        self.held += held
        self._versions += [tensor._version for tensor in held]
        if self._meter is not None:
            self._counted += [self._meter.hold(tensor) for tensor in held]

    def run(self) -> None:
        """Add every queued gradient into its weight's `.grad`. A weight used twice is summed first, as autograd does.

        Raises `InputError` when a tensor that W reads was changed in place after B.
        """
        for tensor, version in zip(self.held, self._versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"a tensor of shape {tuple(tensor.shape)} that a weight gradient needs was changed in place between B and W; "
                    "give the Linear a copy (x.clone()), or choose a schedule that does not split this stage"
                )
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
        self._counted.clear()
        self._versions.clear()
        self.held.clear()


_collecting: dict[int, WeightWork | None] = {}
_in_backward: WeightWork | None = None


def collect_into(work: WeightWork | None, *, backward: bool = False) -> None:
    """From here on, deferred weight gradients of this thread go into `work`; with None they are computed at once.

    In a `backward`, autograd may run checkpointed forwards again on threads of its own, which then collect there too.
    """
    global _in_backward
    _collecting[get_ident()] = work
    if backward:
        _in_backward = work


def stop_collecting() -> None:
    """The step is over: no thread collects any more."""
    global _in_backward
    _collecting.clear()
    _in_backward = None


def pending_work() -> WeightWork | None:
    """Where the pass in progress collects weight gradients, None when it does not split.

    An autograd Function of the user's own reads this in its forward, and in its backward defers to it what can wait.
    """
    return _collecting.get(get_ident(), _in_backward)


def is_in_backward(work: WeightWork) -> bool:
    """Whether `work` belongs to the backward pass in progress."""
    return work is _in_backward
