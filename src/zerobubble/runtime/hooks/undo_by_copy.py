"""Undoes an optimizer's step by a copy of parameters and state: bitwise exact, for any optimizer, at the cost of their memory."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerobubble.runtime.values.memory import local_part


class SavedCopy:
    """A copy of an optimizer's parameters and state, in buffers that are allocated once. `save` before a step, `undo` after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: dict[Tensor, Tensor] = {}
        self._state: dict[Any, dict[str, Any]] = {}

    def save(self) -> None:
        """Copies parameters and state."""
        state = self._optimizer.state
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        held += [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
        copies, self._copies = self._copies, {}
        self._copies = {tensor: copies[tensor] if tensor in copies else torch.empty_like(tensor) for tensor in held}
        self._state = {
            key: {name: value if isinstance(value, Tensor) else deepcopy(value) for name, value in entry.items()}
            for key, entry in state.items()
        }
        _copy(self._copies, self._copies.values())

    def undo(self) -> None:
        """Restores parameters and state."""
        _copy(self._copies.values(), self._copies)
        self._optimizer.state.clear()
        self._optimizer.state.update({key: dict(entry) for key, entry in self._state.items()})


@torch.no_grad()
def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    given = [local_part(source) for source in sources]
    if given:
        torch._foreach_copy_([local_part(target) for target in targets], given)
