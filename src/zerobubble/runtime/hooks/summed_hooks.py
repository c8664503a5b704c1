"""Calls the user's hooks on the gradient of a shared parameter once per step, with the sum over its copies.

Autograd would call them in each backward pass, with the share of one copy. A hook that is not additive, such as one that clamps, would then
give another gradient than on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.values.gradients import Gradients

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps the hooks of `register_hook`, and of `register_post_accumulate_grad_hook`. Autograd refers to the same dicts."""

_Kept = tuple[nn.Parameter, str, dict[int, Callable[..., Any]]]
"""A parameter, a kind of hooks, and its hooks of this kind by number."""


class SummedHooks:
    """The hooks on `parameters`, which autograd does not see between `set_aside` and `give_back`."""

    def __init__(self, parameters: Iterable[nn.Parameter], gradients: Gradients) -> None:
        self._parameters = list(dict.fromkeys(parameters))
        self._gradients = gradients
        self._kept: list[_Kept] = []
        self._called: list[_Kept] = []

    def set_aside(self) -> list[nn.Parameter]:
        """Takes the hooks from the parameters, and returns those that have any."""
        self.give_back()
        for parameter in self._parameters:
            for kind in _KINDS:
                if hooks := getattr(parameter, kind, None):
                    self._kept.append((parameter, kind, dict(hooks)))
                    hooks.clear()
        return [parameter for parameter, _, _ in self._kept]

    def give_back(self) -> None:
        """Puts the hooks back, before those that the step has added."""
        for parameter, kind, kept in self._kept:
            hooks = getattr(parameter, kind)
            added = dict(hooks)
            hooks.clear()
            hooks.update(kept | added)
        self._kept = []

    @torch.no_grad()
    def change_gradients(self) -> None:
        """Gives the hooks back, so that they can remove themselves, and calls those of `register_hook` with the gradients of the step."""
        self._called = self._kept
        self.give_back()
        for parameter, kind, hooks in self._called:
            gradient = self._gradients.get(parameter)
            if kind == _KINDS[0] and gradient is not None:
                self._gradients.put(parameter, _changed(gradient, hooks.values()))

    @torch.no_grad()
    def after_accumulation(self) -> None:
        """Calls the hooks of `register_post_accumulate_grad_hook` on parameters that have a gradient."""
        for parameter, kind, hooks in self._called:
            if kind == _KINDS[1] and self._gradients.get(parameter) is not None:
                for hook in hooks.values():
                    hook(parameter)
        self._called = []


def _changed(gradient: Tensor, hooks: Iterable[Callable[[Tensor], Tensor | None]]) -> Tensor:
    for hook in hooks:
        result = hook(gradient)
        gradient = gradient if result is None else result
    return gradient
