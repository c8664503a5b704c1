"""The states of the generators of torch, Python and NumPy."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.runtime.device import interface


class RandomStates(NamedTuple):
    """The states of the generators that user code draws from: torch, Python, NumPy if it is imported, the `device` if it has one."""

    of_torch: Tensor
    of_python: tuple[Any, ...]
    of_numpy: Any
    of_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomStates:
        """Returns the current states."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
            interface(device).random_state() if interface(device).has_generator else None,
        )

    def restore(self, device: torch.device) -> None:
        """Gives the generators these states."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        if self.of_numpy is not None:
            sys.modules["numpy"].random.set_state(self.of_numpy)
        if self.of_device is not None:
            interface(device).set_random_state(self.of_device)


@contextmanager
def states_restored(states: RandomStates | None, device: torch.device) -> Iterator[None]:
    """A context that begins with `states`, if given, and restores the previous states at its end."""
    before = RandomStates.now(device)
    if states is not None:
        states.restore(device)
    try:
        yield
    finally:
        before.restore(device)
