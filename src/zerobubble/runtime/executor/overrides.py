"""How users change the way passes run: a function for overlapped passes, and the pace of a rehearsal."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import nn

from zerobubble.costs import Costs
from zerobubble.ir import Op, Step


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


class Pace:
    """Stretches passes to the times in `costs`. `overruns` counts passes that took longer by themselves."""

    def __init__(self, costs: Costs) -> None:
        self.overruns = 0
        self._costs = costs

    def hold(self, step: Step, begin: int) -> None:
        """Sleeps until `begin` (a `perf_counter_ns` reading) plus the time of `step` in the costs."""
        left = begin + self._costs.step_time(step) - time.perf_counter_ns()
        if left > 0:
            time.sleep(left * 1e-9)
        else:
            self.overruns += 1
