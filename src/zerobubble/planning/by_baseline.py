"""Plans by a published planner, which only orders F, B and W. Other axes, such as recompute levels, are applied to its order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from time import perf_counter

from zerobubble.costs import FULL, NONE, Level
from zerobubble.errors import InputError, near
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.attempt import Attempt, Budget, bound_by_windows, shorter, with_bound, with_sharper_bound
from zerobubble.planning.papers import BASELINES
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.recomputation import level_choices
from zerobubble.planning.recompute.plan import RecomputeSavings, with_levels
from zerobubble.planning.recompute.reduction import with_less_recompute
from zerobubble.planning.rounds import rank_key
from zerobubble.planning.transforms import fits_memory, with_memory_for_recompute, with_recompute_in_backward, with_recompute_passes
from zerobubble.planning.unequal.plan import plan_unequal, with_equal_microbatches


def plan_by_baseline(
    baseline: str, problems: Mapping[str, Problem], budget: Budget, seed: int, offered: Sequence[Level] = ()
) -> tuple[list[Attempt], tuple[RecomputeSavings, ...]]:
    """The plans of a published planner on the placements it supports, and the savings of recomputation if levels are `offered`.

    The planner treats microbatches as equal. Unequal microbatches are then assigned to the best positions in its order. It cannot order
    R's, so it runs once for each choice of levels, with R as a part of B. Unneeded R's are then removed.

    Raises `InputError` with the planner's reason if it finds no schedule for any placement.
    """
    attempts: list[Attempt] = []
    all_answers: list[Plan] = []
    refusals: list[InputError] = []
    for name, problem in problems.items():
        answers: list[Plan] = []
        for levels in level_choices(problem.placement, offered) if offered else [()]:
            try:
                answers.append(_answer(baseline, problem, tuple(offered), levels, budget, seed))
            except InputError as error:
                refusals.append(error)
        all_answers += answers
        if answers:
            best = answers[0]
            for answer in answers[1:]:
                best = shorter(best, answer)
            attempts.append(Attempt(name, best, searched=True))
    if not attempts:
        raise refusals[0]
    if not offered:
        return attempts, ()
    chosen = min(attempts, key=rank_key).plan
    full = _best([answer for answer in all_answers if all(level.name == FULL.name for level in answer.levels)])
    without = _best([answer for answer in all_answers if all(level == NONE for level in answer.levels)])
    return attempts, (RecomputeSavings(without or _without(baseline, problems, budget, seed), full, chosen),)


def _answer(baseline: str, problem: Problem, offered: tuple[Level, ...], levels: Sequence[Level], budget: Budget, seed: int) -> Plan:
    """The planner's answer if stages have these levels of those offered; none if none are offered."""
    nothing = budget.emptied
    given = with_equal_microbatches(problem, offered) if problem.costs.shares else problem
    given = with_levels(given, offered, *levels) if levels else given
    plan = attempt_by_baseline(given.placement.name, baseline, given, budget).plan
    if problem.costs.shares:
        plan = plan_unequal(problem, plan, nothing, seed)
        plan = with_bound(plan, bound_by_windows(plan.problem, plan.bound, budget))
    return with_less_recompute(plan, nothing, seed)


def _without(baseline: str, problems: Mapping[str, Problem], budget: Budget, seed: int) -> Plan:
    """The planner's answer without recomputation; a plan with a reason if there is none."""
    found: list[Plan] = []
    for problem in problems.values():
        with suppress(InputError):
            found.append(_answer(baseline, problem, (NONE,), (NONE,), budget, seed))
    if found:
        return min(found, key=lambda one: one.time or 0)
    problem = with_levels(next(iter(problems.values())), (NONE,), NONE)
    reason = problem.shortage_reason or f"{baseline} has no order that fits"
    return Plan(problem, Status.INFEASIBLE, problem.bound(), None, None, 0.0, baseline, reason)


def _best(answers: Sequence[Plan]) -> Plan | None:
    return min(answers, key=lambda one: one.time or 0, default=None)


def attempt_by_baseline(name: str, baseline: str, problem: Problem, budget: Budget) -> Attempt:
    """The plan of a published planner, with the bound of a search within `budget`, or the simple bound without llvmlite.

    It cannot order R's: if stages recompute, it orders passes that keep little, with R as a part of B, and the R's are inserted later. The
    seconds of the result are those of that planner alone.

    Raises `InputError` for an unknown planner, and with its reason if it has no answer that fits.
    """
    if baseline not in BASELINES:
        remedy = f"{near(baseline, BASELINES)}known are {', '.join(BASELINES)}"
        raise InputError("there is no baseline {got!v}", argument="baseline", got=baseline, expected=tuple(BASELINES), remedy=remedy)
    started, bound = perf_counter(), problem.bound()
    schedule = _ordered_by(baseline, problem)
    attempt = Attempt(name, Plan.from_schedule(problem, bound, schedule, perf_counter() - started, baseline), searched=True)
    if find_spec("llvmlite") is None:
        return attempt
    bounded = with_sharper_bound(attempt, budget)
    return replace(bounded, plan=replace(bounded.plan, seconds=attempt.plan.seconds))


def _ordered_by(baseline: str, problem: Problem) -> Schedule:
    """The schedule of a planner of the papers, with R's if stages recompute: with all the memory, or else with headroom for R."""
    if problem.recomputation is None:
        return BASELINES[baseline](problem)
    if problem.shortage_reason:
        raise InputError(problem.shortage_reason)
    schedule = None
    for reduced in (with_recompute_in_backward(problem), with_memory_for_recompute(problem)):
        with suppress(InputError):
            schedule = with_recompute_passes(BASELINES[baseline](reduced), problem)
            if fits_memory(schedule, problem):
                return schedule
    if schedule is None:
        return with_recompute_passes(BASELINES[baseline](with_recompute_in_backward(problem)), problem)
    raise InputError(
        "the schedule of {baseline} with R's exceeds the memory limits",
        baseline=baseline,
        remedy="give more memory, or leave out the baseline",
    )
