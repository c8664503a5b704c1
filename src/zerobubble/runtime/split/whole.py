"""The explicit fall-back: B computes all gradients, W has nothing to do."""

from __future__ import annotations

from torch import nn

from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.stage.stage import Stage
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients


class WholeStage(Stage):
    """A stage whose backward pass is not split, under any schedule."""

    def __init__(self, module: nn.Module, index: int, *, gradients: Gradients = IN_GRAD) -> None:
        super().__init__(module, index, split=False, gradients=gradients)

    def weight(self, microbatch: int) -> None:
        """W: B has done it."""

    def report(self) -> SplitReport:
        reason = "the stage is run whole, as split says"
        names = tuple(f"{name}: {reason}" for name, parameter in self.module.named_parameters() if parameter.requires_grad)
        return SplitReport(self.index, "whole", 0.0, names)
