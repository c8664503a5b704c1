"""Plans with recomputation: without it, with one level for each leg of a microbatch with R right before B, and then with R's anywhere and
of any forwards and levels that pay, in the best of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zerobubble.bounds import Bound
from zerobubble.costs import FULL, NONE, Level
from zerobubble.ir import Placement
from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.attempt import (
    Attempt,
    Budget,
    ProgressCallback,
    bound_by_windows,
    shorter,
    start_attempt,
    with_bound,
    with_list_schedule,
    with_serial_schedule,
    with_sharper_bound,
)
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.recomputation import Recomputation, choices_by_leg
from zerobubble.planning.recompute.lighter import lightened
from zerobubble.planning.recompute.savings import RecomputeSavings
from zerobubble.planning.rounds import CtrlC, compile_search, rank_key, successive_halving
from zerobubble.planning.search import compile_kernels
from zerobubble.planning.weight_order import with_weights_ordered

WITHOUT, WITH, LIGHTER = 0.25, 0.35, 0.4
"""The shares of the budget: plans without recomputation, those with levels by leg, and R's wherever they pay in the best of these."""

SHORT_LIST, OF_ONE = 9, 3
"""How many choices of levels are searched after a first schedule of each, on all placements and on one."""

LIGHTENED = 2
"""How many are searched on with R's where they pay."""


class Recomputed(NamedTuple):
    """The best attempt on each placement, the savings of recomputation, and the seconds that it took to compile the search."""

    attempts: list[Attempt]
    savings: RecomputeSavings
    compiling: float


def plan_recomputing(
    problems: Mapping[str, Problem], offered: Sequence[Level], budget: Budget, seed: int = 0, on_progress: ProgressCallback | None = None
) -> Recomputed:
    """The best attempts at `problems`, which know nothing of recomputation, with the levels `offered`, by the name of their placement.

    Where `NONE` is offered, none is slower than what the first part of the budget finds without recomputation.
    """
    is_free, levels = NONE in offered, tuple(offered)
    plain = {name: with_levels(problem, levels if is_free else (NONE,), NONE) for name, problem in problems.items()}
    started = [start_attempt(name, problem, budget.part(WITHOUT).share(len(plain))) for name, problem in plain.items()]
    compiling = compile_search(started, budget)
    started = [with_sharper_bound(attempt, budget) for attempt in started]
    without = _searched(started, budget.part(WITHOUT), seed, on_progress)
    best_without = min(without, key=rank_key)
    if is_free and (best_without.solved.status is Status.OPTIMAL or best_without.interrupted):
        return Recomputed(without, RecomputeSavings(best_without.solved, None, best_without.solved), compiling)
    found, pool = [], without if is_free else []
    with CtrlC() as ctrl_c:
        compiling += 0.0 if budget.is_empty else compile_kernels(again=True)
        known = {attempt.name: attempt.solved.bound for attempt in started if is_free and attempt.can_improve}
        found = _searched(_short_list(problems, levels, budget, known), budget.part(WITH), seed, on_progress)
        pool = [*pool, *found]
        pool = [*pool, *_lightened(pool, budget.part(LIGHTER), seed)]
    if not pool:
        raise KeyboardInterrupt
    full = min((attempt for attempt in found if _is_full(attempt.solved.problem)), key=rank_key, default=None)
    best = [_best_on(name, problem.placement, pool) for name, problem in problems.items()]
    attempts = [replace(attempt, interrupted=attempt.interrupted or ctrl_c.came) for attempt in best]
    chosen = min(attempts, key=rank_key).solved
    return Recomputed(attempts, RecomputeSavings(best_without.solved, None if full is None else full.solved, chosen), compiling)


def with_levels(problem: Problem, offered: tuple[Level, ...], *by_stage: Level) -> Problem:
    """The problem with the levels of its stages, one for each or the same for all."""
    chosen = by_stage if len(by_stage) > 1 else by_stage * problem.placement.num_stages
    again = Recomputation(offered, chosen)
    return replace(problem, costs=problem.costs.with_recompute(chosen), recomputation=again)


def _searched(attempts: Sequence[Attempt], budget: Budget, seed: int, on_progress: ProgressCallback | None) -> list[Attempt]:
    """The attempts after a competition within the budget, each with some schedule if anything fits."""
    found = list(attempts) if budget.is_empty else successive_halving(attempts, budget, seed, on_progress)
    served = [with_serial_schedule(attempt) for attempt in found]
    return [replace(attempt, solved=with_weights_ordered(attempt.solved)) for attempt in served]


def _short_list(problems: Mapping[str, Problem], offered: tuple[Level, ...], budget: Budget, known: Mapping[str, Bound]) -> list[Attempt]:
    """The choices of levels by leg that come first with a schedule at once, and full recomputation in addition.

    A placement on which none fits has the leanest, with the reason. `known` are bounds by windows, by placement.
    """
    listed: list[Attempt] = []
    for name, problem in problems.items():
        here = [_listed(name, with_levels(problem, offered, *levels), budget) for levels in choices_by_leg(problem.placement, offered)]
        here = _with_one_bound(here, budget, known.get(name))
        fitting = [attempt for attempt in here if attempt.solved.status is not Status.INFEASIBLE and any(_again(attempt.solved.problem))]
        listed += fitting if fitting else here[:1]
    ranked = sorted(listed, key=rank_key)
    firsts = [attempt for attempt in ranked if sum(other.name == attempt.name for other in ranked[: ranked.index(attempt)]) < OF_ONE]
    kept = firsts[:SHORT_LIST]
    kept += [attempt for attempt in firsts if attempt.name not in {other.name for other in kept}]
    in_full = next((attempt for attempt in ranked if _is_full(attempt.solved.problem)), None)
    kept += [in_full] if in_full is not None and in_full not in kept else []
    return [_with_seeds(attempt, budget.share(len(kept))) for attempt in kept]


def _listed(name: str, problem: Problem, budget: Budget) -> Attempt:
    """A first schedule: of the list scheduler, or one microbatch after the other where nothing is to be searched."""
    bound = problem.bound()
    if problem.shortage_reason:
        return Attempt(name, Plan(problem, Status.INFEASIBLE, bound, None, None, 0.0, "", problem.shortage_reason))
    attempt = Attempt(name, Plan(problem, Status.FEASIBLE, bound, None, None, 0.0, ""))
    return with_serial_schedule(attempt if budget.is_empty else with_list_schedule(attempt))


def _with_one_bound(attempts: Sequence[Attempt], budget: Budget, known: Bound | None) -> list[Attempt]:
    """The attempts on one placement with the bound by windows, worked out once unless it is `known`: it holds for whatever levels."""
    able = next((attempt.solved for attempt in attempts if attempt.can_improve), None)
    if able is None:
        return list(attempts)
    bound = known or bound_by_windows(able.problem, able.bound, budget)
    return [replace(attempt, solved=with_bound(attempt.solved, bound)) if attempt.can_improve else attempt for attempt in attempts]


def _with_seeds(attempt: Attempt, budget: Budget) -> Attempt:
    """The attempt with the published schedules to start from, under a name that lists its levels."""
    problem = attempt.solved.problem
    again = problem.recomputation
    assert again is not None
    name = f"{attempt.name} with {'+'.join(dict.fromkeys(level.name for level in again.chosen))}"
    seeded = start_attempt(name, problem, budget.part(WITH), known=attempt.solved.bound)
    return replace(seeded, solved=shorter(attempt.solved, seeded.solved))


def _lightened(attempts: Iterable[Attempt], budget: Budget, seed: int) -> list[Attempt]:
    """The attempts with less computed again, the best of them searched on with R's wherever they pay."""
    ranked = [attempt for attempt in sorted(attempts, key=rank_key) if attempt.solved.order is not None]
    nothing = budget.emptied
    parts = [budget.share(LIGHTENED)] * LIGHTENED + [nothing] * len(ranked)
    answers = [lightened(attempt.solved, part, seed, attempt.seeds) for attempt, part in zip(ranked, parts, strict=False)]
    return [replace(attempt, solved=solved) for attempt, solved in zip(ranked, answers, strict=True)]


def _again(problem: Problem) -> list[bool]:
    """By stage, whether forwards are computed again."""
    return [problem.recomputes(stage) for stage in range(problem.placement.num_stages)]


def _is_full(problem: Problem) -> bool:
    """Whether every stage computes all again."""
    return problem.recomputation is not None and all(level.name == FULL.name for level in problem.recomputation.chosen)


def _best_on(name: str, placement: Placement, pool: Sequence[Attempt]) -> Attempt:
    """The best attempt on a placement, under its name; where nothing fits, the last, which says what the leanest levels lack."""
    here = [attempt for attempt in pool if attempt.solved.problem.placement == placement]
    able = [attempt for attempt in here if attempt.solved.order is not None]
    return replace(min(able, key=rank_key) if able else here[-1], name=name)
