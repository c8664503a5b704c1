"""The weight work that B leaves for W, and which pass of which thread collects it."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.split.autocast import leave_region
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients


class WeightWork:
    """The weight gradients that one B has left to do, in the order B met them; `held` are the tensors kept for them.

    `can_wait` are the parameters whose gradients may be left: those of the stage, but for some that others sum or shard.
    """

    __slots__ = ("_counted", "_entries", "_gradients", "_meter", "_versions", "can_wait", "held")

    def __init__(self, can_wait: frozenset[Tensor], meter: Meter | None = None, gradients: Gradients = IN_GRAD) -> None:
        self.can_wait = can_wait
        self.held: list[Tensor] = []
        self._versions: list[int] = []
        self._entries: list[tuple[Tensor, object, Callable[..., Tensor], list[Tensor]]] = []
        self._counted: list[Held] = []
        self._meter = meter
        self._gradients = gradients

    def defer(self, weight: Tensor, gradient: Callable[..., Tensor], *held: Tensor, cast: object = None) -> None:
        """Leave `gradient(*held)` of `weight` for W; nobody may change what is held until then.

        It is held apart from its graph: what autograd saved would keep all behind it, down to the stage's input and its gradient.
        Where the model used a copy of the weight in another type, `cast` tells one copy from another: the gradients of one are summed
        before they get the weight's type.
        """
        apart = [tensor.detach() if tensor.requires_grad else tensor for tensor in held]
        self._entries.append((weight, cast, gradient, apart))
        self.held += apart
        self._versions += [tensor._version for tensor in apart]
        if self._meter is not None:
            self._counted += [self._meter.hold(tensor) for tensor in apart]

    def weights(self) -> set[Tensor]:
        """The weights whose gradients wait."""
        return {weight for weight, _, _, _ in self._entries}

    def run(self) -> None:
        """Add every queued gradient to those of its weight. A weight used twice is summed first, as autograd does.

        Raises `InputError` when a tensor that W reads was changed in place after B.
        """
        for tensor, version in zip(self.held, self._versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"a tensor of shape {tuple(tensor.shape)} that a weight gradient needs was changed in place between B and W; "
                    "give the layer a copy (x.clone()), or choose a schedule that does not split this stage"
                )
        with torch.no_grad():
            for weight, gradient in self._totals().items():
                self._gradients.add(weight, gradient)
        self._entries.clear()
        self._counted.clear()
        self._versions.clear()
        self.held.clear()

    def _totals(self) -> dict[Tensor, Tensor]:
        """The sum of each weight's gradients, those of one cast first."""
        parts: dict[tuple[Tensor, object], Tensor] = {}
        for weight, cast, compute, held in self._entries:
            found = compute(*held)
            parts[weight, cast] = parts[weight, cast] + found if (weight, cast) in parts else found
        totals: dict[Tensor, Tensor] = {}
        for (weight, _), part in parts.items():
            gradient = part.to(weight.dtype)
            totals[weight] = totals[weight] + gradient if weight in totals else gradient
        return totals


_collecting: dict[int, WeightWork | None] = {}
_in_backward: WeightWork | None = None
_adding_task: int | None = None
"""The last run of autograd's engine that was found to add to `.grad`."""


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
    leave_region()


def pending_work() -> WeightWork | None:
    """Where the pass in progress collects weight gradients, None when it does not split."""
    return _collecting.get(get_ident(), _in_backward)


def may_defer(work: WeightWork, node: Any) -> bool:
    """Whether the weight gradient that `node`, a Function whose first tensor is the weight, is asked for may go into `work`.

    It may when the backward pass in progress is that of `work`, and what autograd runs adds to `.grad`. A model that asks for gradients
    in its own forward, which a checkpoint may run again within B, gets them at once, and so does one that will go back through them.
    """
    global _adding_task
    if work is not _in_backward or torch.is_grad_enabled():
        return False
    task = torch._C._current_graph_task_id()
    if task != _adding_task:
        if not _adds(node.next_functions[0][0]):
            return False
        _adding_task = task
    return True


def _adds(accumulator: Any) -> bool:
    """Whether the engine is going to run `accumulator`, the node that adds to a weight's `.grad`."""
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # autograd.grad is asked for the gradient of the weight itself
        return False
