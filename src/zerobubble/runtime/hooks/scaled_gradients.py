"""Gradients divided by the number of microbatches when all of them are summed, where losses are gone back from as they are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from zerobubble.runtime.hooks.replicas import EarlierGradients, trained
from zerobubble.runtime.step.hook import StepHook, TrainingStep
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.memory import local_part


class ScaledGradients(StepHook):
    """Divides the gradients of a step by `step.divisor`, behind all sums over stages and replicas.

    `earlier` keeps what earlier steps left out of that: attach it before every hook that sums.
    """

    def __init__(self, modules: Mapping[int, nn.Module], gradients: Gradients) -> None:
        self.earlier = EarlierGradients(modules, gradients)
        self._modules = modules
        self._gradients = gradients
        self._trained: list[nn.Parameter] = []

    def on_step_begin(self, step: TrainingStep) -> None:
        """Note what trains: hooks behind this one hear of its gradients when they are divided."""
        self._trained = trained(self._modules)
        self.completes_at_end = frozenset(self._trained)

    def on_step_end(self, step: TrainingStep) -> None:
        """Divide the sums, and add those of earlier steps."""
        for parameter in self._trained:
            gradient = self._gradients.of(parameter)
            if gradient is not None:
                local_part(gradient).div_(step.divisor)
        self.earlier.give_back()
