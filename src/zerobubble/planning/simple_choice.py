"""The simple choice: a published schedule that comes as close as the one that was planned, and needs no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from zerobubble.errors import ScheduleError
from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.attempt import PASSES_WITHOUT_CLOCK, Attempt
from zerobubble.planning.seeds import promising
from zerobubble.schedules import SCHEDULES

CLOSE = 0.005
"""How much longer a schedule may take and still be as close."""

MOST_ASKED = 3
"""How many schedules are played as they were published."""


def simple_choice(attempts: Sequence[Attempt]) -> Plan | None:
    """The shortest published schedule that takes hardly longer than the best of `attempts`, which come in their order.

    It is played as it was published, with B and W in one pass where it has them so. None where there is none, and where the best is one.
    """
    best = attempts[0].solved
    if best.time is None or best.order is None or best.schedule.name in SCHEDULES:
        return None
    near = [attempt for attempt in attempts if _is_close(attempt.solved, best)]
    seeds = [solved for attempt in near for solved in (*attempt.published, *_beside_heuristics(attempt))]
    nearest = sorted((solved for solved in seeds if _is_close(solved, best)), key=_length)
    played = chain.from_iterable(_as_published(solved) for solved in nearest[:MOST_ASKED])
    return min((solved for solved in played if _is_close(solved, best)), key=_length, default=None)


def _is_close(solved: Plan, best: Plan) -> bool:
    return solved.time is not None and best.time is not None and solved.time <= (1 + CLOSE) * best.time


def _length(solved: Plan) -> tuple[int, int]:
    return solved.time or 0, solved.makespan or 0


def _beside_heuristics(attempt: Attempt) -> Iterator[Plan]:
    """Published schedules where a heuristic of the papers met the bound, so that none was asked for."""
    problem = attempt.solved.problem
    if attempt.solved.status is not Status.OPTIMAL or attempt.published or problem.num_passes > PASSES_WITHOUT_CLOCK:
        return
    for schedule in islice(promising(problem), MOST_ASKED):
        try:
            yield Plan.of(problem, attempt.solved.bound, schedule, 0.0, schedule.name)
        except ScheduleError:
            continue


def _as_published(solved: Plan) -> Iterator[Plan]:
    """The schedule with its passes as they were published, if it fits the memory so."""
    problem, name = solved.problem, solved.how
    placement = problem.placement
    made = SCHEDULES[name].build(placement.num_ranks, problem.num_microbatches, placement.stages_per_rank)
    try:
        yield Plan.of(problem, solved.bound, replace(made, placement=placement), 0.0, name)
    except ScheduleError:
        return
