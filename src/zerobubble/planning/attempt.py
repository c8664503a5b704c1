"""The search on one placement, in stages of increasing effort, and the budget that it may spend.

An `Attempt` holds the state of the search on one placement. It starts with the best published schedule and the papers' heuristics
(`start_attempt`), may get a sharper bound (`with_sharper_bound`), and is then improved by the compiled search (`improve`). Each step
returns an attempt that is at least as good. Every answer is verified and played in plain Python before it counts, so an error in a kernel
can cost quality, never correctness.

With many microbatches, the search first orders few of them and lengthens that schedule (`lengthening`). An evaluation
plays every pass, so a good order of few microbatches is found much sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, islice
from math import ceil, isfinite
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from zerobubble.arguments import wrong
from zerobubble.bounds import Bound
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.kernels import load_kernels
from zerobubble.planning.lengthening import extend_by_simulation, with_few_microbatches
from zerobubble.planning.papers.zb_heuristic import zb_heuristic
from zerobubble.planning.papers.zb_v_greedy import zb_v_greedy
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.seeds import MAKE_SECONDS, fit_to_memory, overlapped_seeds, ranked_seeds, serial_schedule
from zerobubble.planning.transforms import with_recompute_in_backward, with_recompute_passes
from zerobubble.schedules import SCHEDULES

if TYPE_CHECKING:
    from zerobubble.planning.search import Progress


class PlanProgress(NamedTuple):
    """Progress of the search on a placement: its bubble, its gap from the bound, and what found it."""

    placement: str
    bubble: float
    gap: float
    how: str

    @classmethod
    def for_problem(cls, placement: str, problem: Problem, time: int, bound: int, how: str) -> PlanProgress:
        """The progress of a search whose best schedule for `problem` takes `time`, with `bound` as its lower bound, both in ns."""
        return cls(placement, problem.bubble(time), time / bound - 1 if bound else 0.0, how)


ProgressCallback = Callable[[PlanProgress], None]
"""Called with the progress of a search whenever it improves."""


class Budget(NamedTuple):
    """The budget of a search: `seconds`, or a number of `evaluations` (schedules played), which makes the result deterministic."""

    seconds: float
    evaluations: int | None = None

    @property
    def is_empty(self) -> bool:
        return self.seconds <= 0 if self.evaluations is None else self.evaluations <= 0

    @property
    def emptied(self) -> Budget:
        """An empty budget of the same unit."""
        return Budget(0.0, None if self.evaluations is None else 0)

    def part(self, share: float) -> Budget:
        """This share of the budget."""
        return Budget(share * self.seconds, None if self.evaluations is None else int(share * self.evaluations))

    def share(self, parts: int, done: int = 0, spent: float = 0.0) -> Budget:
        """One of `parts` equal parts. Seconds are divided among the parts left after `done` parts took `spent`."""
        return Budget(max(0.0, self.seconds - spent) / (parts - done), None if self.evaluations is None else self.evaluations // parts)

    def end(self, started: float) -> float:
        """When the seconds are over that began at `started` of `perf_counter`; infinite if the clock must not decide."""
        return float("inf") if self.evaluations is not None or self.is_empty else started + self.seconds

    @property
    def for_seeds(self) -> float:
        """Seconds for making seeds; infinite if the clock must not decide."""
        return float("inf") if self.evaluations is not None or self.is_empty else self.seconds / 2

    def lasts_for_seeds(self, passes: int) -> bool:
        """Whether half of the budget suffices to make schedules with this many passes; always true if the clock must not decide."""
        return self.evaluations is not None or self.is_empty or FIRST_SECONDS * passes <= self.seconds / 2

    def lasts_for_first(self, passes: int) -> bool:
        """Whether the budget suffices to make the only schedule, of this many passes; always true if the clock must not decide."""
        return self.evaluations is not None or self.is_empty or FIRST_SECONDS * passes <= FIRST_SHARE * self.seconds

    def lasts_for_bounds(self, ranks: int) -> bool:
        """Whether bounds of placements with this many ranks in all take a small part of the budget."""
        return self.evaluations is not None or self.is_empty or BOUND_SECONDS * ranks <= BOUND_SHARE * self.seconds

    @classmethod
    def for_first_schedules(cls, passes: int) -> Budget:
        """The least whole seconds, half of which suffice to make schedules with this many passes."""
        return cls(float(ceil(2 * FIRST_SECONDS * passes)))

    def enough_for_search(self, spent: float, passes: Sequence[int]) -> int:
        """Whole seconds that suffice for first schedules, which took `spent`, and to search and check one of these passes each.

        0 if this budget lasts, if it is empty, or if the clock must not decide.
        """
        rounds = len(passes).bit_length()
        needed = 2 * spent + 2 * rounds * CHECK_SECONDS * sum(passes)
        if self.evaluations is not None or self.is_empty or needed <= self.seconds:
            return 0
        return max(ceil(needed), int(self.for_first_schedules(sum(passes)).seconds))

    def lasts_for_check(self, problem: Problem) -> bool:
        """Whether there is time for more than checking an answer; always true if the clock must not decide."""
        return self.evaluations is not None or self.seconds > CHECK_SECONDS * problem.num_passes

    def lasts_for_slack(self, passes: int) -> bool:
        """Whether the bounds with recomputation of this many passes take a small part of the budget; always true if the clock must not
        decide.
        """
        return self.evaluations is not None or self.is_empty or SLACK_SECONDS * passes <= SLACK_SHARE * self.seconds

    def lasts_for_windows(self, problem: Problem) -> bool:
        """Whether the window bound takes at most a small part of the budget, or of `SECONDS_COUNTED` if the clock must not decide."""
        seconds = self.seconds if self.evaluations is None else SECONDS_COUNTED
        pairs = problem.num_passes**2 / problem.placement.num_ranks
        return not self.is_empty and WINDOWS_SECONDS * pairs <= WINDOWS_SHARE * seconds


SECONDS = 5.0
"""Default seconds to search."""


def as_budget(seconds: float | None, evaluations: int | None) -> Budget:
    """The budget, by default `SECONDS`; raises `InputError` if it is negative or not finite, and for both kinds of it."""
    if seconds is not None and evaluations is not None:
        raise InputError("{argument} and {other} contradict each other", argument="evaluations", other="seconds", remedy="give one")
    for name, value in (("seconds", seconds), ("evaluations", evaluations)):
        if value is not None and (not isfinite(value) or value < 0):
            raise wrong(name, value, "a finite number >= 0")
    return Budget(SECONDS if seconds is None else seconds, evaluations)


FIRST_SECONDS = 6e-6
"""Seconds per pass to make, check and play a placement's first schedule."""

FIRST_SHARE = 0.8
"""Share of a short budget that the only schedule may take; bounds and checks follow."""

BOUND_SECONDS, BOUND_SHARE = 1.5e-3, 0.1
"""Seconds per rank to bound a placement, and the share of a short budget that bounds may take before the first schedule."""

PASSES_AT_ONCE = 3_500
"""Passes that the papers' heuristics order in about a tenth of a second, which is always allowed."""

COMPILED_SECONDS = 0.4
"""Seconds in which the compiled heuristic orders `PASSES_WITHOUT_CLOCK` passes."""

PASSES_WITHOUT_CLOCK = 60_000
"""If the clock must not decide, heuristics run for at most this many passes, which takes some seconds."""

PASSES_PER_SECOND = 30_000
"""Passes that the heuristics order in a second."""

FAR_FROM_BOUND = 1.3
"""If a seed is longer than the bound by this factor, one run of the list scheduler may well be shorter."""

NEAR_BOUND = 1.01
"""If a seed is within this factor of the bound, the shortest schedule most likely has a steady state."""

LENGTHENED_SHARE = 2 / 3
"""Share of a first search for a schedule of few microbatches that is then lengthened."""

LENGTHENED_TRIES = 3
"""Lengthened schedules that are played: those with the shortest periods."""

CHECK_SECONDS = 4e-6
"""Seconds per pass to check and play an answer."""

SLACK_SECONDS, SLACK_SHARE = 1.2e-4, 0.3
"""Seconds per pass to compute the slack bound, and the share of the budget that it may take on all placements."""

WINDOWS_SECONDS = 1e-5
"""Seconds per pair of passes on one rank to compute the window bound; a tenth of that if it finds nothing."""

WINDOWS_SHARE = 0.1
"""Share of the budget that the window bound may take on one placement."""

SECONDS_COUNTED = 5.0
"""Seconds that a budget of evaluations stands for when deciding what is affordable."""


@dataclass(frozen=True)
class Attempt:
    """The state of the search on one placement: its best plan so far, and the seeds."""

    name: str
    plan: Plan
    seeds: tuple[Schedule, ...] = ()
    searched: bool = False
    interrupted: bool = False
    published: tuple[Plan, ...] = ()
    """Published schedules among the seeds, with B and W split."""
    is_left_out: bool = False
    """Whether the budget is too short to make even one schedule here, given the other placements."""

    @property
    def can_improve(self) -> bool:
        """Whether a search could still find a shorter schedule."""
        return self.plan.status is Status.FEASIBLE and not self.is_left_out and not self.plan.problem.is_forward_only

    @property
    def has_no_schedule(self) -> bool:
        """Whether a schedule may exist but none was made yet."""
        return self.can_improve and self.plan.order is None


def paper_heuristics(problem: Problem, seconds: float) -> Iterator[Schedule]:
    """The schedules of the papers' heuristics that apply to `problem`; none apply to slices.

    None if that takes more than `seconds`, unless the heuristic is compiled and the problem is of a usual size.
    """
    if problem.slices > 1:
        return
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
    """The best of the papers' heuristics and `seeds` (by default the published schedules), until one meets the bound.

    The first is always made, further ones until half of the budget is spent. If none fits, the attempt has no schedule.
    """
    problem.costs.require_equal("this planner, unlike plan(shares=...),")
    started = perf_counter()
    bound = problem.bound() if known is None else known
    if problem.shortage_reason:
        return Attempt(name, Plan(problem, Status.INFEASIBLE, bound, None, None, perf_counter() - started, "", problem.shortage_reason))
    best = Plan(problem, Status.FEASIBLE, bound, None, None, 0.0, "")
    kept, plain, asked = [], [], with_recompute_in_backward(problem)
    given = chain(paper_heuristics(asked, budget.for_seeds), ranked_seeds(asked, budget.for_seeds) if seeds is None else seeds)
    for seed in fit_to_memory(_until_deadline(given, started + budget.for_seeds - MAKE_SECONDS * problem.num_passes), problem):
        kept.append(seed)
        plan = Plan.from_schedule(problem, bound, seed, perf_counter() - started, seed.name)
        plain += [plan] if seed.name in SCHEDULES else []
        best = shorter(best, plan)
        if best.status is Status.OPTIMAL:
            break
    return Attempt(name, replace(best, seconds=perf_counter() - started), tuple(kept), published=tuple(plain))


def left_out(name: str, problem: Problem, bound: Bound, enough: float) -> Attempt:
    """An attempt for which the budget is too short: it has no schedule, and the reason says so, with the seconds `enough` for all."""
    needed = f"give {enough:g} s for all placements, or name this one alone"
    reason = f"the budget is too short for a schedule of {problem.num_passes:,} passes: {needed}"
    return Attempt(name, Plan(problem, Status.FEASIBLE, bound, None, None, 0.0, "", reason), is_left_out=True)


def with_sharper_bound(attempt: Attempt, budget: Budget) -> Attempt:
    """The attempt with the window bound if that is sharper, which may prove its schedule optimal.

    A schedule that meets the simple bound needs no other. `budget` is that of all placements. Compilation counts unless it was done before.
    Raises `InputError` if llvmlite is missing.
    """
    if not attempt.can_improve:
        return attempt
    started, plan = perf_counter(), attempt.plan
    bounded = with_bound(plan, bound_by_windows(plan.problem, plan.bound, budget))
    return replace(attempt, plan=replace(bounded, seconds=plan.seconds + perf_counter() - started))


def bound_by_windows(problem: Problem, known: Bound, budget: Budget) -> Bound:
    """The window bound if it is above the `known` one; `known` if the budget is empty or too small for the problem, and for slices."""
    if problem.slices > 1 or not budget.lasts_for_windows(problem):
        return known
    bound: Bound = load_kernels().sharper_bound(problem.without_savings, known)
    if bound.time > known.time and (remark := problem.remark_on_savings):
        bound = bound._replace(reason=f"{bound.reason}, {remark}")
    return bound


def with_bound(plan: Plan, bound: Bound) -> Plan:
    """The plan with this bound, if it is sharper than its own."""
    if bound.time <= plan.bound.time:
        return plan
    return replace(plan, bound=bound, status=Status.OPTIMAL if plan.time == bound.time else plan.status)


def _until_deadline(seeds: Iterable[Schedule], end: float) -> Iterator[Schedule]:
    """The first of `seeds`, and further ones until the clock passes `end`."""
    for seed in seeds:
        yield seed
        if perf_counter() > end:
            return


def with_list_schedule(attempt: Attempt) -> Attempt:
    """Adds a schedule of the list scheduler, if there is none yet or only seeds far from the bound."""
    plan = attempt.plan
    is_far = plan.time is not None and not attempt.searched and plan.time > FAR_FROM_BOUND * plan.bound.time
    return _search(attempt, (), Budget(0.0), 0, None) if attempt.can_improve and (attempt.has_no_schedule or is_far) else attempt


def with_serial_schedule(attempt: Attempt) -> Attempt:
    """Adds the serial schedule, which fits if anything does, if there is none yet."""
    if not attempt.has_no_schedule:
        return attempt
    started, problem = perf_counter(), attempt.plan.problem
    alone = with_recompute_passes(serial_schedule(problem.placement, problem.num_microbatches, problem.slices), problem)
    plan = Plan.from_schedule(problem, attempt.plan.bound, alone, 0.0, alone.name)
    return replace(attempt, plan=replace(plan, seconds=attempt.plan.seconds + perf_counter() - started))


def with_paired_schedule(attempt: Attempt) -> Attempt:
    """Adds the shortest published schedule with overlapped steps, which the search does not make, if it is shorter."""
    plan = attempt.plan
    if attempt.can_improve:
        for made in overlapped_seeds(plan.problem):
            plan = shorter(plan, Plan.from_schedule(plan.problem, plan.bound, made, plan.seconds, made.name))
    return replace(attempt, plan=plan)


def improve(attempt: Attempt, budget: Budget, seed: int = 0, on_progress: ProgressCallback | None = None) -> Attempt:
    """The attempt after a search, never worse. Checking the answer counts. Compilation counts unless it was done before.

    An attempt with a schedule is returned unchanged if the budget would end before a better one was checked.
    """
    best = attempt.plan.order
    if budget.is_empty or not attempt.can_improve or (best is not None and not budget.lasts_for_check(attempt.plan.problem)):
        return attempt
    if not attempt.searched:
        attempt, budget = _with_lengthened(attempt, budget, seed)
        best = attempt.plan.order
    if attempt.interrupted or not attempt.can_improve:
        return replace(attempt, searched=True)
    seeds = attempt.seeds if best is None else (best, *attempt.seeds)
    return replace(_search(attempt, seeds, budget, seed, on_progress), searched=True)


def _with_lengthened(attempt: Attempt, budget: Budget, seed: int) -> tuple[Attempt, Budget]:
    """Searches a schedule of few microbatches and lengthens it. Returns the attempt and the remaining budget.

    Does nothing if the problem has hardly more microbatches, or if its schedule is far from the bound. Warm-up and cool-down then dominate,
    and they depend on the number of microbatches.
    """
    started, plan = perf_counter(), attempt.plan
    few = with_few_microbatches(plan.problem)
    if few is None or plan.time is None or plan.time > NEAR_BOUND * plan.bound.time:
        return attempt, budget
    part = Budget(LENGTHENED_SHARE * budget.seconds, budget.evaluations and int(LENGTHENED_SHARE * budget.evaluations))
    to_check = CHECK_SECONDS * plan.problem.num_passes
    begun = start_attempt(attempt.name, few, part)
    short = improve(begun, part._replace(seconds=part.seconds - to_check - (perf_counter() - started)), seed)
    if short.plan.order is not None:
        for longer in islice(extend_by_simulation(short.plan.schedule, few.costs, plan.problem.num_microbatches), LENGTHENED_TRIES):
            if budget.evaluations is None and perf_counter() - started + to_check > budget.seconds:
                break
            name = f"{short.plan.how} for {few.num_microbatches} microbatches, lengthened"
            plan = shorter(plan, Plan.from_schedule(plan.problem, plan.bound, replace(longer, name=name), plan.seconds, name))
            if plan.status is Status.OPTIMAL:
                break
    spent = perf_counter() - started
    left = Budget(max(0.0, budget.seconds - spent), None if budget.evaluations is None else budget.evaluations - (part.evaluations or 0))
    return replace(attempt, plan=replace(plan, seconds=attempt.plan.seconds + spent), interrupted=short.interrupted), left


def _search(attempt: Attempt, seeds: tuple[Schedule, ...], budget: Budget, seed: int, on_progress: ProgressCallback | None) -> Attempt:
    from zerobubble.planning.search import search

    started = perf_counter()
    plan = attempt.plan
    found = search(
        plan.problem,
        plan.bound.time,
        seeds,
        seconds=max(0.0, budget.seconds - CHECK_SECONDS * plan.problem.num_passes),
        seed=seed,
        evaluations=budget.evaluations,
        progress=None if on_progress is None else lambda progress: on_progress(_plan_progress(attempt, progress)),
    )
    name = f"planned by {found.how}"
    before = plan.seconds
    if plan.order is None or found.schedule.rows != plan.schedule.rows:
        plan = shorter(plan, Plan.from_schedule(plan.problem, plan.bound, replace(found.schedule, name=name), before, name))
    return replace(attempt, plan=replace(plan, seconds=before + perf_counter() - started), interrupted=found.interrupted)


def _plan_progress(attempt: Attempt, progress: Progress) -> PlanProgress:
    return PlanProgress.for_problem(attempt.name, attempt.plan.problem, progress.time_ns, progress.bound, progress.how)


def shorter(one: Plan, other: Plan) -> Plan:
    """Returns the plan with the shorter schedule. If both are equally short, the one with the smaller makespan wins, then the first."""
    if one.time is None or other.time is None:
        return other if one.time is None else one
    return other if (other.time, other.makespan or 0) < (one.time, one.makespan or 0) else one
