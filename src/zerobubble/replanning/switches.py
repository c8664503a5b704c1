"""The switches of `zb.Auto` and what they cost: the change itself, and the first step after it."""

from __future__ import annotations

import logging
from statistics import median_low
from time import perf_counter_ns

from zerobubble.costs import Costs
from zerobubble.ir import Schedule
from zerobubble.runtime.step.hook import AttachedPipeline
from zerobubble.runtime.step.planner import Switch
from zerobubble.units import NS_PER_MS, show_ms

_log = logging.getLogger("zerobubble")


class Switches:
    """Changes the schedule of a pipeline, and measures what that costs. All ranks make the same calls, and get the same costs."""

    def __init__(self) -> None:
        self.done: list[Switch] = []
        self._num_steps = 0
        self._at = 0
        self._changing_ns = 0
        self._first_ns: int | None = None
        self._is_open = False

    @property
    def cost(self) -> float:
        """The median cost of a switch in ns; 0 before one is known."""
        return NS_PER_MS * median_low([switch.cost_ms for switch in self.done]) if self.done else 0.0

    def change(self, pipeline: AttachedPipeline, schedule: Schedule, costs: Costs) -> None:
        """Plays `schedule` from the next step on."""
        self._finish(pipeline, None)
        began = perf_counter_ns()
        pipeline.change_schedule(schedule, costs)
        self._changing_ns = perf_counter_ns() - began
        self._at, self._first_ns, self._is_open = self._num_steps, None, True

    def after_step(self, pipeline: AttachedPipeline) -> None:
        """Counts a step, and notes the first two after a switch."""
        self._num_steps += 1
        if not self._is_open:
            return
        makespan = pipeline.timeline().makespan
        if self._first_ns is None:
            self._first_ns = makespan
        else:
            self._finish(pipeline, makespan)

    def _finish(self, pipeline: AttachedPipeline, second_ns: int | None) -> None:
        """Notes the cost of the last switch, without its first step if there was no second."""
        if not self._is_open:
            return
        changing = max(pipeline.gather(self._changing_ns, "measuring a switch"))
        slower = 0 if self._first_ns is None or second_ns is None else max(0, self._first_ns - second_ns)
        self._is_open = False
        self.done.append(Switch(self._at, pipeline.schedule.name, (changing + slower) / NS_PER_MS))
        _log.info(
            "the switch to %s cost %s: %s to change, %s in the first step",
            pipeline.schedule.name,
            *map(show_ms, (changing + slower, changing, slower)),
        )
