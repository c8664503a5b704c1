"""Plans with recomputation, in three steps of growing freedom.

1. Plans without recomputation, if it is optional.

2. Tries levels that are the same on all ranks: one for their first stages, one for their second stages, and so on, with R right before B.
Each choice gets a first schedule, and the best are searched.

3. Searches from the best of these, with R's of any forwards, at any position and level (`reduction`).

Every step keeps the best plan so far, and the bounds hold for every choice of levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

from zerobubble.bounds import Bound
from zerobubble.costs import FULL, NONE, Level
from zerobubble.ir import Kind, Op, Placement
from zerobubble.planning.answer import Plan, Saving, Status
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
from zerobubble.planning.problem.recomputation import Recomputation, level_choices
from zerobubble.planning.recompute.reduction import with_less_recompute
from zerobubble.planning.rounds import CtrlC, compile_search, rank_key, successive_halving
from zerobubble.planning.search import compile_kernels
from zerobubble.planning.weight_order import with_weights_ordered
from zerobubble.units import counted, ms, show_ms, show_percent


@dataclass(frozen=True, repr=False)
class RecomputeSavings(Saving):
    """The savings of recomputation: the best plan `without` it, the best with `full` recomputation, and the `chosen` one.

    Either of the first two may have no schedule, and `full` is None if it was not available.
    """

    axis = "recomputation"

    without: Plan
    full: Plan | None
    chosen: Plan

    def _summary(self) -> str:
        full = [] if self.full is None or self.full is self.chosen else [f"with full recomputation {_figures(self.full)}"]
        parts = [f"without R {_figures(self.without)}", *full]
        if self.chosen.order is None:
            return "; ".join(parts)
        if not _recompute_passes(self.chosen):
            return "; ".join([f"nothing is recomputed, the plan takes {_figures(self.chosen)}", *full])
        levels = ", ".join(f"{name} for {counted(count, 'forward')}" for name, count in self._forwards().items())
        return "; ".join([*parts, f"the plan ({levels}) {_figures(self.chosen)}{self._gain()}"])

    def __str__(self) -> str:
        return f"Savings of recomputation: {self._summary()}."

    def _gain(self) -> str:
        if not self.without.time or self.chosen.time is None:
            return ""
        gain = 1 - self.chosen.time / self.without.time
        return f", {show_percent(abs(gain))} {'less' if gain >= 0 else 'more'} time than without R"

    def _forwards(self) -> dict[str, int]:
        """Number of forwards with each level."""
        recomputation, problem = self.chosen.problem.recomputation, self.chosen.problem
        assert recomputation is not None
        counts = {level.name: 0 for level in recomputation.offered}
        for op in _recompute_passes(self.chosen):
            counts[recomputation.chosen[op.stage].name] += 1
        counts[NONE.name] = problem.placement.num_stages * problem.num_microbatches - sum(counts.values())
        return {name: count for name, count in counts.items() if count}

    def to_dict(self) -> dict[str, Any]:
        """The figures in JSON: the forwards of each level, and the times and memory of all three plans."""
        return {
            "forwards": self._forwards() if self.chosen.order is not None else {},
            "without": _figures_dict(self.without),
            "full": self.full and _figures_dict(self.full),
            "chosen": _figures_dict(self.chosen),
        }


def _figures(plan: Plan) -> str:
    if plan.time is None:
        return f"nothing fits ({plan.reason})"
    work = plan.problem.work / plan.problem.placement.num_ranks
    ratio = f" = {plan.time / work:.3f} x the work of a rank" if work else ""
    return f"{show_ms(plan.time)}{ratio} in the memory of {_microbatches(plan)}"


def _microbatches(plan: Plan) -> str:
    """Peak memory of the fullest rank, in microbatches of all that its forwards save."""
    peak = plan.peak_microbatches or 0.0
    return f"{peak:.4g} microbatch{'' if f'{peak:.4g}' == '1' else 'es'}"


def _figures_dict(plan: Plan) -> dict[str, Any]:
    work = plan.problem.work / plan.problem.placement.num_ranks
    return {
        "placement": plan.problem.placement.name,
        "time_ms": None if plan.time is None else ms(plan.time),
        "over_work": None if plan.time is None or not work else plan.time / work,
        "peak_bytes": list(plan.peaks),
        "reason": plan.reason,
    }


def _recompute_passes(plan: Plan) -> list[Op]:
    return [] if plan.order is None else [op for row in plan.schedule.rows for op in row if op.kind is Kind.R]


WITHOUT, WITH, REDUCED = 0.25, 0.35, 0.4
"""Shares of the budget: plans without recomputation, with levels by stage of the rank, and with R's anywhere."""

SHORT_LIST, OF_ONE = 9, 3
"""Choices of levels that are searched after a first schedule of each, on all placements and on one."""

SEARCHED_FURTHER = 2
"""Attempts that get a search with R's anywhere."""


class Recomputed(NamedTuple):
    """The best attempt on each placement, the savings of recomputation, and the seconds spent compiling the search."""

    attempts: list[Attempt]
    savings: RecomputeSavings
    compiling: float


def plan_recomputing(
    problems: Mapping[str, Problem], offered: Sequence[Level], budget: Budget, seed: int = 0, on_progress: ProgressCallback | None = None
) -> Recomputed:
    """The best attempts at `problems` (by name of placement, without recomputation) with the levels `offered`.

    If `NONE` is offered, none is slower than what the first part of the budget finds without recomputation.
    """
    is_free, levels, begun = NONE in offered, tuple(offered), perf_counter()
    plain = {name: with_levels(problem, levels if is_free else (NONE,), NONE) for name, problem in problems.items()}
    is_quick = not budget.lasts_for_slack(sum(problem.num_passes for problem in plain.values()))
    started = [
        start_attempt(name, problem, budget.part(WITHOUT).share(len(plain)), known=problem.bound(is_quick))
        for name, problem in plain.items()
    ]
    compiling = compile_search(started, budget)
    started = [with_sharper_bound(attempt, budget) for attempt in started]
    without = _searched(started, budget.part(WITHOUT), seed, on_progress)
    best_without = min(without, key=rank_key)
    if is_free and (best_without.plan.status is Status.OPTIMAL or best_without.interrupted):
        return Recomputed(without, RecomputeSavings(best_without.plan, None, best_without.plan), compiling)
    found, pool = [], without if is_free else []
    with CtrlC() as ctrl_c:
        compiling += 0.0 if budget.is_empty else compile_kernels(recompute=True)
        windows = {attempt.name: attempt.plan.bound for attempt in started if is_free and attempt.can_improve}
        bounds = {name: with_levels(problem, levels, levels[0]).bound(is_quick) for name, problem in problems.items()}
        begun += compiling
        short_list = _short_list(problems, levels, budget, bounds, windows, budget.part(WITHOUT + WITH).end(begun))
        found = _searched(short_list, budget.part(WITH), seed, on_progress)
        pool = [*pool, *found]
        pool = [*pool, *_with_less_recompute(pool, budget.part(REDUCED), seed, budget.end(begun))]
    if not pool:
        raise KeyboardInterrupt
    full = min((attempt for attempt in found if _is_full(attempt.plan.problem)), key=rank_key, default=None)
    best = [_best_on(name, problem.placement, pool) for name, problem in problems.items()]
    attempts = [replace(attempt, interrupted=attempt.interrupted or ctrl_c.came) for attempt in best]
    chosen = min(attempts, key=rank_key).plan
    return Recomputed(attempts, RecomputeSavings(best_without.plan, None if full is None else full.plan, chosen), compiling)


def with_levels(problem: Problem, offered: tuple[Level, ...], *by_stage: Level) -> Problem:
    """The problem with these levels of its stages, one for each or the same for all."""
    chosen = by_stage if len(by_stage) > 1 else by_stage * problem.placement.num_stages
    recomputation = Recomputation(offered, chosen)
    return replace(problem, costs=problem.costs.with_recompute(chosen), recomputation=recomputation)


def _searched(attempts: Sequence[Attempt], budget: Budget, seed: int, on_progress: ProgressCallback | None) -> list[Attempt]:
    """The attempts after successive halving within the budget, each with a schedule if anything fits."""
    found = list(attempts) if budget.is_empty else successive_halving(attempts, budget, seed, on_progress)
    served = [with_serial_schedule(attempt) for attempt in found]
    return [replace(attempt, plan=with_weights_ordered(attempt.plan)) for attempt in served]


def _short_list(
    problems: Mapping[str, Problem],
    offered: tuple[Level, ...],
    budget: Budget,
    bounds: Mapping[str, Bound],
    windows: Mapping[str, Bound],
    end: float,
) -> list[Attempt]:
    """The choices of levels with the best first schedules, and full recomputation in addition.

    A placement on which none fits has the level with the least memory, with the reason. `bounds` hold for all levels, and `windows` are the
    window bounds that are known, both by placement. After `end`
    of `perf_counter`, only the choice with the least memory is tried on each placement.
    """
    listed: list[Attempt] = []
    for place, (name, problem) in enumerate(problems.items()):
        now = perf_counter()
        until = now + max(0.0, end - now) / (len(problems) - place)
        here = _list_until(until, name, problem, offered, budget, bounds[name])
        here = _with_one_bound(here, budget, windows.get(name))
        fitting = [attempt for attempt in here if attempt.plan.status is not Status.INFEASIBLE and attempt.plan.problem.recomputes_any]
        listed += fitting or here[:1]
    ranked = sorted(listed, key=rank_key)
    firsts = [attempt for attempt in ranked if sum(other.name == attempt.name for other in ranked[: ranked.index(attempt)]) < OF_ONE]
    kept = firsts[:SHORT_LIST]
    kept += [attempt for attempt in firsts if attempt.name not in {other.name for other in kept}]
    in_full = next((attempt for attempt in ranked if _is_full(attempt.plan.problem)), None)
    kept += [in_full] if in_full is not None and in_full not in kept else []
    return [_with_seeds(attempt, budget.share(len(kept))) for attempt in kept]


def _list_until(until: float, name: str, problem: Problem, offered: tuple[Level, ...], budget: Budget, bound: Bound) -> list[Attempt]:
    """First schedules with the choices of levels on one placement, at least one."""
    listed: list[Attempt] = []
    for levels in level_choices(problem.placement, offered):
        if listed and perf_counter() > until:
            break
        listed.append(_listed(name, with_levels(problem, offered, *levels), budget, bound))
    return listed


def _listed(name: str, problem: Problem, budget: Budget, bound: Bound) -> Attempt:
    """A first schedule: of the list scheduler, or the serial one without a budget."""
    if problem.shortage_reason:
        return Attempt(name, Plan(problem, Status.INFEASIBLE, bound, None, None, 0.0, "", problem.shortage_reason))
    attempt = Attempt(name, Plan(problem, Status.FEASIBLE, bound, None, None, 0.0, ""))
    return with_serial_schedule(attempt if budget.is_empty else with_list_schedule(attempt))


def _with_one_bound(attempts: Sequence[Attempt], budget: Budget, known: Bound | None) -> list[Attempt]:
    """The attempts on one placement with the window bound, computed once unless it is `known`, since it holds for all levels."""
    feasible = next((attempt.plan for attempt in attempts if attempt.can_improve), None)
    if feasible is None:
        return list(attempts)
    bound = known or bound_by_windows(feasible.problem, feasible.bound, budget)
    return [replace(attempt, plan=with_bound(attempt.plan, bound)) if attempt.can_improve else attempt for attempt in attempts]


def _with_seeds(attempt: Attempt, budget: Budget) -> Attempt:
    """The attempt with published schedules as seeds, under a name that lists its levels."""
    problem = attempt.plan.problem
    recomputation = problem.recomputation
    assert recomputation is not None
    name = f"{attempt.name} with {'+'.join(dict.fromkeys(level.name for level in recomputation.chosen))}"
    seeded = start_attempt(name, problem, budget.part(WITH), known=attempt.plan.bound)
    return replace(seeded, plan=shorter(attempt.plan, seeded.plan))


def _with_less_recompute(attempts: Iterable[Attempt], budget: Budget, seed: int, end: float) -> list[Attempt]:
    """The attempts with less recomputation, those before `end`; the best of them after a search with R's anywhere."""
    ranked = [attempt for attempt in sorted(attempts, key=rank_key) if attempt.plan.order is not None]
    reduced: list[Attempt] = []
    for place, attempt in enumerate(ranked):
        if reduced and perf_counter() > end:
            break
        part = budget.share(SEARCHED_FURTHER) if place < SEARCHED_FURTHER else budget.emptied
        reduced.append(replace(attempt, plan=with_less_recompute(attempt.plan, part, seed, attempt.seeds)))
    return reduced


def _is_full(problem: Problem) -> bool:
    """Whether every stage recomputes in full."""
    return problem.recomputation is not None and all(level.name == FULL.name for level in problem.recomputation.chosen)


def _best_on(name: str, placement: Placement, pool: Sequence[Attempt]) -> Attempt:
    """The best attempt on a placement, under its name; if nothing fits, the last one, which has the reason."""
    here = [attempt for attempt in pool if attempt.plan.problem.placement == placement]
    feasible = [attempt for attempt in here if attempt.plan.order is not None]
    return replace(min(feasible, key=rank_key) if feasible else here[-1], name=name)
