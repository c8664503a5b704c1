"""Calls the user's hooks on the gradients of parameters once per step, with the sum over microbatches, copies and replicas.

Autograd would call them in each backward pass, with the gradient of one microbatch and one copy. A hook that is not additive, such as one
that clamps, would then give another gradient than on one device with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.hooks.replicas import EarlierGradients, trained
from zerobubble.runtime.step.hook import StepHook, TrainingStep
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.parameter_hooks import AFTER_ACCUMULATION, ON_GRADIENT, TakenHooks, has_hooks, take_hooks


class SummedHooks(StepHook):
    """The hooks on the parameters of `modules`, which autograd does not see during a step.

    `earlier` takes them, and the gradients of earlier steps from hooked parameters: attach it before every hook that sums, and this one
    after them.
    """

    def __init__(self, modules: Mapping[int, nn.Module], gradients: Gradients) -> None:
        self.earlier = EarlierGradients(self._take, gradients)
        self._modules = modules
        self._gradients = gradients
        self._taken: list[TakenHooks] = []

    def _take(self) -> list[nn.Parameter]:
        """Takes the hooks from the parameters, and returns the parameters that have hooks."""
        self._put_back()
        self._taken = take_hooks(trained(self._modules))
        hooked = [taken.parameter for taken in self._taken]
        self.completes_at_end = frozenset(hooked)
        return hooked

    def _put_back(self) -> list[TakenHooks]:
        """Puts the hooks back, and returns them."""
        taken, self._taken = self._taken, []
        for hooks in taken:
            hooks.put_back()
        return taken

    @torch.no_grad()
    def on_step_end(self, step: TrainingStep) -> None:
        """Changes the step's gradients by `register_hook`, adds gradients of earlier steps, and calls the hooks after accumulation.

        Hooks are put back first, so that they can remove themselves. Raises `InputError` for hooks that were registered during the step.
        """
        self._refuse_added()
        called = self._put_back()
        for parameter, kind, hooks in called:
            gradient = self._gradients.get(parameter)
            if kind == ON_GRADIENT and gradient is not None:
                self._gradients.put(parameter, _changed(gradient, hooks.values()))
        self.earlier.give_back()
        for parameter, kind, hooks in called:
            if kind == AFTER_ACCUMULATION and self._gradients.get(parameter) is not None:
                for hook in hooks.values():
                    hook(parameter)

    def _refuse_added(self) -> None:
        """Raises `InputError` for hooks that a forward has registered, which autograd has called with single microbatches."""
        hooked = {parameter for parameter in trained(self._modules) if has_hooks(parameter)}
        for stage, module in self._modules.items() if hooked else ():
            names = [name for name, parameter in module.named_parameters() if parameter in hooked]
            if names:
                raise InputError(
                    "stage {stage} registers a hook on the gradient of {names} in a step, where the hook gets those of single microbatches",
                    stage=stage,
                    names=", ".join(map(repr, names)),
                    remedy="register hooks on parameters once, before or between steps",
                )

    def on_close(self) -> None:
        """Puts the hooks back after a failed step."""
        self._put_back()


def _changed(gradient: Tensor, hooks: Iterable[Callable[[Tensor], Tensor | None]]) -> Tensor:
    for hook in hooks:
        result = hook(gradient)
        gradient = gradient if result is None else result
    return gradient
