"""`deferral`, by which autograd Functions of the user's own leave their weight gradients to W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.split.layers.eligibility import is_watched
from zerobubble.runtime.split.layers.weight_work import WeightWork, pass_in_progress


class Deferral:
    """Decides, in an autograd Function, whether the gradient of `weight` can wait; made by `deferral` in its `forward`."""

    def __init__(self, weight: Tensor, work: WeightWork | None) -> None:
        self._weight = weight
        self._work = work

    def __call__(self, ctx: Any, gradient: Callable[..., Tensor], *held: Tensor) -> Tensor | None:
        """What `backward` returns for the weight: None when W will add `gradient(*held)`, else that gradient, computed now.

        What is held until W is apart from its graph. Raises `InputError`, in W, when some of it was changed in place since, or when the
        gradient is not of the weight's shape.
        """
        if self._work is None or not self._work.may_take(ctx):
            return gradient(*held)
        weight = self._weight

        def checked(*apart: Tensor) -> Tensor:
            found = gradient(*apart)
            if found.shape != weight.shape:
                raise InputError(
                    f"the gradient left for a weight of shape {tuple(weight.shape)} has the shape {tuple(found.shape)}; "
                    "a Function that takes a deferral must give the gradient of that weight alone"
                )
            return found

        self._work.defer(weight, checked, *held)
        return None


def deferral(weight: Tensor) -> Deferral:
    """For an autograd Function whose first tensor argument is `weight`: call it in `forward`, keep it, and ask it in `backward`.

        def forward(ctx, weight, x):
            ctx.save_for_backward(weight, x)
            ctx.deferral = zerobubble.nn.deferral(weight)
            return x @ weight

        def backward(ctx, dy):
            weight, x = ctx.saved_tensors
            return ctx.deferral(ctx, lambda x, dy: x.mT @ dy, x, dy), dy @ weight.mT

    Outside a step that splits, and wherever the gradient is not simply added to `weight.grad` (the weight is computed or hooked, or a model
    asks for gradients in its own forward), it is computed at once, so that the Function serves everywhere.
    """
    compiling = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    work = None if compiling else pass_in_progress()
    trains = work is not None and id(weight) in work.context.can_wait and weight.requires_grad
    return Deferral(weight, work if trains and not is_watched(weight) else None)
