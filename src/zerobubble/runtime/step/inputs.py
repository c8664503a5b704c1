"""What the user gives for one step on one rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from zerobubble.errors import InputError
from zerobubble.runtime.step.batch import BatchDims


class StepInputs(NamedTuple):
    """What the user gave for one step, as `Pipeline.step` describes it."""

    inputs: Any
    targets: Any
    kwargs: Any
    batch_dims: BatchDims
    scaler: torch.amp.GradScaler | None = None

    def refuse_missing(self, *, is_first: bool, needs_targets: bool) -> None:
        """Raises `InputError` if a rank that needs inputs or targets was given none."""
        for what, value, where, needed in (("inputs", self.inputs, "first", is_first), ("targets", self.targets, "last", needs_targets)):
            if needed and value is None:
                raise InputError(f"{what} are missing: this rank holds the {where} stage and needs them")
