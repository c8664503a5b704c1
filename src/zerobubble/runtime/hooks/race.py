"""Several answers to one problem, run by turns in training steps: the one whose steps were the shortest wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from zerobubble.planning import Plan
from zerobubble.units import show_ms

STEPS = 5
"""Steps that each entrant runs."""


class Race:
    """Steps of the `entrants` by turns; `next` runs next, and has won when the race `is_over`.

    A step differs from the next by what else machines and links do, so medians count, and turns see to it that all meet the same.
    """

    def __init__(self, entrants: Sequence[Plan]) -> None:
        self._entrants = entrants
        self._times: list[list[int]] = [[] for _ in entrants]
        self._num_steps = 0

    @property
    def is_over(self) -> bool:
        """Whether all entrants ran their steps."""
        return self._num_steps == STEPS * len(self._entrants)

    @property
    def next(self) -> Plan:
        """What runs next, the winner when the race is over."""
        if not self.is_over:
            return self._entrants[self._num_steps % len(self._entrants)]
        medians = self._medians()
        winner = medians.index(min(medians))
        found = self._entrants[winner]
        return replace(found, how=f"{found.how}, measured to be the fastest of {len(medians)}")

    def took(self, makespan: int) -> None:
        """The step of `next` took so many ns."""
        self._times[self._num_steps % len(self._entrants)].append(makespan)
        self._num_steps += 1

    def _medians(self) -> list[int]:
        return [median_low(times) for times in self._times]

    def __str__(self) -> str:
        pairs = zip(self._entrants, self._medians(), strict=True)
        return ", ".join(f"{solved.schedule.name} took {show_ms(time)}" for solved, time in pairs)
