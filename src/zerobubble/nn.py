"""For authors of modules: skips over stages, auxiliary losses on any stage, slices of a sequence, experts over ranks, a custom W.

Needs torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.arguments import takes
from zerobubble.errors import InputError
from zerobubble.listing import listing
from zerobubble.runtime.split.layers.eligibility import is_watched
from zerobubble.runtime.split.layers.weight_work import WeightWork, pass_in_progress
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.stage.divided_head import DividedHead
from zerobubble.runtime.stage.slice_modules import CausalAttention, JoinSlices, SlicePositions
from zerobubble.runtime.stage.stage import make_stage
from zerobubble.runtime.values.added_losses import add_loss, collecting_losses
from zerobubble.runtime.values.experts import mark_experts
from zerobubble.runtime.values.random_state import RandomState
from zerobubble.runtime.values.skips import pop, stash

__all__ = [
    "CausalAttention",
    "DividedHead",
    "JoinSlices",
    "SlicePositions",
    "SplitReport",
    "add_loss",
    "check_split",
    "collecting_losses",
    "deferral",
    "mark_experts",
    "pop",
    "stash",
]

__dir__ = listing(__all__)


@takes()
def check_split(module: nn.Module, *inputs: Tensor, tolerance: float = 1e-5) -> tuple[str, ...]:
    """Runs one copy of `module` whole and one split on `inputs`; returns the names of the parameters with deferred gradients.

    Both start from the same random state and use the same output gradient. Raises `InputError` naming every parameter
    and input whose gradient differs by more than `tolerance` of its norm. Changes neither `module` nor torch's random state.
    """
    state = RandomState.now(next((tensor.device for tensor in (*module.parameters(), *inputs)), torch.device("cpu")))
    whole, _ = _gradients(module, inputs, state, "whole")
    split, waited = _gradients(module, inputs, state, "deferred")
    wrong = [name for name in whole if not _close(split[name], whole[name], tolerance)]
    if wrong:
        message = "the split changes the gradient of {wrong}; {remedy}"
        raise InputError(message, wrong=", ".join(wrong), remedy="check what their layers pass to zerobubble.nn.deferral")
    return waited


def _gradients(
    module: nn.Module, inputs: tuple[Tensor, ...], state: RandomState, way: str
) -> tuple[dict[str, Tensor | None], tuple[str, ...]]:
    """Runs a copy of `module` from a random `state`, split in this `way`; returns its gradients by name, and the deferred parameters."""
    state.set()
    copied = copy.deepcopy(module)
    leaves = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
    stage = make_stage(way, copied, 0)
    try:
        with torch.enable_grad(), stage.stepping():
            outputs = [y for y in stage.forward(0, leaves) if y.requires_grad]
            of_outputs = tuple(torch.linspace(-1, 1, y.numel(), device="cpu").view_as(y).to(y) for y in outputs)
            of_inputs = iter(stage.backward(0, of_outputs))
            before = {name for name, p in copied.named_parameters() if p.grad is None}
            if way == "deferred":
                stage.weight(0)
    finally:
        state.set()
    waited = tuple(name for name, p in copied.named_parameters() if name in before and p.grad is not None)
    gradients: dict[str, Tensor | None] = {name: p.grad for name, p in copied.named_parameters()}
    return gradients | {f"input {i}": next(of_inputs) for i, x in enumerate(leaves) if x.requires_grad}, waited


def _close(mine: Tensor | None, whole: Tensor | None, tolerance: float) -> bool:
    if mine is None or whole is None:
        return mine is whole
    return bool((mine - whole).norm() <= tolerance * whole.norm())


class Deferral:
    """Defers the gradient of `weight` in an autograd Function if possible; created by `deferral` in its `forward`."""

    def __init__(self, weight: Tensor, work: WeightWork | None) -> None:
        self._weight = weight
        self._work = work

    def __call__(self, ctx: Any, gradient: Callable[..., Tensor], *held: Tensor) -> Tensor | None:
        """Returns the result of `backward` for the weight: None if W will add `gradient(*held)`, else that gradient, computed now.

        The tensors `held` until W are detached. W raises `InputError` if one of them was changed in place, or if the gradient does not have
        the shape of the weight.
        """
        if self._work is None or not self._work.can_defer(ctx):
            return gradient(*held)
        weight, gradients = self._weight, self._work.context.gradients

        def checked(*detached: Tensor) -> Tensor:
            deferred = gradient(*detached)
            if deferred.shape != weight.shape:
                raise InputError(
                    "the deferred gradient of a weight of shape {expected} has the shape {got}; "
                    "a Function that takes a deferral must return the gradient of that weight only",
                    expected=str(tuple(weight.shape)),
                    got=str(tuple(deferred.shape)),
                )
            # W keeps a first gradient as the sum, which later microbatches change: it must not be the memory of dy or of another gradient.
            return deferred.clone() if gradients.get(weight) is None else deferred

        self._work.defer(weight, checked, *held)
        return None


@takes()
def deferral(weight: Tensor) -> Deferral:
    """Returns a `Deferral` for an autograd Function whose first tensor argument is `weight`.

    Call this in `forward` and the result in `backward`:

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, weight, x):
                ctx.save_for_backward(weight, x)
                ctx.deferral = zb.nn.deferral(weight)
                return x @ weight

            @staticmethod
            def backward(ctx, dy):
                weight, x = ctx.saved_tensors
                return ctx.deferral(ctx, lambda x, dy: x.mT @ dy, x, dy), dy @ weight.mT

    The gradient is computed immediately outside of a step that splits, and if it is not simply added to `weight.grad`: for a computed or
    hooked weight, or a model that calls autograd in its own forward. The Function therefore works everywhere.
    """
    compiling = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    work = None if compiling else pass_in_progress()
    trains = work is not None and id(weight) in work.context.deferrable and weight.requires_grad
    return Deferral(weight, work if trains and not is_watched(weight) else None)
