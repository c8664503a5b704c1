"""Rounds of search over placements, and how their plans are ranked and explained.

Successive halving: in each round, the better half of the attempts that can still win is searched with equal parts of the budget. An attempt
whose lower bound is not below the best bubble found cannot win, so dropping it loses nothing. Ctrl-C ends the rounds with the best so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from time import perf_counter
from typing import Self

from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.attempt import Attempt, Budget, ProgressCallback, with_list_schedule, with_sharper_bound
from zerobubble.planning.in_steps import improve_in_steps
from zerobubble.units import show_ms, show_percent


def can_beat(plan: Plan, best: Plan) -> bool:
    """Whether the bound of `plan` is below the time of `best`; compared as bubble rates to nine digits, since times are rounded to ns.

    The rates count all work and ignore the savings of combined steps: a schedule without idle time may still become shorter by overlap.
    With unequal speeds the work depends on the cut, so times are compared.
    """
    if best.time is None:
        return False
    if plan.problem.has_speeds:
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
    if plan.problem.has_speeds:
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
    won, lost = (rank_key(Attempt("", each)) for each in (best, plan))
    if best.time is None or won[0] != lost[0] or won >= lost:
        return ""
    differences = (
        f"its makespan is {show_ms((plan.makespan or 0) - (best.makespan or 0))} longer",
        f"it has {lost[2]:,} messages instead of {won[2]:,}",
        f"its peak is {lost[3]:.4g} microbatches instead of {won[3]:.4g}",
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


class CtrlC:
    """A context manager that ends its block on Ctrl-C. `came` says whether that happened."""

    came = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.came = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.came


def successive_halving(
    attempts: Sequence[Attempt], budget: Budget, seed: int = 0, on_progress: ProgressCallback | None = None
) -> list[Attempt]:
    """The attempts after rounds of search, in each of which the better half of those that can still win continues.

    An attempt whose bound is not below the best bubble found is left as it is. Ctrl-C ends the rounds.
    """
    known = {attempt.name: attempt for attempt in attempts}
    with CtrlC() as ctrl_c:
        for attempt in _search_rounds(known, budget, seed, on_progress):
            known[attempt.name] = attempt
            if attempt.interrupted:
                break
    found = list(known.values())
    return [replace(found[0], interrupted=True), *found[1:]] if ctrl_c.came else found


def _search_rounds(known: Mapping[str, Attempt], budget: Budget, seed: int, on_progress: ProgressCallback | None) -> Iterator[Attempt]:
    """Each attempt after its search in a round; the caller updates `known` with it before the next one.

    The first round takes all that can still win, each later one the better half of the round before.
    """
    started, keep = perf_counter(), len(known)
    if keep > 1:
        yield from map(with_list_schedule, list(known.values()))
    rounds = max(1, len(open_attempts(known.values()))).bit_length()
    for turn in range(rounds):
        left = open_attempts(known.values())[:keep]
        for done, attempt in enumerate(left, turn * len(left)):
            yield improve_in_steps(attempt, budget.share(rounds * len(left), done, perf_counter() - started), seed + turn, on_progress)
        keep = ceil(len(left) / 2)


def open_attempts(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The attempts whose bound leaves a chance to win, the best so far first."""
    ranked = sorted(attempts, key=rank_key)
    best = ranked[0].plan
    return [attempt for attempt in ranked if attempt.can_improve and (best.time is None or can_beat(attempt.plan, best))]


def with_sharper_bounds(attempts: Sequence[Attempt], budget: Budget) -> list[Attempt]:
    """The attempts in the same order; those that may still win get the window bound."""
    left = {attempt.name for attempt in open_attempts(attempts)}
    return [with_sharper_bound(attempt, budget) if attempt.name in left else attempt for attempt in attempts]


def rank_key(attempt: Attempt) -> tuple[float, float, int, float]:
    """Sort key: bubble to nine digits, bubble of the makespan, messages, memory. With unequal speeds, times replace bubbles."""
    plan = attempt.plan
    if plan.time is None or plan.makespan is None or plan.peak_microbatches is None:
        return float("inf"), 0.0, 0, 0.0
    if plan.problem.has_speeds:
        return plan.time, plan.makespan, plan.problem.messages, plan.peak_microbatches
    of_makespan = plan.problem.bubble(plan.makespan)  # of the same work whatever steps save: shorter means smaller
    return round(plan.problem.bubble(plan.time), 9), round(of_makespan, 9), plan.problem.messages, plan.peak_microbatches


def compile_search(attempts: Sequence[Attempt], budget: Budget) -> float:
    """Seconds to compile the search, 0 if none will run."""
    if budget.is_empty or not any(attempt.can_improve for attempt in attempts):
        return 0.0
    from zerobubble.planning.search import compile_kernels

    return compile_kernels(steps=any(attempt.plan.problem.plans_steps for attempt in attempts))
