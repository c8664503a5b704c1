"""The passes of an overlapped step as the user's `overlap` function receives them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from zerobubble.ir import Op


class Overlapped:
    """One pass of an overlapped step, with its inputs.

    Call `run` once, on any thread or stream that the next pass of this rank waits for.
    """

    def __init__(self, op: Op, module: nn.Module, work: Callable[[], object]) -> None:
        self.op = op
        self.module = module
        self.is_done = False
        self._work = work

    def run(self) -> None:
        """Computes the pass."""
        self._work()
        self.is_done = True


Overlap = Callable[[Overlapped, Overlapped], object]
