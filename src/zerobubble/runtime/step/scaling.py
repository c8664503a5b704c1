"""Scaled gradients: the GradScaler of a step, and which of its gradients are still scaled."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp import GradScaler

from zerobubble.errors import InputError
from zerobubble.runtime.values.gradients import Gradients


class GradientScaling:
    """What the last training step did to the gradients of this rank.

    `scaler` is the one given to the step; None without one, or if it is disabled.
    """

    def __init__(self, gradients: Gradients, device: torch.device) -> None:
        self.scaler: GradScaler | None = None
        self._gradients = gradients
        self._one = torch.ones((), device=device)
        self._unscaled: set[Tensor] = set()

    def begin(self, scaler: GradScaler | None) -> None:
        """Begins a training step with this scaler."""
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._unscaled.clear()
        self.seed(scaler)  # torch creates the scale at its first use, and in a step only ranks with a last stage use it

    def seed(self, scaler: GradScaler | None) -> Tensor:
        """Returns the gradient of the mean loss: the current scale of `scaler`, or 1."""
        return self._one if scaler is None else scaler.scale(self._one)

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Notes that the gradients of `parameters` are about to be unscaled. Raises `InputError` if some already are."""
        held = set(parameters)
        if any(self._gradients.of(one) is not None for one in held & self._unscaled):
            raise InputError(
                "gradients of the last step are already unscaled",
                remedy="call unscale_ once after each step, with several optimizers as a list",
            )
        self._unscaled |= held

    def fault(self, parameters: Iterable[Tensor]) -> str:
        """Returns why the gradients of `parameters` cannot be used: some are still scaled. Empty if they can."""
        if self.scaler is None:
            return ""
        found = [one for one in parameters if self._gradients.of(one) is not None]
        scaled = sum(one not in self._unscaled for one in found)
        if not scaled:
            return ""
        return (
            f"{scaled} of {len(found)} gradients are still scaled by {self.scaler.get_scale():g}, because the last step got a scaler: "
            "call pipe.unscale_(scaler, optimizer) first, or give the scaler to PostValidation; give several optimizers as a list"
        )
