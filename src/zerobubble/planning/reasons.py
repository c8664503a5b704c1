"""Why a placement won or lost, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.table import percent
from zerobubble.units import show_ms


def can_beat(solved: Plan, best: Plan) -> bool:
    """Whether the bound of `solved` leaves room below the time of `best`; as rates, to nine digits, because times are rounded to ns.

    The rates are of all work, whatever steps of several passes save: a schedule without idle time may still become shorter by pairs. At
    unequal speeds the work depends on the cut, so times are compared.
    """
    if best.time is None:
        return False
    if solved.problem.has_speeds:
        return solved.bound.time < best.time
    return round(solved.problem.bubble(solved.bound.time), 9) < round(best.problem.bubble(best.time), 9)


def notes(answers: Sequence[tuple[Plan, bool]]) -> list[str]:
    """For each answer, the best first and each with whether it was searched for, why it stands where it does."""
    best, *others = [solved for solved, _ in answers]
    candidates = [other for other in others if other.time is not None]
    unbeaten = bool(candidates) and not any(can_beat(other, best) for other in candidates)
    first = _note(*answers[0])
    if best.status is Status.OPTIMAL and unbeaten:
        first = first.replace(":", ", nor on any other tried:", 1)
    return [first, *(_note_against_winner(best, *answer) for answer in answers[1:])]


def _note_against_winner(best: Plan, solved: Plan, searched: bool) -> str:
    if solved.status is not Status.FEASIBLE or can_beat(solved, best) or best.bubble is None:
        return _note(solved, searched)
    if solved.problem.has_speeds:
        return f"cannot take less than {show_ms(solved.bound.time)}, the winner takes {show_ms(best.time or 0)}: {solved.bound.reason}"
    if round(best.bubble, 9) == 0:
        return "nothing can beat the winner, which has no bubble"
    least, winners = percent(solved.least_bubble), percent(best.bubble)
    if least == winners:
        return f"cannot have a smaller bubble than the winner's {winners}: {solved.bound.reason}"
    return f"cannot have a bubble below {least}, the winner has {winners}: {solved.bound.reason}"


def _note(solved: Plan, searched: bool) -> str:
    if solved.gap is None and solved.status is Status.FEASIBLE:
        return f"no schedule was made, {solved.reason}"
    if solved.gap is None:
        return f"nothing can run: {solved.reason}"
    if solved.status is Status.OPTIMAL:
        return f"nothing on this placement is shorter: {solved.bound.reason}"
    how = "the search ended with" if searched else "without a search it has"
    return f"{how} a {solved.problem.objective} {percent(solved.gap)} over its bound: {solved.bound.reason}"
