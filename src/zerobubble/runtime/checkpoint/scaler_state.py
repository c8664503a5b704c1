"""The state of a gradient scaler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.amp import GradScaler


class ScalerState:
    """Lets a scaler have its saved state; undone by giving it the one that it had."""

    what = "the scaler"

    def __init__(self, scaler: GradScaler, state: Mapping[str, Any]) -> None:
        self._scaler = scaler
        self._state = dict(state)
        self._before = scaler.state_dict()

    def make(self) -> None:
        """See `Change`."""
        self._scaler.load_state_dict(self._state)

    def undo(self) -> None:
        """See `Change`."""
        if self._before:  # a disabled scaler has none
            self._scaler.load_state_dict(self._before)
