"""Rounds of search over several attempts, of which the better ones go on, until the budget is spent or Ctrl-C ends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from time import perf_counter
from typing import Self

from zerobubble.planning.attempt import Attempt, Budget, ProgressCallback, with_list_schedule, with_sharper_bound
from zerobubble.planning.in_steps import improve_in_steps
from zerobubble.planning.reasons import can_beat


class CtrlC:
    """Ends the block under it at Ctrl-C; afterwards `came` says whether it did."""

    came = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.came = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.came


def successive_halving(
    attempts: Sequence[Attempt], budget: Budget, seed: int = 0, on_progress: ProgressCallback | None = None
) -> list[Attempt]:
    """The attempts after rounds of search, in each of which the better half of those that can still win goes on.

    An attempt whose bound is not below the best bubble found cannot win; it stays as it is. Ctrl-C ends the competition.
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
    """Each attempt after it was searched in a round; the caller puts it into `known` before the next one is asked for.

    The first round takes all that can still win, each later one the better half of the round before.
    """
    started, keep = perf_counter(), len(known)
    if keep > 1:
        yield from map(with_list_schedule, list(known.values()))
    rounds = max(1, len(contenders(known.values()))).bit_length()
    for turn in range(rounds):
        left = contenders(known.values())[:keep]
        for done, attempt in enumerate(left, turn * len(left)):
            yield improve_in_steps(attempt, budget.share(rounds * len(left), done, perf_counter() - started), seed + turn, on_progress)
        keep = ceil(len(left) / 2)


def contenders(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Those whose search may still give the winner, the best so far first."""
    ranked = sorted(attempts, key=rank_key)
    best = ranked[0].solved
    return [attempt for attempt in ranked if attempt.can_improve and (best.time is None or can_beat(attempt.solved, best))]


def with_sharper_bounds(attempts: Sequence[Attempt], budget: Budget) -> list[Attempt]:
    """The attempts, in the same order; those whose search may still give the winner with the bounds by windows."""
    left = {attempt.name for attempt in contenders(attempts)}
    return [with_sharper_bound(attempt, budget) if attempt.name in left else attempt for attempt in attempts]


def rank_key(attempt: Attempt) -> tuple[float, float, int, float]:
    """Less is better: the bubble to nine digits, then that of the makespan, then messages, then memory. At unequal speeds, times count."""
    solved = attempt.solved
    if solved.time is None or solved.makespan is None or solved.peak_microbatches is None:
        return float("inf"), 0.0, 0, 0.0
    if solved.problem.has_speeds:
        return solved.time, solved.makespan, solved.problem.messages, solved.peak_microbatches
    of_makespan = solved.problem.bubble(solved.makespan)  # of the same work whatever steps save, so that a shorter one has less
    return round(solved.problem.bubble(solved.time), 9), round(of_makespan, 9), solved.problem.messages, solved.peak_microbatches


def compile_search(attempts: Sequence[Attempt], budget: Budget) -> float:
    """Seconds to compile the search, 0 where none will run."""
    if budget.is_empty or not any(attempt.can_improve for attempt in attempts):
        return 0.0
    from zerobubble.planning.search import compile_kernels

    return compile_kernels(steps=any(attempt.solved.problem.plans_steps for attempt in attempts))
