"""The door for layers of the user's own: their weight gradients wait for W, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.split.deferred import shadowing
from zerobubble.runtime.split.gate import is_watched
from zerobubble.runtime.split.work import WeightWork, pass_in_progress


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
    trains = work is not None and weight in work.context.can_wait and weight.requires_grad
    return Deferral(weight, work if trains and not is_watched(weight) else None)


def check_split(module: nn.Module, *inputs: Tensor, tolerance: float = 1e-5) -> tuple[str, ...]:
    """Run a copy of `module` whole and another split on `inputs`; the names of the parameters whose gradients waited for W.

    Both start from the same random state and go back from the same gradient of the output. Raises `InputError` naming every parameter
    and input whose gradient differs by more than `tolerance` of its norm. Changes neither `module` nor torch's random state.
    """
    from zerobubble.runtime.stage.stage import Stage

    state = torch.get_rng_state()
    waited: tuple[str, ...] = ()
    found: list[dict[str, Tensor | None]] = []
    for split in (False, True):
        torch.set_rng_state(state)
        mine = copy.deepcopy(module)
        leaves = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
        stage = Stage(mine, 0, split=split)
        try:
            with torch.enable_grad(), shadowing(mine):
                outputs = stage.forward(0, leaves)
                differentiable = [y for y in outputs if y.requires_grad]
                gradients = iter(stage.backward(0, tuple(torch.linspace(-1, 1, y.numel()).view_as(y).to(y) for y in differentiable)))
                before = {name for name, p in mine.named_parameters() if p.grad is None}
                if split:
                    stage.weight(0)
        finally:
            torch.set_rng_state(state)
        waited = tuple(name for name, p in mine.named_parameters() if name in before and p.grad is not None)
        of_inputs: dict[str, Tensor | None] = {f"input {i}": next(gradients) for i, x in enumerate(leaves) if x.requires_grad}
        found.append({name: p.grad for name, p in mine.named_parameters()} | of_inputs)
    wrong = [name for name in found[0] if not _close(found[1][name], found[0][name], tolerance)]
    if wrong:
        raise InputError(f"the split changes the gradient of {', '.join(wrong)}; look at what their layers leave to zerobubble.nn.deferral")
    return waited


def _close(mine: Tensor | None, whole: Tensor | None, tolerance: float) -> bool:
    if mine is None or whole is None:
        return mine is whole
    return bool((mine - whole).norm() <= tolerance * whole.norm())
