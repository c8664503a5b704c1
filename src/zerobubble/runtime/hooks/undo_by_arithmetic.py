"""Undoes an optimizer's step by inverting its formulas: without extra memory, exact up to rounding. Supports SGD, Adam and AdamW.

Needs the gradients of the step. Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (AdamW; the others are analogous).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

Undo = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any], bool], None]


class ByFormula:
    """Undoes a step of `optimizer`, for which `why_not` must be empty. Call `save` before the step and `undo` after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._undo = _UNDO[type(optimizer)]
        self._optimizer = optimizer
        self._was_new: dict[Tensor, bool] = {}

    def save(self) -> None:
        """Records which parameters have no state yet."""
        state = self._optimizer.state
        self._was_new = {p: not any(isinstance(value, Tensor) for value in state.get(p, {}).values()) for _, p in self._stepped()}

    @torch.no_grad()
    def undo(self) -> None:
        """Restores parameters and state from before the step, up to rounding. Gradients and options must be unchanged since the step."""
        for group, parameter in self._stepped():
            state = self._optimizer.state[parameter]
            assert parameter.grad is not None
            self._undo(parameter, -parameter.grad if group["maximize"] else parameter.grad, state, group, self._was_new[parameter])
            if self._was_new[parameter]:
                del self._optimizer.state[parameter]

    def _stepped(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yields the parameters that a step changes, each with its group."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter


def why_not(optimizer: Optimizer) -> str:
    """Returns why a step of `optimizer` cannot be undone by formula; empty if it can."""
    kind = type(optimizer).__name__
    if type(optimizer) not in _UNDO:
        return f"a step of {kind} cannot be undone by arithmetic, which knows {', '.join(supported.__name__ for supported in _UNDO)}"
    for number, group in enumerate(optimizer.param_groups):
        if any(parameter.is_complex() for parameter in group["params"]):
            return f"a step on complex parameters (group {number}) cannot be undone by arithmetic"
        for name, value in _lossy(group):
            return f"a step of {kind} with {name}={value} (group {number}) cannot be undone by arithmetic"
    return ""


def _lossy(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields options with which a step loses information that undoing it needs."""
    if group.get("amsgrad"):
        yield "amsgrad", True
    if 0 in group.get("betas", ()):
        yield "betas", group["betas"]


def _undo_sgd(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], was_new: bool) -> None:
    rate, decay, momentum = float(group["lr"]), group["weight_decay"], group["momentum"]
    if not momentum:
        parameter.add_(gradient, alpha=rate).div_(1 - rate * decay)
        return
    buffer = state["momentum_buffer"]
    parameter.add_(buffer, alpha=rate * momentum if group["nesterov"] else rate)
    if group["nesterov"]:
        parameter.add_(gradient, alpha=rate).div_(1 - rate * decay)
    if not was_new:
        buffer.sub_(gradient + decay * parameter, alpha=1 - group["dampening"]).div_(momentum)


def _undo_adam(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], was_new: bool) -> None:
    rate, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
    step, mean, square = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
    is_decoupled = group.get("decoupled_weight_decay", False)
    scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    parameter.addcdiv_(mean, scale, value=rate / (1 - beta1**step))
    if is_decoupled:
        parameter.div_(1 - rate * decay)
    elif decay:
        gradient = gradient + decay * parameter
    if not was_new:
        mean.sub_(gradient, alpha=1 - beta1).div_(beta1)
        square.addcmul_(gradient, gradient, value=beta2 - 1).div_(beta2).clamp_(min=0)
        state["step"] -= 1


def _undo_adamw(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], was_new: bool) -> None:
    _undo_adam(parameter, gradient, state, group | {"decoupled_weight_decay": True}, was_new)


_UNDO: dict[type[Optimizer], Undo] = {SGD: _undo_sgd, Adam: _undo_adam, AdamW: _undo_adamw}
