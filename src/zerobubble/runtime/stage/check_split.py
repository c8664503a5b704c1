"""Checks a module whose custom autograd Functions defer weight gradients to W."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from zerobubble.arguments import takes
from zerobubble.errors import InputError
from zerobubble.runtime.stage.stage import make_stage
from zerobubble.runtime.values.random_state import RandomState


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
