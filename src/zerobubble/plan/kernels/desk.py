"""Where a search works: the arrays of one problem, the best rows so far, and what is left of the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from zerobubble.plan.kernels.anneal import anneal
from zerobubble.plan.kernels.dates import mean_pass
from zerobubble.plan.kernels.greedy import Keys, greedy
from zerobubble.plan.kernels.play import Rows, all_fit, play, rows_of
from zerobubble.plan.kernels.tables import Ints, Tables

CHUNK = 3_000_000
"""Passes of moved schedules between two looks at the clock: some hundredths of a second."""


@dataclass
class Budget:
    """What a search may spend: seconds, or a number of schedules to play where it must be repeatable."""

    seconds: float
    evaluations: int | None
    start: float = field(default_factory=perf_counter)
    used: int = 0

    @property
    def elapsed(self) -> float:
        return perf_counter() - self.start

    @property
    def spent(self) -> float:
        """The share that is gone, 1 or more at the end."""
        used, whole = (self.elapsed, self.seconds) if self.evaluations is None else (self.used, self.evaluations)
        return used / whole if whole > 0 else 1.0


@dataclass
class Desk:
    """A problem being searched. `word` and `time` are the best rows and their objective, `report` hears of every new best."""

    tables: Tables
    bound: int
    budget: Budget
    report: Callable[[int, str], None]
    word: Ints | None = None
    time: int = 1 << 62
    how: str = ""

    @property
    def done(self) -> bool:
        return self.time <= self.bound or self.budget.spent >= 1

    def offer(self, word: Ints, how: str) -> tuple[int, int]:
        """Play `word` and keep it if it is the best; its longest time and the sum over ranks, (-1, 0) if it stops or does not fit."""
        rows = self.played(word)
        longest, total = (-1, 0) if rows is None else self._lengths(rows)
        if longest >= 0:
            self._keep(word, longest, how)
        return longest, total

    def played(self, word: Ints) -> Rows | None:
        """The rows of `word` with their times; None if they stop or do not fit."""
        self.budget.used += 1
        rows = rows_of(self.tables, word)
        if not all_fit(self.tables, rows) or play(self.tables, rows, self.tables.ranks["first"].copy(), 0.0, np.inf)[0] < 0:
            return None
        return rows

    def _lengths(self, rows: Rows) -> tuple[int, int]:
        lengths = self.tables.ranks["work"] + rows.idle[self.tables.ranks["stop"] - 1]
        return int(lengths.max()), int(lengths.sum())

    def _keep(self, word: Ints, longest: int, how: str) -> None:
        if longest < self.time:
            self.word, self.time, self.how = word.copy(), longest, how
            self.report(longest, how)

    def schedule(self, keys: Keys, how: str, weight: float) -> float:
        """The cost of the rows that `keys` lead to: the longest time plus `weight` times the mean over ranks, inf if there are none."""
        word = np.empty(self.tables.size, np.int64)
        if not greedy(self.tables, keys, word):
            self.budget.used += 1
            return float("inf")
        longest, total = self.offer(word, how)
        return longest + weight * total / len(self.tables.ranks) if longest >= 0 else float("inf")

    def polish(self, word: Ints, moves: int, hot: float, how: str) -> Ints:
        """Anneal `word` with so many moves, from `hot` mean pass times to a tenth of it; the best rows of this run."""
        rows, best = self.played(word), word.copy()
        assert rows is not None, "only rows that have been played are polished"
        goal, mean, tried = self._lengths(rows)[0], mean_pass(self.tables), 0
        while tried < moves and not self.done:
            chunk = max(1, min(moves - tried, CHUNK // len(word)))
            warm, cool = (mean * hot * 0.1 ** ((tried + done) / moves) for done in (0, chunk))
            share = 1 / len(self.tables.ranks)
            goal, used = anneal(self.tables, rows, best, goal, self.bound, share, warm, cool, chunk)
            self.budget.used += used
            tried += chunk
            self._keep(best, goal, how)
        return best
