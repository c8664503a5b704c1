"""One placement's turn: the published schedules first, then the search, every answer checked and played anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from zerobubble.errors import InputError, near
from zerobubble.ir import Schedule
from zerobubble.plan.papers import BASELINES
from zerobubble.plan.papers.zb_heuristic import zb_heuristic
from zerobubble.plan.papers.zb_v_greedy import zb_v_greedy
from zerobubble.plan.problem import Problem, Solved, Status
from zerobubble.plan.seeds import fits, fitting, one_by_one, published, split

if TYPE_CHECKING:
    from zerobubble.plan.search import Progress


class News(NamedTuple):
    """What the search on a placement has found so far: the bubble, how far the time is above its bound, and what found it."""

    placement: str
    bubble: float
    gap: float
    how: str


Watch = Callable[[News], None]
"""Called with news of a search."""


class Budget(NamedTuple):
    """How long to search: `seconds`, or a number of `evaluations` (schedules played), with which the answer is always the same."""

    seconds: float
    evaluations: int | None = None

    @property
    def is_empty(self) -> bool:
        return self.seconds <= 0 if self.evaluations is None else self.evaluations <= 0

    def share(self, parts: int) -> Budget:
        """One of so many equal parts."""
        return Budget(self.seconds / parts, None if self.evaluations is None else self.evaluations // parts)

    @property
    def for_seeds(self) -> float:
        """Seconds that may go into making seeds; without end where the clock must not decide."""
        return float("inf") if self.evaluations is not None or self.is_empty else self.seconds / 2


QUICK_PASSES = 60_000
"""Passes that the papers' planners order in a few seconds."""


@dataclass(frozen=True)
class Attempt:
    """What is known of one placement: its best answer so far, and where a search may start."""

    name: str
    solved: Solved
    seeds: tuple[Schedule, ...] = ()
    searched: bool = False
    interrupted: bool = False

    @property
    def is_open(self) -> bool:
        """Whether a search could still find something."""
        return self.solved.status is Status.FEASIBLE


def quick(problem: Problem) -> Iterator[Schedule]:
    """What the papers' quick planners find, as far as they have an answer; nothing where the problem is too large for them."""
    if 3 * problem.placement.num_stages * problem.num_microbatches > QUICK_PASSES:
        return
    for planner in (zb_v_greedy, zb_heuristic):
        with suppress(InputError):
            yield planner(problem)


def begin(name: str, problem: Problem, budget: Budget, seeds: Iterable[Schedule] | None = None) -> Attempt:
    """The best of what quick planners find and of `seeds` (if not given, the published schedules), until one meets the bound.

    Where none fits, it is each microbatch by itself, which fits wherever anything does.
    """
    started, bound = perf_counter(), problem.bound()
    if problem.lack:
        return Attempt(name, Solved(problem, Status.INFEASIBLE, bound, None, None, perf_counter() - started, "", problem.lack))
    best, kept = None, []
    given = published(problem.placement, problem.num_microbatches) if seeds is None else seeds
    for seed in fitting(chain(quick(problem), given), problem):
        kept.append(seed)
        solved = Solved.of(problem, bound, seed, perf_counter() - started, seed.name)
        best = solved if best is None else shorter(best, solved)
        if best.status is Status.OPTIMAL or solved.seconds > budget.for_seeds:
            break
    if best is None:
        alone = one_by_one(problem.placement, problem.num_microbatches)
        best = Solved.of(problem, bound, alone, perf_counter() - started, alone.name)
    return Attempt(name, replace(best, seconds=perf_counter() - started), tuple(kept))


def sketch(attempt: Attempt) -> Attempt:
    """The attempt after one pass of the list scheduler, where no seed fits."""
    return attempt if attempt.seeds else _search(attempt, (), Budget(0.0), 0, None)


def improve(attempt: Attempt, budget: Budget, seed: int = 0, watch: Watch | None = None) -> Attempt:
    """The attempt after a search, never worse; the compiling of the search must be done before, or it counts."""
    if budget.is_empty or attempt.solved.schedule is None:
        return attempt
    return replace(_search(attempt, (attempt.solved.schedule, *attempt.seeds), budget, seed, watch), searched=True)


def _search(attempt: Attempt, seeds: tuple[Schedule, ...], budget: Budget, seed: int, watch: Watch | None) -> Attempt:
    from zerobubble.plan.search import search

    solved = attempt.solved
    if not attempt.is_open or not _can_split(solved.problem):
        return attempt
    found = search(
        solved.problem,
        solved.bound.time,
        seeds,
        seconds=budget.seconds,
        seed=seed,
        evaluations=budget.evaluations,
        progress=None if watch is None else lambda progress: watch(_news(attempt, progress)),
    )
    seconds, name = solved.seconds + found.seconds, f"planned by {found.how}"
    if solved.schedule is None or found.schedule.rows != solved.schedule.rows:
        solved = shorter(solved, Solved.of(solved.problem, solved.bound, replace(found.schedule, name=name), seconds, name))
    return replace(attempt, solved=replace(solved, seconds=seconds), interrupted=found.interrupted)


def _can_split(problem: Problem) -> bool:
    """Whether one microbatch with B and W apart fits, as all schedules of the search are; W may need more room than F saved."""
    return fits(split(one_by_one(problem.placement, 1)), problem)


def _news(attempt: Attempt, progress: Progress) -> News:
    gap = progress.time_ns / progress.bound - 1 if progress.bound else 0.0
    return News(attempt.name, attempt.solved.problem.bubble(progress.time_ns), gap, progress.how)


def shorter(one: Solved, other: Solved) -> Solved:
    """The one with the shorter schedule, the first of equals."""
    return other if one.time is None or (other.time is not None and other.time < one.time) else one


def by_baseline(name: str, baseline: str, problem: Problem) -> Attempt:
    """What a planner of the papers finds. Raises `InputError` for an unknown one, and where it has no answer, with its reason."""
    if baseline not in BASELINES:
        raise InputError(f"there is no baseline {baseline!r}: {near(baseline, BASELINES)}known are {', '.join(BASELINES)}")
    started, bound = perf_counter(), problem.bound()
    schedule = BASELINES[baseline](problem)
    return Attempt(name, Solved.of(problem, bound, schedule, perf_counter() - started, baseline), searched=True)
