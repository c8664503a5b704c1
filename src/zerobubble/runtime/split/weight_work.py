"""The weight work that B leaves for W, and how a layer finds the pass it runs in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.split.autocast import AutocastCopies
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients, Part

_PASS = "zerobubble.pass_in_progress"
"""The name of what torch keeps for the thread, and hands on to the threads on which its engine goes back."""

TORCH_KEEPS_REFERENCES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch counts a reference to an object that it keeps for a thread. It does in 2.13; 2.6 does not, and frees it too early."""


class _PassOfThread(threading.local):
    """The pass in progress where torch cannot keep it.

    Autograd's engine has threads of its own for GPUs. There a checkpoint that runs again finds no pass, and leaves nothing for W.
    """

    work: WeightWork | None = None


_here = _PassOfThread()
_keep: Callable[[WeightWork | None], None] = (
    partial(torch._C._stash_obj_in_tls, _PASS) if TORCH_KEEPS_REFERENCES else partial(setattr, _here, "work")
)
_kept: Callable[[], WeightWork] = partial(torch._C._get_obj_in_tls, _PASS)


@dataclass(frozen=True)
class StepContext:
    """What the passes of one stage share for the length of a step.

    `can_wait` are the parameters whose gradients may wait for W: those of the stage, but for some that others watch, sum or shard. They go
    by their `id`, because torch hashes a tensor in Python, and every layer asks.
    `meter` counts the bytes that wait, None where nobody asks. `gradients` is where W adds. `copies` are autocast's copies of parameters.
    """

    can_wait: frozenset[int]
    meter: Meter | None = None
    gradients: Gradients = IN_GRAD
    copies: AutocastCopies = field(default_factory=AutocastCopies)


class WeightWork:
    """The weight gradients of one microbatch that B leaves for W, in the order B met them; `held` are the tensors kept for them.

    Made for the F of the microbatch, whose layers remember it; filled in its B; run in its W. Inside `with work:` this thread runs a pass
    of the microbatch. In its B `goes_back` is set, and gradients may be left for W.
    """

    __slots__ = ("_accumulating_task", "_counted", "_entries", "_outer", "_versions", "context", "goes_back", "held")

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.held: list[Tensor] = []
        self._versions: list[int] = []
        self._entries: list[tuple[Tensor, Part | None, object, Callable[..., Tensor], list[Tensor]]] = []
        self._counted: list[Held] = []
        self._accumulating_task: int | None = None
        self._outer: WeightWork | None = None
        self.goes_back = False

    def __enter__(self) -> None:
        self._outer = pass_in_progress()
        _keep(self)

    def __exit__(self, *_: object) -> None:
        _keep(self._outer)
        self._outer = None

    def may_take(self, node: Any) -> bool:
        """Whether the weight gradient that `node`, a Function whose first tensor is the weight, is asked for may wait.

        It may when the B of this microbatch is in progress, and what autograd runs adds to `.grad`. A model that asks for gradients in
        its own forward, which a checkpoint may run again within B, gets them at once, and so does one that will go back through them.
        """
        if not self.goes_back or torch.is_grad_enabled():
            return False
        task = torch._C._current_graph_task_id()
        if task != self._accumulating_task:  # asking torch takes longer than comparing, and one run of its engine meets many layers
            if not _accumulates(node.next_functions[0][0]):
                return False
            self._accumulating_task = task
        return True

    def defer(self, weight: Tensor, gradient: Callable[..., Tensor], *held: Tensor, cast: object = None, part: Part | None = None) -> None:
        """Leave `gradient(*held)` of `weight`, or of a `part` of it, for W; nobody may change what is held until then.

        It is held apart from its graph: what autograd saved would keep all behind it, down to the stage's input and its gradient.
        Where the model used a copy of the weight in another type, `cast` tells one copy from another: the gradients of one are summed
        before they get the weight's type.
        """
        apart = [tensor.detach() if tensor.requires_grad else tensor for tensor in held]
        self._entries.append((weight, part, cast, gradient, apart))
        self.held += apart
        self._versions += [tensor._version for tensor in apart]
        meter = self.context.meter
        if meter is not None:
            self._counted += [meter.hold(tensor) for tensor in apart]

    def weights(self) -> set[Tensor]:
        """The weights whose gradients wait."""
        return {weight for weight, *_ in self._entries}

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
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # what `torch.no_grad` does, in a tenth of its time: every W comes by here
        try:
            for weight, part, gradient in self._totals():
                if part is None:
                    self.context.gradients.add(weight, gradient)
                else:
                    self.context.gradients.add_part(weight, part, gradient)
        finally:
            torch._C._set_grad_enabled(was_enabled)
        self._entries.clear()
        self._counted.clear()
        self._versions.clear()
        self.held.clear()

    def _totals(self) -> Iterable[tuple[Tensor, Part | None, Tensor]]:
        """Each weight, or part of one, with the sum of its gradients, those of one cast first."""
        sums: dict[tuple[int, Part | None, object], tuple[Tensor, Tensor]] = {}
        for weight, part, cast, compute, held in self._entries:
            found = compute(*held)
            before = sums.get((id(weight), part, cast))
            sums[id(weight), part, cast] = weight, found if before is None else before[1] + found
        totals: dict[tuple[int, Part | None], tuple[Tensor, Part | None, Tensor]] = {}
        for (number, part, _), (weight, found) in sums.items():
            gradient = found.to(weight.dtype)
            so_far = totals.get((number, part))
            totals[number, part] = weight, part, gradient if so_far is None else so_far[2] + gradient
        return totals.values()


def _accumulates(node: Any) -> bool:
    """Whether the engine is going to run `node`, which adds to a weight's `.grad`."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad is asked for the gradient of the weight itself
        return False


def pass_in_progress() -> WeightWork | None:
    """The weight work of the pass that this thread runs, None where the pass does not split.

    Torch calls a layer's forward without a handle of ours, and a checkpoint runs it again in B on a thread of autograd's engine. The
    pass is therefore kept where torch keeps what belongs to a thread and follows its work into the engine.
    """
    if not TORCH_KEEPS_REFERENCES:
        return _here.work
    try:
        return _kept()
    except RuntimeError:  # this thread has run no pass yet
        return None
