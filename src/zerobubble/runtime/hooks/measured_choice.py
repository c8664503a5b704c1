"""Chooses among several plans for one problem by measuring them in alternating training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from zerobubble.planning import Plan
from zerobubble.units import show_ms

STEPS = 5
"""Steps that each candidate runs."""


class MeasuredChoice:
    """Runs steps of the `candidates` in turns. `next` is the plan of the next step, and the fastest one once the choice `is_over`.

    Step times vary with the load of machines and links. So the candidates alternate, to meet the same load, and their medians count.
    """

    def __init__(self, candidates: Sequence[Plan]) -> None:
        self._candidates = candidates
        self._times: list[list[int]] = [[] for _ in candidates]
        self._num_steps = 0

    @property
    def is_over(self) -> bool:
        """Whether all candidates have run their steps."""
        return self._num_steps == STEPS * len(self._candidates)

    @property
    def next(self) -> Plan:
        """The plan of the next step; the fastest candidate once the choice is over."""
        if not self.is_over:
            return self._candidates[self._num_steps % len(self._candidates)]
        medians = self._medians()
        fastest = self._candidates[medians.index(min(medians))]
        return replace(fastest, how=f"{fastest.how}, measured to be the fastest of {len(medians)}")

    def add(self, makespan: int) -> None:
        """Adds the time in ns that the step of `next` took."""
        self._times[self._num_steps % len(self._candidates)].append(makespan)
        self._num_steps += 1

    def _medians(self) -> list[int]:
        return [median_low(times) for times in self._times]

    def __str__(self) -> str:
        pairs = zip(self._candidates, self._medians(), strict=True)
        return ", ".join(f"{plan.schedule.name} took {show_ms(time)}" for plan, time in pairs)
