"""`deferral`: lets custom autograd Functions defer their weight gradients to W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerobubble.arguments import takes
from zerobubble.errors import InputError
from zerobubble.runtime.split.layers.eligibility import is_watched
from zerobubble.runtime.split.layers.weight_work import WeightWork, pass_in_progress


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
        weight = self._weight

        def checked(*detached: Tensor) -> Tensor:
            found = gradient(*detached)
            if found.shape != weight.shape:
                raise InputError(
                    "the deferred gradient of a weight of shape {expected} has the shape {got}; "
                    "a Function that takes a deferral must return the gradient of that weight only",
                    expected=str(tuple(weight.shape)),
                    got=str(tuple(found.shape)),
                )
            return found

        self._work.defer(weight, checked, *held)
        return None


@takes()
def deferral(weight: Tensor) -> Deferral:
    """Returns a `Deferral` for an autograd Function whose first tensor argument is `weight`. Call this in `forward` and the result in
    `backward`.

        def forward(ctx, weight, x):
            ctx.save_for_backward(weight, x)
            ctx.deferral = zerobubble.nn.deferral(weight)
            return x @ weight

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
