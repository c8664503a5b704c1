"""The simple choice: a published schedule that comes as close as the one that was planned, and needs no file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from zerobubble.errors import ScheduleError
from zerobubble.planning.attempt import PASSES_WITHOUT_CLOCK, Attempt
from zerobubble.planning.problem.problem import Solved, Status
from zerobubble.planning.reasons import percent
from zerobubble.planning.seeds import promising
from zerobubble.schedules import SCHEDULES

CLOSE = 0.005
"""How much longer a schedule may take and still be as close."""

MOST_ASKED = 3
"""How many schedules are played as they were published."""


def simple_choice(attempts: Sequence[Attempt]) -> Solved | None:
    """The shortest published schedule that takes hardly longer than the best of `attempts`, which come in their order.

    It is played as it was published, with B and W in one pass where it has them so. None where there is none, and where the best is one.
    """
    best = attempts[0].solved
    if best.time is None or best.schedule is None or best.schedule.name in SCHEDULES:
        return None
    near = [attempt for attempt in attempts if _is_close(attempt.solved, best)]
    seeds = [solved for attempt in near for solved in (*attempt.published, *_beside_heuristics(attempt))]
    nearest = sorted((solved for solved in seeds if _is_close(solved, best)), key=_length)
    played = chain.from_iterable(_as_published(solved) for solved in nearest[:MOST_ASKED])
    return min((solved for solved in played if _is_close(solved, best)), key=_length, default=None)


def _is_close(solved: Solved, best: Solved) -> bool:
    return solved.time is not None and best.time is not None and solved.time <= (1 + CLOSE) * best.time


def _length(solved: Solved) -> tuple[int, int]:
    return solved.time or 0, solved.makespan or 0


def _beside_heuristics(attempt: Attempt) -> Iterator[Solved]:
    """Published schedules where a heuristic of the papers met the bound, so that none was asked for."""
    problem = attempt.solved.problem
    if attempt.solved.status is not Status.OPTIMAL or attempt.published or problem.num_passes > PASSES_WITHOUT_CLOCK:
        return
    for schedule in islice(promising(problem), MOST_ASKED):
        try:
            yield Solved.of(problem, attempt.solved.bound, schedule, 0.0, schedule.name)
        except ScheduleError:
            continue


def _as_published(solved: Solved) -> Iterator[Solved]:
    """The schedule with its passes as they were published, if it fits the memory so."""
    problem, name = solved.problem, solved.how
    placement = problem.placement
    made = SCHEDULES[name].build(placement.num_ranks, problem.num_microbatches, placement.stages_per_rank)
    try:
        yield Solved.of(problem, solved.bound, replace(made, placement=placement), 0.0, name)
    except ScheduleError:
        return


def simple_choice_text(simple: Solved, best: Solved) -> str:
    """What it costs to be simple, in a sentence."""
    assert simple.time is not None
    assert simple.timeline is not None
    assert best.time is not None
    problem = simple.problem
    longer = percent(simple.time / best.time - 1 if best.time else 0.0)
    than = "as short as the winner" if longer == percent(0) else f"{longer} longer than the winner"
    bubbles = f"span bubble {percent(simple.timeline.bubble_span)}, makespan bubble {percent(simple.timeline.bubble_makespan)}"
    open_stages = SCHEDULES[simple.how].any_stages
    stages = f" --stages-per-rank {problem.placement.stages_per_rank}" if open_stages else ""
    shape = f"--ranks {problem.placement.num_ranks} --microbatches {problem.num_microbatches}{stages}"
    return (
        f"Simple choice: {simple.how}, a published schedule, is {than} ({bubbles}) and needs no file: zerobubble show {simple.how} {shape}"
    )
