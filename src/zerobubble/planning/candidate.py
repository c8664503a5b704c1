"""Candidates of a plan: a problem on one placement with one choice of each axis, and the state of the search for it.

The search orders passes for a smaller problem, such as stages without their divided head. `Lift`s turn its plans into plans of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import NamedTuple

from zerobubble.bounds import Bound
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Plan, Status
from zerobubble.planning.attempt import Attempt, Budget, with_bound
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.ranking import can_beat, rank_key
from zerobubble.planning.seeds import fit_to_memory, ranked_seeds, serial_schedule
from zerobubble.planning.transforms import with_recompute_in_backward, with_recompute_passes


class Effort(NamedTuple):
    """What a lift may do to improve the plans that it makes: search within a budget, also from `others`, schedules of the same problem."""

    budget: Budget
    seed: int = 0
    others: Sequence[Schedule] = ()


UNBOUNDED = Bound(0, "")
"""The bound of plans whose problem is not bounded yet."""


@dataclass(frozen=True)
class Lift:
    """Turns a plan of the searched problem into plans of the one that it stands for, none if nothing fits.

    Their bounds hold for every plan of that problem, as does `UNBOUNDED`. `share` is the part of the budget for improving the best of them.
    With `keeps_bound`, a bound for the searched problem holds for them, too. With `lifts_published`, it also gets plans of the published
    schedules.
    """

    make: Callable[[Plan, Effort], Iterable[Plan]]
    share: float = 0.0
    keeps_bound: bool = False
    lifts_published: bool = False


@dataclass(frozen=True)
class Candidate:
    """A placement with one choice of each axis: the `target` is what its plans answer, and `problem` is what the search orders passes for.

    The bound of the target holds for all its plans. `lifts` turn plans of the problem into plans of the target, the first one first.
    `labels` name the choice of each axis. One that `is_compared` only cannot win.
    """

    name: str
    target: Problem
    problem: Problem
    lifts: tuple[Lift, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    is_compared: bool = False

    def choose(self, axis: str, label: str, problem: Problem, target: Problem | None = None, lift: Lift | None = None) -> Candidate:
        """The candidate with the choice of another axis, which searches `problem` instead of its own."""
        lifts = self.lifts if lift is None else (lift, *self.lifts)
        target = self.target if target is None else target
        return replace(self, problem=problem, target=target, lifts=lifts, labels=(*self.labels, (axis, label)))

    def label(self, axis: str) -> str:
        """The choice of an axis, empty if it has none."""
        return dict(self.labels).get(axis, "")

    def lifted(self, plan: Plan, effort: Effort) -> list[Plan]:
        """The plans of the target made from a plan of the problem, each lift with its share of the budget."""
        shares = sum(lift.share for lift in self.lifts)
        plans = [plan]
        for lift in self.lifts:
            part = effort.budget.part(lift.share / shares) if shares else effort.budget.emptied
            plans = [made for one in plans for made in lift.make(one, effort._replace(budget=part))]
        return plans


@dataclass(frozen=True)
class Entry:
    """A candidate with the state of its search: the attempt at its problem, its bound, and its plans so far, the best first."""

    candidate: Candidate
    attempt: Attempt
    bound: Bound
    plans: tuple[Plan, ...] = ()

    @property
    def best(self) -> Plan:
        """The best plan; without a schedule and with the reason if there is none."""
        if self.plans:
            return self.plans[0]
        plan = self.attempt.plan
        reason = plan.reason or ("" if plan.order is None else "no schedule that was found fits")
        return replace(plan, problem=self.candidate.target, bound=self.bound, order=None, time=None, makespan=None, reason=reason)

    @property
    def promise(self) -> float:
        """The time in ns that a search may reach: halfway from the best plan to the bound, or as far above it as the attempt is."""
        searched, time = self.attempt.plan, self.best.time
        if time is None:
            return inf if searched.time is None else self.bound.time * searched.time / max(1, searched.bound.time)
        return (time + self.bound.time) / 2

    def can_beat(self, best: Plan | None) -> bool:
        """Whether a search may make this candidate better than `best`."""
        return self.attempt.can_improve and (best is None or best.time is None or can_beat(self.best, best))

    def on(self, candidate: Candidate, bound: Bound, of_problem: Bound, suffix: str) -> Entry:
        """The entry of another candidate, with this one's orders where they fit; `bound` is that of its target.

        The names of its plans get a suffix.
        """
        entry, best = unopened(candidate, bound), self.best.problem
        ordered = None if self.attempt.plan.order is None else self.attempt.plan.in_other(candidate.problem, suffix)
        if ordered is not None:
            attempt = replace(self.attempt, plan=with_bound(ordered, of_problem), published=(), interrupted=False)
            entry = entry.after(attempt, until=0.0)
        target, levels = candidate.target, best.recomputation
        target = target if levels is None else target.offering(levels.offered, *levels.chosen)
        moved = None if self.best.order is None else self.best.in_other(replace(target, host=best.host), suffix)
        return entry if moved is None else entry.with_plans([moved])

    def after(self, attempt: Attempt, until: float = inf) -> Entry:
        """The entry with another state of the attempt, whose schedule is lifted if it is new.

        The first plan may get published schedules as others, until the clock passes `until`.
        """
        if not self.candidate.lifts:
            return replace(self, attempt=attempt, bound=attempt.plan.bound, plans=() if attempt.plan.order is None else (attempt.plan,))
        before, plan = self.attempt.plan, attempt.plan
        if plan.order is None or (self.plans and plan.order is before.order and plan.bound == before.bound):
            return replace(self, attempt=attempt)
        effort = Effort(Budget(0.0, 0), others=attempt.seeds)
        plans = self.candidate.lifted(plan, effort)
        if not self.plans and any(lift.lifts_published for lift in self.candidate.lifts):
            for start in self._starts(attempt):
                if plans and perf_counter() > until:
                    break
                plans += self.candidate.lifted(start, effort)
        return replace(self, attempt=attempt).with_plans(plans)

    def _starts(self, attempt: Attempt) -> Iterator[Plan]:
        """Plans with the published schedules, and with microbatches one by one."""
        problem, plan = attempt.plan.problem, attempt.plan
        alone = with_recompute_passes(serial_schedule(problem.placement, problem.num_microbatches), problem)
        for schedule in (*fit_to_memory(ranked_seeds(problem), problem), alone):
            if schedule.rows != plan.schedule.rows:
                yield Plan.from_schedule(problem, plan.bound, schedule, 0.0, schedule.name)

    def with_plans(self, plans: Iterable[Plan]) -> Entry:
        """The entry with more plans."""
        known = [*self.plans, *plans]
        bound = max([self.bound, *(plan.bound for plan in known)], key=lambda bound: bound.time)
        return replace(self, bound=bound, plans=tuple(sorted((with_bound(plan, bound) for plan in known), key=rank_key)))

    def improved(self, effort: Effort) -> Entry:
        """The entry after the lifts improved the plans that they make."""
        plan = self.attempt.plan
        if plan.order is None or effort.budget.is_empty or not any(lift.share for lift in self.candidate.lifts):
            return self
        return self.with_plans(self.candidate.lifted(plan, effort._replace(others=self.attempt.seeds)))


def unopened(candidate: Candidate, bound: Bound) -> Entry:
    """The entry of a candidate for which no schedule was made."""
    return Entry(candidate, Attempt(candidate.name, Plan(candidate.problem, Status.FEASIBLE, bound, None, None, 0.0, "")), bound)


MOST_LISTED = 64
"""Candidates that are kept after the choices of each axis, and more if they have more targets."""


def promising(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The most promising candidates first, at most `MOST_LISTED`, of which each target has one."""
    estimates = [_estimate(candidate) for candidate in candidates]
    ranked = [candidates[place] for place in sorted(range(len(candidates)), key=estimates.__getitem__)]
    targets = {candidate.target: candidate for candidate in reversed(ranked)}
    kept = {id(candidate) for candidate in (*targets.values(), *ranked)[: max(MOST_LISTED, len(targets))]}
    return [candidate for candidate in ranked if id(candidate) in kept]


def _estimate(candidate: Candidate) -> tuple[bool, float]:
    """Whether nothing fits, and a time in ns: the work of a rank, or what its memory needs if microbatches are held as briefly as possible.

    Every R is a part of its B.
    """
    problem = candidate.problem.of_mean_slices
    placement, costs = problem.placement, with_recompute_in_backward(problem).costs
    hold, needs, work = 0, [0.0] * placement.num_ranks, [0] * placement.num_ranks
    for stage in reversed(range(placement.num_stages)):
        rank = placement.routes[0][stage]
        hold += costs.forward[stage] + costs.backward[stage] + 2 * (costs.comm[stage] if stage != placement.num_stages - 1 else 0)
        needs[rank] += costs.held_after_f[stage] * hold / problem.limits.memory[rank]
        work[rank] += costs.forward[stage] + costs.backward[stage] + costs.weight[stage]
    least = candidate.target.work / placement.num_ranks
    return bool(problem.shortage_reason), max(least, problem.num_microbatches * max(map(max, needs, work)))
