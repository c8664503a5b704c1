"""The search on one placement: published schedules first, then the planner's search; every answer is checked and played anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, islice
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from zerobubble.bounds import Bound
from zerobubble.errors import InputError, near
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.lengthening import lengthened_by_time, with_few_microbatches
from zerobubble.planning.papers import BASELINES
from zerobubble.planning.papers.zb_heuristic import zb_heuristic
from zerobubble.planning.papers.zb_v_greedy import zb_v_greedy
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.seeds import (
    MAKE_SECONDS,
    computed_again,
    fits_memory,
    fitting,
    lean,
    paired,
    promising,
    serial_schedule,
    with_room_for_again,
)
from zerobubble.schedules import SCHEDULES

if TYPE_CHECKING:
    from zerobubble.planning.search import Progress


class PlanProgress(NamedTuple):
    """What the search on a placement has found so far: the bubble, how far the time is above its bound, and what found it."""

    placement: str
    bubble: float
    gap: float
    how: str

    @classmethod
    def of(cls, placement: str, problem: Problem, time: int, bound: int, how: str) -> PlanProgress:
        """The progress of a search whose best schedule for `problem` takes `time`, with `bound` as its lower bound, both in ns."""
        return cls(placement, problem.bubble(time), time / bound - 1 if bound else 0.0, how)


ProgressCallback = Callable[[PlanProgress], None]
"""Called with the progress of a search, again and again."""


class Budget(NamedTuple):
    """How long to search: `seconds`, or a number of `evaluations` (schedules played), with which the answer is always the same."""

    seconds: float
    evaluations: int | None = None

    @property
    def is_empty(self) -> bool:
        return self.seconds <= 0 if self.evaluations is None else self.evaluations <= 0

    @property
    def emptied(self) -> Budget:
        """Nothing of it, counted as it is."""
        return Budget(0.0, None if self.evaluations is None else 0)

    def part(self, share: float) -> Budget:
        """A share of it."""
        return Budget(share * self.seconds, None if self.evaluations is None else int(share * self.evaluations))

    def share(self, parts: int, done: int = 0, spent: float = 0.0) -> Budget:
        """One of `parts` equal parts. Of the seconds it is an equal part of what is left after the `done` parts have taken `spent`."""
        return Budget(max(0.0, self.seconds - spent) / (parts - done), None if self.evaluations is None else self.evaluations // parts)

    @property
    def for_seeds(self) -> float:
        """Seconds that may go into making seeds; without end where the clock must not decide."""
        return float("inf") if self.evaluations is not None or self.is_empty else self.seconds / 2

    def lasts_for_seeds(self, passes: int) -> bool:
        """Whether half of it lasts for schedules of so many passes in all; always where the clock must not decide."""
        return self.evaluations is not None or self.is_empty or FIRST_SECONDS * passes <= self.seconds / 2

    def lasts_for_check(self, problem: Problem) -> bool:
        """Whether there is time for more than to check an answer; always where the clock must not decide."""
        return self.evaluations is not None or self.seconds > CHECK_SECONDS * problem.num_passes

    def lasts_for_windows(self, problem: Problem) -> bool:
        """Whether the bound by windows takes a small part of it at most; where the clock must not decide, of `SECONDS_COUNTED`."""
        seconds = self.seconds if self.evaluations is None else SECONDS_COUNTED
        pairs = problem.num_passes**2 / problem.placement.num_ranks
        return not self.is_empty and WINDOWS_SECONDS * pairs <= WINDOWS_SHARE * seconds


Search = Callable[[Mapping[str, Problem], Budget, int], Plan]
"""What plans for the problems on placements, by name, within a budget and with a seed: the best, with the best of each as its choices.

A step for one axis of a problem has such a search for the others inside, and is one itself.
"""

FIRST_SECONDS = 6e-6
"""Seconds for each pass of a placement's first schedule, to make, check and play it."""

PASSES_AT_ONCE = 3_500
"""Passes that the papers' heuristics order in about a tenth of a second: they always get that."""

COMPILED_SECONDS = 0.4
"""Seconds in which the compiled heuristic orders as many passes as `PASSES_WITHOUT_CLOCK`."""

PASSES_WITHOUT_CLOCK = 60_000
"""Passes up to which the heuristics are asked where the clock must not decide, which takes some seconds."""

PASSES_PER_SECOND = 30_000
"""Passes that the heuristics order in a second."""

FAR_FROM_BOUND = 1.3
"""How long a seed is as a multiple of the bound where one pass of the list scheduler may well be shorter."""

NEAR_BOUND = 1.01
"""How long a seed is as a multiple of the bound where the shortest schedule most likely does the same over and over in its middle."""

LENGTHENED_SHARE = 2 / 3
"""The share of a first search that goes into an order of few microbatches, where that can be made longer for many."""

LENGTHENED_TRIES = 3
"""Ways to make it longer that are played, of those with the shortest periods."""

CHECK_SECONDS = 4e-6
"""Seconds for each pass of an answer to check and play it."""

WINDOWS_SECONDS = 1e-5
"""Seconds for each pair of passes on one rank to find a sharper bound by windows; where there is none, it takes a tenth of that."""

WINDOWS_SHARE = 0.1
"""The share of the budget that the bound by windows may take on one placement."""

SECONDS_COUNTED = 5.0
"""Seconds that a budget of evaluations stands for where it is asked what takes a small part of it."""


@dataclass(frozen=True)
class Attempt:
    """What is known of one placement: its best answer so far, and where a search may start."""

    name: str
    solved: Plan
    seeds: tuple[Schedule, ...] = ()
    searched: bool = False
    interrupted: bool = False
    published: tuple[Plan, ...] = ()
    """The published schedules among the seeds, with B and W apart."""
    is_left_out: bool = False
    """Whether the budget is too short for even one schedule here, next to those on other placements."""

    @property
    def can_improve(self) -> bool:
        """Whether a search could still find something."""
        return self.solved.status is Status.FEASIBLE and not self.is_left_out and not self.solved.problem.is_forward_only

    @property
    def has_no_schedule(self) -> bool:
        """Whether there is an answer, but none has been made."""
        return self.can_improve and self.solved.order is None


def paper_heuristics(problem: Problem, seconds: float) -> Iterator[Schedule]:
    """The schedules of the papers' heuristics, of those that have one for `problem`.

    None where that would take more than `seconds`, unless the heuristic is compiled and the problem is of a usual size.
    """
    if problem.num_passes > (max(PASSES_AT_ONCE, seconds * PASSES_PER_SECOND) if isfinite(seconds) else PASSES_WITHOUT_CLOCK):
        if isfinite(seconds) and seconds >= COMPILED_SECONDS and problem.num_passes <= PASSES_WITHOUT_CLOCK and find_spec("llvmlite"):
            from zerobubble.planning.kernels.vee_greedy import vee_greedy

            made = vee_greedy(problem)
            yield from () if made is None else (made,)
        return
    for planner in (zb_v_greedy, zb_heuristic):
        with suppress(InputError):
            yield planner(problem)


def start_attempt(
    name: str, problem: Problem, budget: Budget, seeds: Iterable[Schedule] | None = None, known: Bound | None = None
) -> Attempt:
    """The best of the papers' heuristics and of `seeds` (if not given, the published schedules), until one meets the bound.

    The first is always made, more of them until half of the budget is spent. Where none fits, the attempt has no schedule.
    """
    problem.costs.require_alike("this planner, unlike plan(shares=...),")
    started = perf_counter()
    bound = problem.bound() if known is None else known
    if problem.shortage_reason:
        return Attempt(name, Plan(problem, Status.INFEASIBLE, bound, None, None, perf_counter() - started, "", problem.shortage_reason))
    best = Plan(problem, Status.FEASIBLE, bound, None, None, 0.0, "")
    kept, plain, asked = [], [], lean(problem)
    given = chain(paper_heuristics(asked, budget.for_seeds), promising(asked, budget.for_seeds) if seeds is None else seeds)
    for seed in fitting(_until_deadline(given, started + budget.for_seeds - MAKE_SECONDS * problem.num_passes), problem):
        kept.append(seed)
        solved = Plan.of(problem, bound, seed, perf_counter() - started, seed.name)
        plain += [solved] if seed.name in SCHEDULES else []
        best = shorter(best, solved)
        if best.status is Status.OPTIMAL:
            break
    return Attempt(name, replace(best, seconds=perf_counter() - started), tuple(kept), published=tuple(plain))


def left_out(name: str, problem: Problem, bound: Bound) -> Attempt:
    """An attempt that the budget is too short for: no schedule is made, and the reason says so."""
    reason = f"the budget is too short to make one of its {problem.num_passes:,} passes: give more seconds, or this placement alone"
    return Attempt(name, Plan(problem, Status.FEASIBLE, bound, None, None, 0.0, "", reason), is_left_out=True)


def with_sharper_bound(attempt: Attempt, budget: Budget) -> Attempt:
    """The attempt with the bound by windows, if that is sharper; it may prove the schedule that there is to be optimal.

    Whatever meets the simple bound needs no other. `budget` is what there is for all placements. Compiling counts unless it is done before.
    Raises `InputError` where llvmlite is missing.
    """
    if not attempt.can_improve:
        return attempt
    started, solved = perf_counter(), attempt.solved
    bounded = with_bound(solved, bound_by_windows(solved.problem, solved.bound, budget))
    return replace(attempt, solved=replace(bounded, seconds=solved.seconds + perf_counter() - started))


def bound_by_windows(problem: Problem, known: Bound, budget: Budget) -> Bound:
    """The bound by windows, if it is above the `known` one; where the budget is empty, or small for the passes, that stays."""
    if not budget.lasts_for_windows(problem):
        return known
    from zerobubble.planning.search import load_kernels

    bound: Bound = load_kernels().sharper_bound(problem.without_savings, known)
    if bound.time > known.time and (remark := problem.remark_on_savings):
        bound = bound._replace(reason=f"{bound.reason}, {remark}")
    return bound


def with_bound(solved: Plan, bound: Bound) -> Plan:
    """The answer with a bound on its problem, if that is sharper than the one that it has."""
    if bound.time <= solved.bound.time:
        return solved
    return replace(solved, bound=bound, status=Status.OPTIMAL if solved.time == bound.time else solved.status)


def _until_deadline(seeds: Iterable[Schedule], end: float) -> Iterator[Schedule]:
    """The first of `seeds`, and those that are made while the clock is not past `end`."""
    for seed in seeds:
        yield seed
        if perf_counter() > end:
            return


def with_list_schedule(attempt: Attempt) -> Attempt:
    """The attempt with a schedule of the list scheduler, if it has none yet, or none but seeds that are far from the bound."""
    solved = attempt.solved
    is_far = solved.time is not None and not attempt.searched and solved.time > FAR_FROM_BOUND * solved.bound.time
    return _search(attempt, (), Budget(0.0), 0, None) if attempt.can_improve and (attempt.has_no_schedule or is_far) else attempt


def with_serial_schedule(attempt: Attempt) -> Attempt:
    """The attempt with one microbatch after the other, which fits wherever anything does, if it has no schedule yet."""
    if not attempt.has_no_schedule:
        return attempt
    started, problem = perf_counter(), attempt.solved.problem
    alone = computed_again(serial_schedule(problem.placement, problem.num_microbatches), problem)
    solved = Plan.of(problem, attempt.solved.bound, alone, 0.0, alone.name)
    return replace(attempt, solved=replace(solved, seconds=attempt.solved.seconds + perf_counter() - started))


def with_paired_schedule(attempt: Attempt) -> Attempt:
    """The attempt with a published schedule of overlapped steps, which the search does not make, if one is shorter."""
    solved = attempt.solved
    if attempt.can_improve:
        for made in paired(solved.problem):
            solved = shorter(solved, Plan.of(solved.problem, solved.bound, made, solved.seconds, made.name))
    return replace(attempt, solved=solved)


def improve(attempt: Attempt, budget: Budget, seed: int = 0, on_progress: ProgressCallback | None = None) -> Attempt:
    """The attempt after a search, never worse; checking the answer counts, and so does compiling the search unless it is done before.

    An attempt with a schedule stays as it is where the budget would be over before a better one was checked.
    """
    best = attempt.solved.order
    if budget.is_empty or not attempt.can_improve or (best is not None and not budget.lasts_for_check(attempt.solved.problem)):
        return attempt
    if not attempt.searched:
        attempt, budget = _with_lengthened(attempt, budget, seed)
        best = attempt.solved.order
    if attempt.interrupted or not attempt.can_improve:
        return replace(attempt, searched=True)
    seeds = attempt.seeds if best is None else (best, *attempt.seeds)
    return replace(_search(attempt, seeds, budget, seed, on_progress), searched=True)


def _with_lengthened(attempt: Attempt, budget: Budget, seed: int) -> tuple[Attempt, Budget]:
    """The attempt after a search for few microbatches, whose schedule is made longer, and what is left of the budget.

    Where there are hardly more microbatches than few, and far from the bound, where warm-up and cool-down are most of what is missing
    and depend on the number of microbatches, nothing is done and nothing spent.
    """
    started, solved = perf_counter(), attempt.solved
    few = with_few_microbatches(solved.problem)
    if few is None or solved.time is None or solved.time > NEAR_BOUND * solved.bound.time:
        return attempt, budget
    part = Budget(LENGTHENED_SHARE * budget.seconds, budget.evaluations and int(LENGTHENED_SHARE * budget.evaluations))
    to_check = CHECK_SECONDS * solved.problem.num_passes
    begun = start_attempt(attempt.name, few, part)
    short = improve(begun, part._replace(seconds=part.seconds - to_check - (perf_counter() - started)), seed)
    if short.solved.order is not None:
        for longer in islice(lengthened_by_time(short.solved.schedule, few.costs, solved.problem.num_microbatches), LENGTHENED_TRIES):
            if budget.evaluations is None and perf_counter() - started + to_check > budget.seconds:
                break
            name = f"{short.solved.how} for {few.num_microbatches} microbatches, lengthened"
            solved = shorter(solved, Plan.of(solved.problem, solved.bound, replace(longer, name=name), solved.seconds, name))
            if solved.status is Status.OPTIMAL:
                break
    spent = perf_counter() - started
    left = Budget(max(0.0, budget.seconds - spent), None if budget.evaluations is None else budget.evaluations - (part.evaluations or 0))
    return replace(attempt, solved=replace(solved, seconds=attempt.solved.seconds + spent), interrupted=short.interrupted), left


def _search(attempt: Attempt, seeds: tuple[Schedule, ...], budget: Budget, seed: int, on_progress: ProgressCallback | None) -> Attempt:
    from zerobubble.planning.search import search

    started = perf_counter()
    solved = attempt.solved
    found = search(
        solved.problem,
        solved.bound.time,
        seeds,
        seconds=max(0.0, budget.seconds - CHECK_SECONDS * solved.problem.num_passes),
        seed=seed,
        evaluations=budget.evaluations,
        progress=None if on_progress is None else lambda progress: on_progress(_plan_progress(attempt, progress)),
    )
    name = f"planned by {found.how}"
    before = solved.seconds
    if solved.order is None or found.schedule.rows != solved.schedule.rows:
        solved = shorter(solved, Plan.of(solved.problem, solved.bound, replace(found.schedule, name=name), before, name))
    return replace(attempt, solved=replace(solved, seconds=before + perf_counter() - started), interrupted=found.interrupted)


def _plan_progress(attempt: Attempt, progress: Progress) -> PlanProgress:
    return PlanProgress.of(attempt.name, attempt.solved.problem, progress.time_ns, progress.bound, progress.how)


def shorter(one: Plan, other: Plan) -> Plan:
    """The one with the shorter schedule; of equals the one with the smaller makespan, or else the first."""
    if one.time is None or other.time is None:
        return other if one.time is None else one
    return other if (other.time, other.makespan or 0) < (one.time, one.makespan or 0) else one


def attempt_by_baseline(name: str, baseline: str, problem: Problem, budget: Budget) -> Attempt:
    """What a planner of the papers finds, with the bound that a search within `budget` has; where llvmlite is missing, the simple one.

    It knows nothing of R: where stages compute forwards again, it orders passes that keep little, with R a part of B, and R's are put in
    afterwards. Its seconds are those of that planner alone. Raises `InputError` for an unknown one, and where it has no answer that fits,
    with its reason.
    """
    if baseline not in BASELINES:
        raise InputError(f"there is no baseline {baseline!r}: {near(baseline, BASELINES)}known are {', '.join(BASELINES)}")
    started, bound = perf_counter(), problem.bound()
    schedule = _ordered_by(baseline, problem)
    attempt = Attempt(name, Plan.of(problem, bound, schedule, perf_counter() - started, baseline), searched=True)
    if find_spec("llvmlite") is None:
        return attempt
    bounded = with_sharper_bound(attempt, budget)
    return replace(bounded, solved=replace(bounded.solved, seconds=attempt.solved.seconds))


def _ordered_by(baseline: str, problem: Problem) -> Schedule:
    """The schedule of a planner of the papers, with R's where stages compute again; the first that fits of those for more and less room."""
    if problem.recomputation is None:
        return BASELINES[baseline](problem)
    if problem.shortage_reason:
        raise InputError(problem.shortage_reason)
    schedule = None
    for asked in (lean(problem), with_room_for_again(problem)):
        with suppress(InputError):
            schedule = computed_again(BASELINES[baseline](asked), problem)
            if fits_memory(schedule, problem):
                return schedule
    if schedule is None:
        return computed_again(BASELINES[baseline](lean(problem)), problem)
    raise InputError(f"the schedule of {baseline} with R's holds more than there is room for: give more memory, or leave out the baseline")
