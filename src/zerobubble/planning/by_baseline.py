"""Plans by a published planner, which takes no axis into account: it orders the passes, and what it ignores is applied to its order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from zerobubble.costs import FULL, NONE, Level
from zerobubble.errors import InputError
from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.attempt import Attempt, Budget, attempt_by_baseline, bound_by_windows, shorter, with_bound
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.recomputation import choices_by_leg
from zerobubble.planning.recompute.lighter import lightened
from zerobubble.planning.recompute.plan import with_levels
from zerobubble.planning.recompute.savings import RecomputeSavings
from zerobubble.planning.rounds import rank_key
from zerobubble.planning.unequal.plan import alike, unequal


def plan_by_baseline(
    baseline: str, problems: Mapping[str, Problem], budget: Budget, seed: int, offered: Sequence[Level] = ()
) -> tuple[list[Attempt], tuple[RecomputeSavings, ...]]:
    """The answers of a published planner on the placements it has one for, and what recomputation saved them where levels are `offered`.

    Microbatches of unequal cost are alike to it: then they take the best places of its order. It knows no R: it is asked with R a part of
    B, for each choice of levels by leg, and what need not be computed again is left alone. Raises its reason when it has no answer for any.
    """
    attempts: list[Attempt] = []
    all_answers: list[Plan] = []
    refusals: list[InputError] = []
    for name, problem in problems.items():
        answers: list[Plan] = []
        for levels in choices_by_leg(problem.placement, offered) if offered else [()]:
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
    chosen = min(attempts, key=rank_key).solved
    full = _best([answer for answer in all_answers if all(level.name == FULL.name for level in answer.levels)])
    without = _best([answer for answer in all_answers if all(level == NONE for level in answer.levels)])
    return attempts, (RecomputeSavings(without or _without(baseline, problems, budget, seed), full, chosen),)


def _answer(baseline: str, problem: Problem, offered: tuple[Level, ...], levels: Sequence[Level], budget: Budget, seed: int) -> Plan:
    """The planner's answer where stages have these levels of those offered, none where none are offered."""
    nothing = budget.emptied
    given = alike(problem, offered) if problem.costs.shares else problem
    given = with_levels(given, offered, *levels) if levels else given
    solved = attempt_by_baseline(given.placement.name, baseline, given, budget).solved
    if problem.costs.shares:
        solved = unequal(problem, solved, nothing, seed)
        solved = with_bound(solved, bound_by_windows(solved.problem, solved.bound, budget))
    return lightened(solved, nothing, seed)


def _without(baseline: str, problems: Mapping[str, Problem], budget: Budget, seed: int) -> Plan:
    """The planner's answer where nothing is computed again; one that says why where it has none."""
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
