"""Plans by a published planner, which only orders F, B and W."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from time import perf_counter

from zerobubble.errors import InputError, near
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Attempt, Budget, with_sharper_bound
from zerobubble.planning.papers import BASELINES
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.transforms import fits_memory, with_memory_for_recompute, with_recompute_in_backward, with_recompute_passes


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
