"""A choice among plans by measured steps: each challenger has to beat the current schedule by more than steps spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from zerobubble.planning import Plan
from zerobubble.replanning.evidence import spread
from zerobubble.units import show_ms

BLOCK = 4
"""Consecutive steps of a candidate. The first after a switch does not count, because it also pays for the switch."""


class MeasuredChoice:
    """Runs blocks of steps of the `candidates`; the first is the current one. `next` is the plan of the next step, and then the winner.

    In the second round, the challengers that were faster run in reverse order, so that a load that grows or falls cancels. A challenger
    wins if its median step is shorter than the median of the current one by more than either spreads, and by more than `cost`, what the
    switch costs in ns a step.
    """

    def __init__(self, candidates: Sequence[Plan], cost: float = 0.0) -> None:
        self._candidates, self._cost = candidates, cost
        self._times: list[list[int]] = [[] for _ in candidates]
        self._turns = [place for place in range(len(candidates)) for _ in range(BLOCK)]
        self._num_steps = 0
        self._is_second_round = False

    @property
    def is_over(self) -> bool:
        """Whether all candidates have run their steps."""
        return self._num_steps == len(self._turns)

    @property
    def has_changed(self) -> bool:
        """Whether a challenger has won."""
        return self.is_over and self._winner() > 0

    @property
    def next(self) -> Plan:
        """The plan of the next step; once the choice is over, the winner."""
        if not self.is_over:
            return self._candidates[self._turns[self._num_steps]]
        winner, num_plans = self._candidates[self._winner()], len(self._candidates)
        outcome = f"measured to be the fastest of {num_plans}" if self._winner() else f"measured among {num_plans}"
        return replace(winner, how=f"{winner.how}, {outcome}")

    def add(self, makespan: int) -> None:
        """Adds the time in ns that the step of `next` took."""
        place = self._turns[self._num_steps]
        if self._num_steps == 0 or self._turns[self._num_steps - 1] == place:
            self._times[place].append(makespan)
        self._num_steps += 1
        if self.is_over and not self._is_second_round:
            self._is_second_round = True
            medians = self._medians()
            again = [place for place in range(len(medians) - 1, 0, -1) if medians[place] < medians[0]]
            self._turns += [place for place in (*again, *([0] if again else [])) for _ in range(BLOCK)]

    def _winner(self) -> int:
        """Returns the place of the fastest challenger if it is faster by more than the spread; else 0."""
        medians = self._medians()
        fastest = medians.index(min(medians))
        noise = max(self._cost, spread(self._times[0]), spread(self._times[fastest]))
        return fastest if medians[0] - medians[fastest] > noise else 0

    def _medians(self) -> list[int]:
        return [median_low(times) for times in self._times]

    def __str__(self) -> str:
        pairs = zip(self._candidates, self._medians(), strict=True)
        return ", ".join(f"{plan.schedule.name} took {show_ms(time)}" for plan, time in pairs)
