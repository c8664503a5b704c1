"""What an axis of a plan adds to its search: the choices that it opens, and how it finishes the plan and reports what it saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import ClassVar

from zerobubble.bounds import Bound
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.attempt import Budget, ProgressCallback
from zerobubble.planning.candidate import Candidate, Entry
from zerobubble.planning.problem.problem import Problem


@dataclass(frozen=True)
class Contest:
    """The candidates of a search after it, for axes to finish: the `entries` that were opened, and the `bound` of a target.

    `candidates_with` has all candidates, or those with the choice of a plan of each axis whose bounds hold for one choice.

    `budget` is that of the whole search, which began at `started` of `perf_counter` without the seconds of compiling. Without `is_free`,
    axes leave the order of passes as it is.
    """

    entries: Sequence[Entry]
    bound: Callable[[Problem], Bound]
    candidates_with: Callable[[Plan], Sequence[Candidate]]
    budget: Budget
    started: float
    seed: int
    is_free: bool = True
    is_cut_short: bool = False
    progress: ProgressCallback | None = None

    @property
    def is_searched(self) -> bool:
        """Whether there was a budget to search."""
        return not self.budget.is_empty

    @cached_property
    def answers(self) -> list[Plan]:
        """All plans that can win, the best of each candidate first."""
        return [plan for entry in self.entries if not entry.candidate.is_compared for plan in entry.plans]

    @cached_property
    def on_device(self) -> list[Plan]:
        """The plans of all candidates that leave everything on the device."""
        return [plan for entry in self.entries for plan in entry.plans if not plan.offloads]

    def seeds_on(self, plan: Plan) -> tuple[Schedule, ...]:
        """The schedules from which the search for this plan started, if it was searched as it is."""
        alike = (entry for entry in self.entries if not entry.candidate.lifts and entry.candidate.problem.placement == plan.placement)
        return next((entry.attempt.seeds for entry in alike), ())

    def least_bound(self, plan: Plan, axis: str = "", label: str = "") -> Bound:
        """The lower bound over all candidates that can win, or over those with this choice of an axis.

        If bounds hold for one choice of an axis, such as a cut, those with the choice of `plan` count.
        """
        able = [one for one in self.candidates_with(plan) if not one.is_compared and one.label(axis) == label]
        return min((self.bound(one.target) for one in able), key=lambda bound: bound.time)

    def bounded(self, plan: Plan) -> Plan:
        """The plan with the bound of its problem in place of its own."""
        bound = self.bound(plan.problem)
        return replace(plan, bound=bound, status=Status.OPTIMAL if plan.time == bound.time else Status.FEASIBLE)

    @property
    def left(self) -> Budget:
        """The budget for an axis to finish: the seconds that are left, or all evaluations."""
        if self.is_cut_short or not self.is_free:
            return self.budget.emptied
        return self.budget._replace(seconds=max(0.0, self.started + self.budget.seconds - perf_counter()))


class ChoicesOfAxis:
    """The choices of an axis that was asked for."""

    finish_share: ClassVar[float] = 0.0
    """Share of the seconds for `finish`."""

    order_from: ClassVar[str] = ""
    """Suffix to the name of a plan whose order was found for another choice of the axis."""

    def choices(self, candidate: Candidate) -> Iterable[Candidate]:
        """The candidate with each choice of the axis."""
        return (candidate,)

    def near(self, name: str, plan: Plan, until: float) -> Iterable[Candidate]:
        """The placement `name` with choices near that of `plan` on which its order is shorter, until the clock passes `until`."""
        return ()

    def on_choice_of(self, name: str, plan: Plan) -> Candidate | None:
        """The placement `name` with the choice of `plan`, if bounds hold for one choice of the axis; None if they hold for all."""
        return None

    def show(self, plans: Sequence[Plan], progress: ProgressCallback | None) -> None:
        """Reports the choices that were tried."""

    def finish(self, found: Plan, contest: Contest) -> Plan:
        """The best plan after the last decision of this axis, with what it saved."""
        return found
