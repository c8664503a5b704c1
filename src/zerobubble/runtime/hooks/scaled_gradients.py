"""Divides gradients by the number of microbatches after all sums, for losses whose backward pass is not scaled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from zerobubble.runtime.hooks.replicas import EarlierGradients, trained
from zerobubble.runtime.step.hook import StepHook, TrainingStep
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.memory import local_part


class ScaledGradients(StepHook):
    """Divides the gradients of a step by `step.divisor`, after all sums over stages and replicas.

    `earlier` excludes the gradients of earlier steps: attach it before every hook that sums.
    """

    def __init__(self, modules: Mapping[int, nn.Module], gradients: Gradients) -> None:
        self.earlier = EarlierGradients(partial(trained, modules), gradients)
        self._modules = modules
        self._gradients = gradients
        self._trained: list[nn.Parameter] = []

    def on_step_begin(self, step: TrainingStep) -> None:
        """Finds the trained parameters: later hooks get their gradients after the division."""
        self._trained = trained(self._modules)
        self.completes_at_end = frozenset(self._trained)

    def on_step_end(self, step: TrainingStep) -> None:
        """Divides the sums, and adds the gradients of earlier steps."""
        for parameter in self._trained:
            gradient = self._gradients.get(parameter)
            if gradient is not None:
                local_part(gradient).div_(step.divisor)
        self.earlier.give_back()
