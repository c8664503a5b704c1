"""Recomputation as an axis: levels that are the same on all ranks are tried, then the search places R's anywhere.

A candidate has one level for the first stages of the ranks, one for their second stages, and so on, with R right before B. R's that memory
makes unnecessary are removed, and the best candidates get a search with R's of any forwards, at any position and level (`reduction`).
Bounds hold for every choice of levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from zerobubble.costs import FULL, NONE, Level
from zerobubble.ir import Kind, Op
from zerobubble.planning.answer import Plan, Saving
from zerobubble.planning.axes.axis import ChoicesOfAxis, Contest
from zerobubble.planning.candidate import Candidate, Effort, Lift, unopened
from zerobubble.planning.problem.recomputation import level_choices
from zerobubble.planning.ranking import rank_key
from zerobubble.planning.recompute.reduction import with_less_recompute
from zerobubble.units import counted, ms, show_ms, show_percent

NAME = "recompute"

ANYWHERE = 0.4
"""Share of the budget for the search with R's anywhere."""


@dataclass(frozen=True)
class RecomputeChoices(ChoicesOfAxis):
    """The levels `offered`, of which forwards may have any."""

    offered: tuple[Level, ...]

    def choices(self, candidate: Candidate) -> Iterator[Candidate]:
        problem, target = candidate.problem, candidate.target
        if NONE not in self.offered:
            plain = candidate.choose(NAME, NONE.name, problem.offering((NONE,), NONE), target.offering((NONE,), NONE))
            yield replace(plain, is_compared=True)
        target = target.offering(self.offered, self.offered[0])
        for levels in level_choices(problem.placement, self.offered):
            label = levels[0].name if len({*levels}) == 1 else ""
            lift = Lift(_with_less, ANYWHERE, keeps_bound=True)
            yield candidate.choose(NAME, label, problem.offering(self.offered, *levels), target, lift)

    def finish(self, found: Plan, contest: Contest) -> Plan:
        answers = contest.on_device
        without = min((plan for plan in answers if not _recompute_passes(plan)), key=rank_key, default=None)
        without = without or _nothing_without(found, contest)
        full = min((plan for plan in answers if _is_full(plan)), key=rank_key, default=None)
        chosen = replace(found, choices=(), savings=(), simple=None)
        return replace(found, savings=(RecomputeSavings(without, full, chosen), *found.savings))


DOES_NOT_FIT = "no schedule without R was found that fits"


def _nothing_without(found: Plan, contest: Contest) -> Plan:
    """A plan without a schedule and without R, with the reason."""
    opened = [entry.best for entry in contest.entries if entry.candidate.label(NAME) == NONE.name]
    plan = opened[0] if opened else _unopened_without(found, contest)
    return replace(plan, order=None, time=None, makespan=None, reason=plan.reason or DOES_NOT_FIT)


def _unopened_without(found: Plan, contest: Contest) -> Plan:
    """The plan of a candidate without R. Where none fits, there may be too many candidates to list one."""
    for candidate in contest.candidates_with(found):
        if candidate.label(NAME) == NONE.name:
            plan = unopened(candidate, contest.bound(candidate.target)).best
            return replace(plan, reason=candidate.problem.shortage_reason)
    first = contest.entries[0]
    problem = first.candidate.problem.offering((NONE,), NONE)
    return replace(unopened(first.candidate, first.bound).best, problem=problem, reason=problem.shortage_reason)


def _with_less(plan: Plan, effort: Effort) -> Iterable[Plan]:
    """The plan with less recomputation; one that recomputes in full stays, too, for comparison."""
    less = with_less_recompute(plan, effort.budget, effort.seed, effort.others)
    return (less, plan) if _is_full(plan) and less is not plan else (less,)


def _is_full(plan: Plan) -> bool:
    """Whether every stage recomputes in full."""
    return plan.problem.recomputation is not None and all(level.name == FULL.name for level in plan.levels)


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
