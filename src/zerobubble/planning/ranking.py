"""How plans are ranked, and the sentence that explains each rank."""

from __future__ import annotations

from collections.abc import Sequence

from zerobubble.planning.answer import Plan, Status
from zerobubble.units import show_ms, show_percent


def can_beat(plan: Plan, best: Plan) -> bool:
    """Whether the bound of `plan` is below the time of `best`; compared as bubble rates to nine digits, since times are rounded to ns.

    The rates count all work and ignore the savings of combined steps: a schedule without idle time may still become shorter by overlap.
    Where the work itself is a choice, times are compared.
    """
    if best.time is None:
        return False
    if plan.problem.work_varies:
        return plan.bound.time < best.time
    return round(plan.problem.bubble(plan.bound.time), 9) < round(best.problem.bubble(best.time), 9)


def notes(answers: Sequence[tuple[Plan, bool]]) -> list[str]:
    """Returns a sentence on the rank of each plan. `plans` are sorted, best first, each with whether it was searched for."""
    best, *others = [plan for plan, _ in answers]
    candidates = [other for other in others if other.time is not None]
    unbeaten = bool(candidates) and not any(can_beat(other, best) for other in candidates)
    first = _note(*answers[0])
    if best.status is Status.OPTIMAL and unbeaten:
        first = first.replace(":", ", nor on any other tried:", 1)
    return [first, *(_note_against_winner(best, *answer) + _after_a_tie(best, answer[0]) for answer in answers[1:])]


def _note_against_winner(best: Plan, plan: Plan, searched: bool) -> str:
    if plan.status is not Status.FEASIBLE or can_beat(plan, best) or best.bubble is None:
        return _note(plan, searched)
    if plan.problem.work_varies:
        return f"cannot take less than {show_ms(plan.bound.time)}, the winner takes {show_ms(best.time or 0)}: {plan.bound.reason}"
    if round(best.bubble, 9) == 0:
        return "nothing can beat the winner, which has no bubble"
    least, winners = show_percent(plan.least_bubble), show_percent(best.bubble)
    if least == winners:
        return f"cannot have a smaller bubble than the winner's {winners}: {plan.bound.reason}"
    return f"cannot have a bubble below {least}, the winner has {winners}: {plan.bound.reason}"


def _after_a_tie(best: Plan, plan: Plan) -> str:
    """The reason why `plan` ranks after an equally short winner: the first difference in their keys.

    Empty if it is longer, or if all keys are equal.
    """
    won, lost = (rank_key(each) for each in (best, plan))
    if best.time is None or won[0] != lost[0] or won >= lost:
        return ""
    differences = (
        f"it has {lost[1]:,} messages instead of {won[1]:,}",
        f"it has {lost[2]:,} stages instead of {won[2]:,}",
        f"its makespan is {show_ms((plan.makespan or 0) - (best.makespan or 0))} longer",
        f"its peak is {lost[4]:.4g} microbatches instead of {won[4]:.4g}",
    )
    decided = next(text for text, one, other in zip(differences, won[1:], lost[1:], strict=True) if one < other)
    return f"; its step is as short as the winner's, but {decided}"


def _note(plan: Plan, searched: bool) -> str:
    if plan.gap is None and plan.status is Status.FEASIBLE:
        return f"no schedule was made, {plan.reason}"
    if plan.gap is None:
        return f"nothing can run: {plan.reason}"
    if plan.status is Status.OPTIMAL:
        return f"nothing on this placement is shorter: {plan.bound.reason}"
    how = "the search ended with" if searched else "without a search it has"
    return f"{how} a {plan.problem.objective} {show_percent(plan.gap)} over its bound: {plan.bound.reason}"


def rank_key(plan: Plan) -> tuple[float, int, int, float, float]:
    """Sort key: bubble to nine digits, messages, stages, bubble of the makespan, memory.

    Where the work is a choice, times replace bubbles.
    """
    if plan.time is None or plan.makespan is None or plan.peak_microbatches is None:
        return float("inf"), 0, 0, 0.0, 0.0
    problem = plan.problem
    times: tuple[float, float] = (plan.time, plan.makespan)
    if not problem.work_varies:  # of the same work whatever steps save: shorter means smaller
        times = (round(problem.bubble(plan.time), 9), round(problem.bubble(plan.makespan), 9))
    return times[0], problem.messages, problem.placement.num_stages, times[1], plan.peak_microbatches
