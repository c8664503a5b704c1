"""Random numbers that the model's code draws around its units, such as dropout of a residual sum, and that several stages use.

The law: every stage runs that code, and must draw the same. So it draws from numbers of its own, which begin in each microbatch with a seed
from the first stage, and a unit draws from those of its rank, as if the code around it drew none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zerobubble.runtime.values.random_state import RandomState, seed_generators


class SharedDraws:
    """The random numbers of the code around the units in one forward of a stage, whose tensors are on `device`.

    Call `close` when the forward is over, however it ends.
    """

    def __init__(self, seed: Tensor, device: torch.device) -> None:
        self._device = device
        self._of_units = RandomState.now(device)
        self._of_code: RandomState | None = None
        seed_generators(int(seed.item()), device)

    def enter_unit(self) -> None:
        """A unit of this stage begins."""
        self._of_code = RandomState.now(self._device)
        self._of_units.set()

    def leave_unit(self, output: Any) -> Any:
        """The unit has given `output`, which goes on as other stages get it: row after row, for masks are drawn in the order of memory."""
        assert self._of_code is not None
        self._of_units = RandomState.now(self._device)
        self._of_code.set()
        self._of_code = None
        return pytree.tree_map_only(Tensor, Tensor.contiguous, output)

    def close(self) -> None:
        """Go on with the random numbers of the rank."""
        if self._of_code is None:  # else it failed in a unit, which draws from them
            self._of_units.set()
