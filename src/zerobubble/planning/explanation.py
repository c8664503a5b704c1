"""The plan of a search: its choices with the reasons for their ranks, and the published schedule that is nearly as short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from zerobubble.errors import ScheduleError
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Choice, Plan, Status
from zerobubble.planning.attempt import PASSES_WITHOUT_CLOCK, Attempt
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.ranking import notes
from zerobubble.planning.seeds import ranked_seeds
from zerobubble.schedules import SCHEDULES


def explained(ranked: Sequence[Attempt]) -> tuple[Choice, ...]:
    """The attempts as choices, the best first, with the reason for their rank."""
    reasons = notes([(attempt.plan, attempt.searched) for attempt in ranked])
    return tuple(Choice(a.name, a.plan, note, a.searched) for a, note in zip(ranked, reasons, strict=True))


CLOSE = 0.005
"""A published schedule counts as nearly as short if it is longer by at most this fraction."""

MOST_ASKED = 3
"""Published schedules that are played as published."""


def simple_choice(attempts: Sequence[Attempt]) -> Plan | None:
    """The shortest published schedule that is nearly as short as the best of `attempts`, which are ranked.

    It is simulated as published, with B and W fused if it fuses them. None if there is no such schedule, or if the best one is published as
    it is, with its backward passes neither split nor fused.
    """
    best = attempts[0].plan
    if best.time is None or best.order is None or _is_as_published(best):
        return None
    near = [attempt for attempt in attempts if _is_close(attempt.plan, best)]
    seeds = [plan for attempt in near for plan in (*attempt.published, *_published(attempt))]
    nearest = sorted((plan for plan in seeds if _is_close(plan, best)), key=_length)
    played = chain.from_iterable(_as_published(plan) for plan in nearest[:MOST_ASKED])
    return min((plan for plan in played if _is_close(plan, best)), key=_length, default=None)


def _is_close(plan: Plan, best: Plan) -> bool:
    return plan.time is not None and best.time is not None and plan.time <= (1 + CLOSE) * best.time


def _length(plan: Plan) -> tuple[int, int]:
    return plan.time or 0, plan.makespan or 0


def _published(attempt: Attempt) -> Iterator[Plan]:
    """Makes published schedules for an attempt that has none yet, because its heuristic met the bound."""
    problem = attempt.plan.problem
    if attempt.plan.status is not Status.OPTIMAL or attempt.published or problem.num_passes > PASSES_WITHOUT_CLOCK:
        return
    for schedule in islice(ranked_seeds(problem), MOST_ASKED):
        try:
            yield Plan.from_schedule(problem, attempt.plan.bound, schedule, 0.0, schedule.name)
        except ScheduleError:
            continue


def _is_as_published(plan: Plan) -> bool:
    """Whether a plan is a published schedule as it was published; taken for granted of many passes, which take long to make."""
    problem, name = plan.problem, plan.schedule.name
    return name in SCHEDULES and (problem.num_passes > PASSES_WITHOUT_CLOCK or _made(problem, name).rows == plan.schedule.rows)


def _made(problem: Problem, name: str) -> Schedule:
    """The published schedule for a problem."""
    placement, slices = problem.placement, {"slices": problem.slices} if problem.slices > 1 else {}
    made = SCHEDULES[name].build(placement.num_ranks, problem.whole_microbatches, placement.stages_per_rank, **slices)
    return replace(made, placement=placement)


def _as_published(plan: Plan) -> Iterator[Plan]:
    """The schedule as it was published, if that fits the memory."""
    try:
        yield Plan.from_schedule(plan.problem, plan.bound, _made(plan.problem, plan.how), 0.0, plan.how)
    except ScheduleError:
        return
