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


@takes()
def check_split(module: nn.Module, *inputs: Tensor, tolerance: float = 1e-5) -> tuple[str, ...]:
    """Runs one copy of `module` whole and one split on `inputs`; returns the names of the parameters with deferred gradients.

    Both start from the same random state and use the same output gradient. Raises `InputError` naming every parameter
    and input whose gradient differs by more than `tolerance` of its norm. Changes neither `module` nor torch's random state.
    """
    state = RandomState.now(next((tensor.device for tensor in (*module.parameters(), *inputs)), torch.device("cpu")))
    waited: tuple[str, ...] = ()
    found: list[dict[str, Tensor | None]] = []
    for split in (False, True):
        state.set()
        mine = copy.deepcopy(module)
        leaves = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
        stage = make_stage("deferred" if split else "whole", mine, 0)
        try:
            with torch.enable_grad(), stage.stepping():
                outputs = stage.forward(0, leaves)
                differentiable = [y for y in outputs if y.requires_grad]
                gradients = iter(
                    stage.backward(0, tuple(torch.linspace(-1, 1, y.numel(), device="cpu").view_as(y).to(y) for y in differentiable))
                )
                before = {name for name, p in mine.named_parameters() if p.grad is None}
                if split:
                    stage.weight(0)
        finally:
            state.set()
        waited = tuple(name for name, p in mine.named_parameters() if name in before and p.grad is not None)
        of_inputs: dict[str, Tensor | None] = {f"input {i}": next(gradients) for i, x in enumerate(leaves) if x.requires_grad}
        found.append({name: p.grad for name, p in mine.named_parameters()} | of_inputs)
    wrong = [name for name in found[0] if not _close(found[1][name], found[0][name], tolerance)]
    if wrong:
        message = "the split changes the gradient of {wrong}; {remedy}"
        raise InputError(message, wrong=", ".join(wrong), remedy="check what their layers pass to zerobubble.nn.deferral")
    return waited


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
            found = gradient(*detached)
            if found.shape != weight.shape:
                raise InputError(
                    "the deferred gradient of a weight of shape {expected} has the shape {got}; "
                    "a Function that takes a deferral must return the gradient of that weight only",
                    expected=str(tuple(weight.shape)),
                    got=str(tuple(found.shape)),
                )
            # W keeps a first gradient as the sum, which later microbatches change: it must not be the memory of dy or of another gradient.
            return found.clone() if gradients.get(weight) is None else found

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
