"""How much longer training steps take since a rank is gone, as they are measured."""

from __future__ import annotations

from collections import deque
from statistics import median

STEPS_COMPARED = 5
"""Of how many steps before and since a rank was gone medians are compared."""


class StepTimes:
    """Seconds that training steps took before ranks were gone, and since."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=STEPS_COMPARED)
        self._since: list[float] | None = None

    def a_rank_is_gone(self) -> None:
        """From here on steps are played without another rank."""
        self._since = []

    def took(self, seconds: float) -> None:
        """A step is over."""
        (self._before if self._since is None else self._since).append(seconds)

    def in_words(self) -> str | None:
        """How much longer steps take, in the one step after which enough of them are known."""
        # The first one without the rank made its programs.
        if self._since is None or len(self._since) != STEPS_COMPARED + 1 or not self._before:
            return None
        before, now = median(self._before), median(self._since[1:])
        return f"measured, steps take {now / before:.2f} times as long: {1000 * now:.3g} ms, and {1000 * before:.3g} ms before"
