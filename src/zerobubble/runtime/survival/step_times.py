"""Measures how much longer training steps take since a rank is gone."""

from __future__ import annotations

from collections import deque
from statistics import median

STEPS_COMPARED = 5
"""The number of steps before and since the loss of a rank whose medians are compared."""


class StepTimes:
    """The seconds that training steps took before a rank was gone, and since."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=STEPS_COMPARED)
        self._since: list[float] | None = None

    def rank_lost(self) -> None:
        """Counts the next steps as steps without another rank."""
        self._since = []

    def add(self, seconds: float) -> None:
        """Adds the time of a step."""
        (self._before if self._since is None else self._since).append(seconds)

    def slowdown(self) -> str | None:
        """Returns how much longer steps take, in words, after the one step that completes the measurement; else None."""
        # The first step without the rank does not count: it includes making the programs.
        if self._since is None or len(self._since) != STEPS_COMPARED + 1 or not self._before:
            return None
        before, now = median(self._before), median(self._since[1:])
        return f"measured, steps take {now / before:.2f} times as long: {1000 * now:.3g} ms, and {1000 * before:.3g} ms before"
