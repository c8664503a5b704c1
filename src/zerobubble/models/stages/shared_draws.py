"""Random numbers drawn by the model's code around its units and used by several stages, such as dropout of a residual sum.

Every stage runs that code and must draw the same numbers. So this code has its own generator state, seeded in each microbatch by the first
stage. Units draw from the generator of their rank, as if the code around them drew none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zerobubble.runtime.values.random_state import RandomState, seed_generators


class SharedDraws:
    """The generator state of the code around the units in one forward of a stage, whose tensors are on `device`.

    Call `close` at the end of the forward, even after an error.
    """

    def __init__(self, seed: Tensor, device: torch.device) -> None:
        self._device = device
        self._of_units = RandomState.now(device)
        self._of_code: RandomState | None = None
        seed_generators(int(seed.item()), device)

    def enter_unit(self) -> None:
        """Switches to the generator state of the rank, for a unit of this stage."""
        self._of_code = RandomState.now(self._device)
        self._of_units.set()

    def leave_unit(self, output: Any) -> Any:
        """Switches back after a unit; makes `output` contiguous as on other stages, since random masks are drawn in memory order."""
        assert self._of_code is not None
        self._of_units = RandomState.now(self._device)
        self._of_code.set()
        self._of_code = None
        return pytree.tree_map_only(Tensor, Tensor.contiguous, output)

    def close(self) -> None:
        """Restores the generator state of the rank."""
        if self._of_code is None:  # otherwise a unit failed, and the state is already that of the rank
            self._of_units.set()
