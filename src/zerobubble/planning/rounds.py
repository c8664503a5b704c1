"""Rounds of search over candidates.

Successive halving: in each round, the better half of the candidates that can still win is searched with equal parts of the budget. A
candidate whose lower bound is not below the best bubble found cannot win, so dropping it loses nothing. Ctrl-C ends the rounds with the
best so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from time import perf_counter
from typing import Self

from zerobubble.bounds import Bound
from zerobubble.costs import Costs
from zerobubble.planning.attempt import Budget, ProgressCallback, bound_by_windows, with_bound, with_list_schedule
from zerobubble.planning.candidate import Entry
from zerobubble.planning.in_steps import improve_in_steps
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.ranking import rank_key


class CtrlC:
    """A context manager that ends its block on Ctrl-C. `came` says whether that happened."""

    came = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.came = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.came


Grow = Callable[[Sequence[Entry]], Iterable[Entry]]
"""Further entries with choices near those of the best ones of all entries."""


def successive_halving(
    entries: Sequence[Entry],
    budget: Budget,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
    most: int | None = None,
    grow: Grow | None = None,
) -> list[Entry]:
    """The entries after rounds of search, in each of which the better half of those that can still win continues, at first `most`.

    With `grow`, the best entries bring further ones to each round. An entry whose bound is not below the best bubble found is left
    as it is. Ctrl-C ends the rounds.
    """
    known = dict(enumerate(entries))
    with CtrlC() as ctrl_c:
        for place, entry in _search_rounds(known, budget, seed, on_progress, most, grow):
            known[place] = entry
            if entry.attempt.interrupted:
                break
    if ctrl_c.came:
        known[0] = replace(known[0], attempt=replace(known[0].attempt, interrupted=True))
    return list(known.values())


def _search_rounds(
    known: Mapping[int, Entry],
    budget: Budget,
    seed: int,
    on_progress: ProgressCallback | None,
    most: int | None,
    grow: Grow | None,
) -> Iterator[tuple[int, Entry]]:
    """Each entry after its search in a round, with its place; the caller updates `known` with it before the next one.

    The first round takes all that can still win, or `most` of those that have a list schedule already, each later one the better half of
    the round before.
    """
    started, keep = perf_counter(), len(known)
    if keep > 1 and most is None:
        for place, entry in list(known.items()):
            yield place, entry.after(with_list_schedule(entry.attempt))
    keep = keep if most is None else min(keep, most)
    rounds, least = _num_rounds(min(keep, len(open_entries(known))), budget if most is not None else None), 1
    if grow is not None:
        rounds, least = max(rounds, _rounds_of(LEAST_ROUNDS, budget, LEAST_SEARCH_NEAR)), LEAST_KEPT
    keep = max(keep, least)
    for turn in range(rounds):
        for entry in () if grow is None else grow(list(known.values())):
            yield len(known), entry
        left = [place for place in open_entries(known) if turn == 0 or not known[place].candidate.is_compared]
        left = (left if most is None else most_promising(known, left))[:keep]
        for done, place in enumerate(left, turn * len(left)):
            if most is not None and perf_counter() > budget.end(started):
                return
            part = budget.share(rounds * len(left), done, perf_counter() - started)
            yield place, known[place].after(improve_in_steps(known[place].attempt, part, seed + turn, on_progress))
        keep = max(ceil(len(left) / 2), least)


def most_promising(known: Mapping[int, Entry], places: Sequence[int]) -> list[int]:
    """The places of the most promising entries first. Those that would be searched as another one comes behind, as does one without a plan.

    Limits that do not bind, such as two with headroom, make such problems: the search for one finds the orders of the other.
    """
    ranked = sorted(places, key=lambda place: (not known[place].plans, known[place].promise))
    first: dict[tuple[str, Costs, int | None], int] = {}
    for place in ranked:
        plan = known[place].attempt.plan
        first.setdefault((known[place].candidate.name, plan.costs, plan.time), place)
    others = set(ranked).difference(first.values())
    return [*first.values(), *(place for place in ranked if place in others)]


LEAST_ROUNDS, LEAST_KEPT = 4, 2
"""The fewest rounds, and entries in them, if entries bring further ones."""

LEAST_SEARCH, LEAST_SEARCH_NEAR = 250, 50
"""The fewest evaluations of a search that are worth another round, and another round after which entries bring further ones."""


def _num_rounds(count: int, budget: Budget | None) -> int:
    """The rounds until one of `count` entries is left, or fewer if the evaluations of `budget` are few."""
    rounds = max(1, count).bit_length()
    return rounds if budget is None else _rounds_of(rounds, budget, LEAST_SEARCH * max(1, count))


def _rounds_of(rounds: int, budget: Budget, least: int) -> int:
    """This number of rounds, or fewer if the evaluations of `budget` do not last for `least` in each."""
    return rounds if budget.evaluations is None else max(1, min(rounds, budget.evaluations // least))


def open_entries(known: Mapping[int, Entry]) -> list[int]:
    """The places of the entries whose bound leaves a chance to win, the best so far first."""
    ranked = sorted(known, key=lambda place: rank_key(known[place].best))
    best = next((known[place].best for place in ranked if not known[place].candidate.is_compared), None)
    return [place for place in ranked if known[place].can_beat(best)]


def with_sharper_bounds(entries: Sequence[Entry], budget: Budget) -> list[Entry]:
    """The entries in the same order; those that may still win get the window bound if it holds for their plans."""
    left, known = open_entries(dict(enumerate(entries))), dict[Problem, Bound]()
    sharper = list(entries)
    for place in left:
        entry, plan = entries[place], entries[place].attempt.plan
        if all(lift.keeps_bound for lift in entry.candidate.lifts):
            started, same = perf_counter(), plan.problem.at_first_level
            known[same] = known.get(same) or bound_by_windows(plan.problem, plan.bound, budget)
            bounded = replace(with_bound(plan, known[same]), seconds=plan.seconds + perf_counter() - started)
            sharper[place] = entry.after(replace(entry.attempt, plan=bounded))
    return sharper


def compile_search(problems: Sequence[Problem], budget: Budget) -> float:
    """Seconds to compile the search for these problems, 0 if none will run."""
    if budget.is_empty or not problems:
        return 0.0
    from zerobubble.planning.search import compile_kernels

    return compile_kernels(
        recompute=any(problem.recomputes_any for problem in problems),
        steps=any(problem.plans_steps for problem in problems),
        shares=any(problem.costs.shares for problem in problems),
    )
