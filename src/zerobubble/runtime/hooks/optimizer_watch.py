"""Tells a pipeline's hooks when an optimizer is about to use the gradients, whoever calls it."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerobubble.runtime.step.runner import StepRunner


def watch_optimizers(runner: StepRunner) -> None:
    """Call `runner.before_optimizer` when an optimizer over any of its parameters steps, for as long as the runner lives.

    PyTorch calls the registered function for every optimizer of the process, so it asks first what costs least.
    """
    alive = weakref.ref(runner)

    def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        watched = alive()
        if watched is None or not watched.hooks:
            return
        own = set(watched.parameters())
        if any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
            watched.before_optimizer()

    weakref.finalize(runner, register_optimizer_step_pre_hook(before_step).remove)
