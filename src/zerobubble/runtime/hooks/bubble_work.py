"""Runs other work in the bubbles of training steps, such as writing a checkpoint, evaluating or preparing the next batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from zerobubble.arguments import function, number, require, takes
from zerobubble.costs import Costs, Limits
from zerobubble.explain.windows import Window, windows
from zerobubble.ir import Schedule
from zerobubble.runtime.device import generators_restored, interface
from zerobubble.runtime.step.hook import AttachedPipeline, StepHook, TrainingStep

_STEPS_SEEN = 4
"""The number of recent steps that limit a window: it is at most its shortest measured idle time in these steps."""
_SHARE = number("a number above 0, up to 1", lambda value: isinstance(value, (int, float)) and 0 < value <= 1)
_SECONDS = number("a number of seconds, 0 or more", lambda value: isinstance(value, (int, float)) and 0 <= value < float("inf"))


class Bubble(NamedTuple):
    """Idle time of this rank that begins now: work of `seconds` that needs at most `free` bytes delays no pass.

    Attributes:
        seconds: The length in seconds.
        free: The unused memory of the rank in bytes.
        step: The index of the next step in the rank's row, from 0.
        ends: The end, by `time.perf_counter`.
    """

    seconds: float
    free: int
    step: int
    ends: float

    def left(self) -> float:
        """Returns the remaining seconds; below 0 once it is over."""
        return self.ends - perf_counter()


@takes()
class BubbleWork(StepHook):
    """Calls `work(bubble)` in the idle times of this rank's schedule, with a `Bubble` that has their length and free memory.

    The idle times are the windows of `zb.explain.windows` under `costs`, such as from `Pipeline.profile`, and `limits`. `share` of each is
    offered, as a margin for variation. If recent steps had less idle time there, `share` of that is offered, and nothing below `least`
    seconds. `work` runs between two passes, on the thread that runs them, and must return in time: nothing stops it. `overruns` counts its
    late returns. On a GPU, what it enqueues on the current stream runs between the passes. Torch's random state is restored after it, so
    training draws the same random numbers with and without it.

    `offered` is the total seconds of all bubbles so far, and `used` is the time that `work` took. An error in `work` ends the step on every
    rank.
    """

    needs_row_steps = True

    def __init__(
        self, work: Callable[[Bubble], object], costs: Costs, limits: Limits | None = None, *, share: float = 0.8, least: float = 0.001
    ) -> None:
        self.offered = 0.0
        self.used = 0.0
        self.overruns = 0
        self._work = work
        self._costs = costs
        self._limits = limits
        self._share = share
        self._least = least
        self._schedule: Schedule | None = None
        self._windows: dict[int, Window] = {}
        self._idle: dict[int, deque[float]] = {}

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """Raises `InputError` for invalid arguments, and for costs that do not fit the schedule of `pipeline`."""
        require("work", self._work, function("bubble"))
        require("share", self._share, _SHARE)
        require("least", self._least, _SECONDS)
        self._rank = pipeline.rank
        self._device = pipeline.device
        self._use(pipeline.schedule)

    def on_step_begin(self, step: TrainingStep) -> None:
        """Finds the windows again if the schedule of `step` is another one."""
        if step.schedule is not self._schedule:
            self._use(step.schedule)

    def _use(self, schedule: Schedule) -> None:
        idle = windows(schedule, self._costs, self._limits)[self._rank]
        self._windows = {window.step: window for window in idle if window.duration * self._share >= self._least * 1e9}
        self._idle = {step: deque(maxlen=_STEPS_SEEN) for step in self._windows}
        self._schedule = schedule

    def before_step_of_row(self, number: int) -> None:
        """Offers the window before step `number` of the row, if there is one."""
        window = self._windows.get(number)
        if window is None:
            return
        seconds = self._share * min([window.duration / 1e9, *self._idle[number]])
        if seconds < self._least:
            return
        began = perf_counter()
        with generators_restored([self._device] if interface(self._device).has_generator else []):
            self._work(Bubble(seconds, window.free, number, began + seconds))
        took = perf_counter() - began
        self.offered += seconds
        self.used += took
        self.overruns += took > seconds

    def on_step_end(self, step: TrainingStep) -> None:
        """Measures the idle time of each window of `step`, including the work in it."""
        times = [(begin / 1e9, end / 1e9) for begin, end in step.times()]
        if len(times) == len(step.schedule.steps[self._rank]):
            for number, idle in self._idle.items():
                before = step.began if number == 0 else times[number - 1][1]
                idle.append(max(0.0, times[number][0] - before))
