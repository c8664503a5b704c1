"""Scaled gradients: by which GradScaler a step scaled them, and which of them are still scaled when somebody is about to use them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp import GradScaler

from zerobubble.errors import InputError
from zerobubble.runtime.values.gradients import Gradients


class GradientScaling:
    """What the last training step did to the gradients of this rank.

    `scaler` is the one it was given, None without one and for one that is disabled.
    """

    def __init__(self, gradients: Gradients, device: torch.device) -> None:
        self.scaler: GradScaler | None = None
        self._gradients = gradients
        self._one = torch.ones((), device=device)
        self._unscaled: set[Tensor] = set()

    def begin(self, scaler: GradScaler | None) -> None:
        """A training step begins, which is given this scaler."""
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._unscaled.clear()
        self.seed(scaler)  # torch makes the scale by its first use, and only a rank with a last stage uses it in a step

    def seed(self, scaler: GradScaler | None) -> Tensor:
        """The gradient of the mean loss, by the scale that `scaler` has now."""
        return self._one if scaler is None else scaler.scale(self._one)

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of `parameters` are about to be unscaled; raises `InputError` where some are already."""
        held = set(parameters)
        if any(self._gradients.of(one) is not None for one in held & self._unscaled):
            raise InputError(
                "gradients of the last step are unscaled already: call unscale_ once after each step; several optimizers go as a list"
            )
        self._unscaled |= held

    def fault(self, parameters: Iterable[Tensor]) -> str:
        """What is wrong with using the gradients of `parameters` now: some are still scaled. Empty where all is well."""
        if self.scaler is None:
            return ""
        found = [one for one in parameters if self._gradients.of(one) is not None]
        scaled = sum(one not in self._unscaled for one in found)
        if not scaled:
            return ""
        return (
            f"{scaled} of {len(found)} gradients are still scaled by {self.scaler.get_scale():g}, as the last step was given a scaler: "
            "call pipe.unscale_(scaler, optimizer) first, or give the scaler to PostValidation; several optimizers go as a list"
        )
