"""Taking an optimizer's step back by a copy of what it changes: to the bit, for any optimizer, in the memory of what it holds."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerobubble.runtime.values.memory import local_part


class SavedCopy:
    """A copy of an optimizer's parameters and state, in room that is taken once. `save` before a step, `undo` after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._room: dict[Tensor, Tensor] = {}
        self._state: dict[Any, dict[str, Any]] = {}

    def save(self) -> None:
        """Keep parameters and state as they are."""
        state = self._optimizer.state
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        held += [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
        room, self._room = self._room, {}
        self._room = {tensor: room[tensor] if tensor in room else torch.empty_like(tensor) for tensor in held}
        self._state = {
            key: {name: value if isinstance(value, Tensor) else deepcopy(value) for name, value in entry.items()}
            for key, entry in state.items()
        }
        _copy(self._room, self._room.values())

    def undo(self) -> None:
        """Make parameters and state what they were."""
        _copy(self._room.values(), self._room)
        self._optimizer.state.clear()
        self._optimizer.state.update({key: dict(entry) for key, entry in self._state.items()})


@torch.no_grad()
def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    given = [local_part(source) for source in sources]
    if given:
        torch._foreach_copy_([local_part(target) for target in targets], given)
