"""The state of a search: the arrays of one problem, the best rows so far, and the rest of the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from zerobubble.planning.kernels.anneal import MoveScratch, anneal, move_scratch
from zerobubble.planning.kernels.list_scheduler import list_scratch
from zerobubble.planning.kernels.play import Rows, copy_of, initial_play_state, makespan_of, replay, rows_of
from zerobubble.planning.kernels.priorities import apply_policy, empty_priorities, legs_of, mean_pass
from zerobubble.planning.kernels.priority_search import search_dates, search_policies
from zerobubble.planning.kernels.tables import Floats, Ints, Tables

ANNEALED_PASSES, LISTED_PASSES = 3_000_000, 300_000
"""Passes of moved schedules, and of list schedules, between two checks of the clock: some hundredths of a second."""

REFUSED_PER_PLAY = 16
"""The number of moves that count as at least one schedule, played or not, so that a search ends if all its moves are refused."""


@dataclass
class BudgetMeter:
    """The budget of a search: seconds, or a number of schedules for reproducible results. `stops` is checked whenever the meter is read."""

    seconds: float
    evaluations: int | None
    stops: Callable[[], bool] = lambda: False
    start: float = field(default_factory=lambda: perf_counter())
    used: int = 0

    @property
    def elapsed(self) -> float:
        return perf_counter() - self.start

    @property
    def left(self) -> int:
        """The schedules that may still be played, at least one."""
        return 1 << 62 if self.evaluations is None else max(1, self.evaluations - self.used)

    @property
    def spent(self) -> float:
        """The fraction spent, 1 or more at the end."""
        if self.stops():
            return 1.0
        used, whole = (self.elapsed, self.seconds) if self.evaluations is None else (self.used, self.evaluations)
        return used / whole if whole > 0 else 1.0

    def spent_after(self, count: int) -> float:
        """The fraction spent after `count` more schedules; if seconds are counted, the fraction spent now."""
        return self.spent if self.evaluations is None else (self.used + count) / max(1, self.evaluations)


@dataclass
class PolicyPool:
    """The best policies so far in rows, and their costs; NaN if unknown."""

    policies: Floats
    costs: Floats

    @classmethod
    def from_policies(cls, policies: Floats) -> PolicyPool:
        return cls(policies, np.full(len(policies), np.nan))

    def best(self, count: int) -> PolicyPool:
        """Returns the `count` best, best first."""
        order = np.argsort(self.costs, kind="stable")[:count]
        return PolicyPool(self.policies[order], self.costs[order])


class SearchState:
    """The state of a search. `order` has the best rows so far; `time` and `makespan` are their objective and makespan.

    An order is an array of codes, or `Rows` if passes may share steps. The makespan breaks ties. `report` is called with every better
    objective.
    """

    def __init__(self, tables: Tables, bound: int, budget: BudgetMeter, report: Callable[[int, str], None]) -> None:
        self.tables, self.bound, self.budget, self.report = tables, bound, budget, report
        self.order: Any = None
        self.time, self.makespan, self.how = 1 << 62, 1 << 62, ""
        self._leg, self._scratch, self._priorities = legs_of(tables), list_scratch(tables), empty_priorities(tables)

    def with_tables(self, tables: Tables, budget: BudgetMeter) -> SearchState:
        """Returns a search with other tables of the same problem and another budget.

        The best rows must take no longer with these tables.
        """
        other = SearchState(tables, self.bound, budget, self.report)
        other.order, other.time, other.makespan, other.how = self.order, self.time, self.makespan, self.how
        return other

    @property
    def done(self) -> bool:
        return self.time <= self.bound or self.budget.spent >= 1

    def offer(self, order: Any, how: str) -> int:
        """Plays `order` and keeps it if it is the best. Returns its longest time, -1 if it deadlocks or does not fit."""
        rows = self.played(order)
        if rows is None:
            return -1
        longest = int(self._times_of_ranks(rows).max())
        self._keep(order, longest, int(makespan_of(self.tables, rows.end)), how)
        return longest

    def time_of(self, order: Any) -> int:
        """Plays `order`. Returns its longest time, -1 if it deadlocks or does not fit."""
        rows = self.played(order)
        return -1 if rows is None else int(self._times_of_ranks(rows).max())

    def played(self, order: Any) -> Rows | None:
        """Returns the rows of `order` with their times; None if they deadlock or do not fit."""
        self.budget.used += 1
        rows = copy_of(order) if self.tables.steps else rows_of(self.tables, order)
        longest, _ = replay(self.tables, rows, initial_play_state(self.tables), 0.0, np.inf)
        return rows if longest >= 0 else None

    def _times_of_ranks(self, rows: Rows) -> Ints:
        """Returns the time of each rank in rows that have been played, in ns."""
        times: Ints = self.tables.ranks["work"] + rows.idle[self.tables.ranks["stop"] - 1]
        return times

    def _keep(self, order: Any, longest: int, makespan: int, how: str) -> None:
        if (longest, makespan) < (self.time, self.makespan):
            is_shorter = longest < self.time
            self.order, self.time, self.makespan, self.how = copy_of(order), longest, makespan, how
            if is_shorter:
                self.report(longest, how)

    def _keep_listed(self, order: Ints, longest: int, how: str) -> None:
        """Keeps the order from the list scheduler if it is the best."""
        if longest < self.time and (rows := self.played(order)) is not None:
            self._keep(order, longest, int(makespan_of(self.tables, rows.end)), how)

    def improve_policies(self, pool: PolicyPool, tries: int, fresh: int = 0) -> None:
        """Tries the policies of the pool whose cost is unknown, then `fresh` random ones, then some near those of the pool, and improves
        the pool. Tries a few even if the budget is spent.
        """
        best, policy, tried = np.empty(self.tables.size, np.int64), np.empty(pool.policies.shape[1]), 0
        while tried == 0 or (tried < tries and not self.done):
            chunk = max(1, min(tries - tried, LISTED_PASSES // self.tables.size, self.budget.left))
            arguments = (self._scratch, self._priorities, pool.policies, pool.costs, policy, best)
            longest, used = search_policies(self.tables, self._leg, *arguments, self.time, self.bound, chunk, fresh - tried)
            self.budget.used += used
            tried += chunk
            self._keep_listed(best, longest, "list scheduling")

    def improve_due_dates(self, policy: Floats, tries: int) -> Ints:
        """Returns the best rows after `tries` small changes to the due dates of `policy`, or the known rows if no schedule results."""
        assert self.order is not None, "a search has rows before it changes due dates"
        priorities = empty_priorities(self.tables)
        apply_policy(self.tables, self._leg, policy, self.bound, priorities)
        best, longest, tried = self.order.copy(), 1 << 62, 0
        while tried < tries and not self.done:
            chunk = max(1, min(tries - tried, LISTED_PASSES // self.tables.size, self.budget.left))
            longest, used = search_dates(
                self.tables, self._scratch, self._priorities, priorities, best, longest, self.bound, tried / tries, chunk
            )
            self.budget.used += used
            tried += chunk
            self._keep_listed(best, longest, "due dates")
        return best

    def anneal_order(self, order: Any, moves: int, hot: float, share: float = 1.0) -> Any:
        """Anneals `order` from `hot` mean pass times to a tenth of it, and returns the best rows of this run.

        The run ends after `moves` moves or a `share` of the budget. The temperature follows whichever limit is closer.
        """
        rows, best = self.played(order), copy_of(order)
        assert rows is not None, "only rows that have been played are annealed"
        share_of_sum, scratch, goal, cost = self._begin_moves(rows)
        start, mean = self.budget.spent, mean_pass(self.tables)
        tried, over = 0, 0.0
        while over < 1 and not self.done:
            chunk = max(1, min(moves - tried, ANNEALED_PASSES // self.tables.size, self.budget.left))
            next_over = max((tried + chunk) / moves, over)
            warm, cool = (mean * hot * 0.1**part for part in (over, next_over))
            goal, cost, moved = anneal(self.tables, rows, scratch, best, goal, self.bound, cost, share_of_sum, warm, cool, chunk)
            self._count_moves(moved, scratch)
            tried += chunk
            over = max(next_over, (self.budget.spent - start) / share)
            self._keep(best, goal, int(scratch.makespan[0]), "annealing")
        return best

    def anneal_played(self, order: Any, plays: int, hot: float) -> None:
        """Anneals `order` from `hot` mean pass times to a tenth of it, until `plays` schedules have been played."""
        rows, best = self.played(order), copy_of(order)
        assert rows is not None, "only rows that have been played are annealed"
        share_of_sum, scratch, goal, cost = self._begin_moves(rows)
        mean, used = mean_pass(self.tables), 0
        while used < plays and self.time > self.bound:
            chunk = min(max(REFUSED_PER_PLAY, (plays - used) // 16), plays - used)  # small steps of temperature
            warmth = mean * hot * 0.1 ** (used / plays)
            arguments = (self.tables, rows, scratch, best)
            goal, cost, moves = anneal(*arguments, goal, self.bound, cost, share_of_sum, warmth, warmth, chunk)
            used += self._count_moves(moves, scratch)
            self._keep(best, goal, int(scratch.makespan[0]), "annealing")

    def _count_moves(self, moves: int, scratch: MoveScratch) -> int:
        """Returns as how many schedules `moves` count, adds them to the budget, and clears the passes played in `scratch`.

        Moves that are refused before they are played, as most are if memory is tight, hardly count.
        """
        plays = max(-(-int(scratch.played[0]) // self.tables.size), -(-moves // REFUSED_PER_PLAY))
        scratch.played[0] = 0
        self.budget.used += plays
        return plays

    def _begin_moves(self, rows: Rows) -> tuple[float, MoveScratch, int, float]:
        """Returns the start values for annealing played rows: the weight of the sum of times in their cost, buffers, time and cost."""
        scratch, share_of_sum, times = move_scratch(self.tables, rows), 1 / len(self.tables.ranks), self._times_of_ranks(rows)
        scratch.makespan[0] = makespan_of(self.tables, rows.end)
        return share_of_sum, scratch, int(times.max()), float(times.max() + share_of_sum * times.sum())
