"""Rehearsal: every pass does its real work, then waits until the time it would take on the machine it is meant for."""

from __future__ import annotations

import time

from zerobubble.costs import Costs
from zerobubble.ir import Step


class Pace:
    """Stretches passes to the times in `costs`. `overruns` counts the passes that took longer by themselves."""

    def __init__(self, costs: Costs) -> None:
        self.overruns = 0
        self._costs = costs

    def hold(self, step: Step, begin: int) -> None:
        """Sleep until `begin` (a `perf_counter_ns` reading) plus the nominal time of `step`."""
        left = begin + self._costs.step_time(step) - time.perf_counter_ns()
        if left > 0:
            time.sleep(left * 1e-9)
        else:
            self.overruns += 1
