"""Rehearsals: every pass computes, then waits until it has taken as long as on the machine that is rehearsed."""

from __future__ import annotations

import time

from zerobubble.costs import Costs
from zerobubble.ir import Step


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
