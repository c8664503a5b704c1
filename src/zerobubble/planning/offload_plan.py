"""Offload: orders of passes that need more memory than there is, with activations moved to the host, compared with those that fit without.

Which orders suit offload is unknown before their offloads are chosen. So three sources compete: the search's best for the memory, its best
for more memory, and the published schedules. Each order first gets the minimal offloads that it needs. The quickest ones get a search over
offloads. No order is quicker than with unlimited memory, so the others can be pruned. The bound for unlimited memory holds for any
offloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

from zerobubble.bounds import Bound
from zerobubble.costs import MAX_LIMIT, Costs, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.offload import HostLink, RankOffloads, plan_offloads, play_offloads
from zerobubble.offload.choice import EVALUATIONS, ROUNDS
from zerobubble.planning.answer import Plan, Saving
from zerobubble.planning.attempt import Budget, PlanProgress, ProgressCallback, Search
from zerobubble.planning.competition import ample_limits
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.rounds import CtrlC
from zerobubble.planning.seeds import fit_to_memory, ranked_seeds, serial_schedule
from zerobubble.planning.transforms import fits_memory, with_recompute_passes
from zerobubble.simulation import metrics
from zerobubble.units import counted, ms, show_ms, show_percent

WITHOUT, MORE_MEMORY = 0.4, 0.15
"""Shares of the budget: plans for the given memory, and for each larger one. The remaining seconds are for offloads."""

MEMORY_FACTORS = (1.5, 2.0, None)
"""Larger memories for which orders are planned, as multiples of the limits; None is unlimited."""

SHORT_LIST = 3
"""Orders that get a search over offloads: this many of the quickest with minimal offloads, and of the quickest without limits."""

PASSES_PLAYED = 1_200_000
"""Passes that a search over the offloads of one order may play, which takes some seconds. Ranks refine their choice if this budget
suffices."""

CANDIDATES = 56
"""Upper bound on the choices of a rank that refines its offloads."""

MOST_PASSES = 20_000
"""Offloads are planned for at most this many passes, because each activation that waits on a rank is compared with each of its steps."""


@dataclass(frozen=True, repr=False)
class OffloadSavings(Saving):
    """What offload saved: `without` is the least objective in ns found without it, None if nothing fits.

    `found` is the quickest schedule with its offloads. `bound` is a lower bound for any offloads on all placements tried.
    """

    axis = "offload"

    found: Plan
    without: int | None
    bound: Bound

    @property
    def gain(self) -> float | None:
        """Share of the time without offload that it saves; None if nothing fits without."""
        time = self.found.time or 0
        return None if self.without is None else 1 - time / self.without if self.without else 0.0

    def _summary(self) -> str:
        bound = f"No schedule with any offloads takes less than {show_ms(self.bound.time)}: {self.bound.reason}"
        takes, moved = show_ms(self.found.time or 0), sum(len(rank.offloads) for rank in self.found.offloads)
        plan = f"{self.found.how} on {self.found.placement.name}"
        if not moved:
            return f"Offload saves no time: {plan} takes {takes} with everything on the device. {bound}"
        without = (
            "nothing fits without it"
            if self.without is None
            else f"without it the {self.found.problem.objective} is {show_ms(self.without)}"
        )
        gain = "" if self.gain is None else f", {show_percent(self.gain)} less"
        return f"Savings of offload: {without}, with it {takes}{gain} ({plan}, {counted(moved, 'offload')}). {bound}"

    def __str__(self) -> str:
        return f"{self._summary()}."

    def table(self, found: Plan) -> str:
        """The choices without offload."""
        return f"Without offload:\n\n{found.comparison}"

    def to_dict(self) -> dict[str, Any]:
        """The figures in JSON, times in ms, and the order as text."""
        return {
            "placement": self.found.placement.name,
            "how": self.found.how,
            "makespan_ms": ms(self.found.makespan or 0),
            "time_ms": ms(self.found.time or 0),
            "without_ms": None if self.without is None else ms(self.without),
            "gain": self.gain,
            "lower_bound_ms": ms(self.bound.time),
            "lower_bound_reason": self.bound.reason,
            "schedule": self.found.schedule.to_text(),
        }


class _Order(NamedTuple):
    """An order of passes that may exceed the memory of its `problem`, and its objective with unlimited memory in ns."""

    fastest: int
    problem: Problem
    schedule: Schedule
    how: str


class _OffloadedOrder(NamedTuple):
    """An order with its offloads: its objective in ns, and the bytes moved on all ranks."""

    time: int
    moved: int
    order: _Order
    offloads: tuple[RankOffloads, ...]

    @property
    def sort_key(self) -> tuple[int, int]:
        return self[:2]


def plan_offloaded(
    problems: Mapping[str, Problem],
    budget: Budget,
    seed: int,
    *,
    link: HostLink,
    search: Search,
    least: Callable[[Problem], Bound] = Problem.bound,
    published: bool = True,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Finds the shortest schedule over the placements of `problems` if ranks may offload activations over `link`.

    It is never slower than the best that `search` finds without offload, which gets 40 % of the budget and is one of the candidates.
    Offloads are chosen as by `zb.offload.plan_offloads`, with fewer tries if there are many passes, within some seconds. `least` returns a
    lower bound of a problem for all choices of the search. With `published`, published schedules are candidates, too. Ctrl-C returns the
    best so far.

    Raises `InputError` if no order fits even with every waiting activation on the host, and for more than `MOST_PASSES` passes.
    """
    started = perf_counter()
    for name, problem in problems.items():
        if problem.num_passes > MOST_PASSES:
            raise InputError(
                "offload is planned for up to {expected:,} passes, but {placement} has {got:,}",
                argument="num_microbatches",
                got=problem.num_passes,
                expected=MOST_PASSES,
                placement=name,
                remedy="plan fewer microbatches, or placements with fewer stages",
            )
    ample = {name: replace(problem, limits=_all_of(problem)) for name, problem in problems.items()}
    bound = min((least(problem) for problem in ample.values()), key=lambda one: one.time)
    plans = [search(problems, budget.part(WITHOUT), seed)]
    best = plans[0]
    with CtrlC() as ctrl_c:
        if not plans[0].interrupted and (best.time is None or best.time > bound.time):
            for more in _with_more_memory(problems, ample):
                if perf_counter() > budget.end(started + sum(each.compiling for each in plans)):
                    break
                plans.append(search(more, budget.part(MORE_MEMORY), seed))
                if plans[-1].interrupted:
                    break
    is_cut_short = plans[-1].interrupted or ctrl_c.came
    is_counted = budget.evaluations is not None or budget.is_empty
    until = started if is_cut_short else None if is_counted else started + budget.seconds + sum(each.compiling for each in plans)
    found: list[_OffloadedOrder] = []
    with CtrlC() as ctrl_c:
        for one in _tried(_orders(plans, problems, published), link, budget, until):
            found.append(one)  # one at a time, so that Ctrl-C keeps what was found before
            if progress is not None:
                _show(found, bound, progress)
    if not found and ctrl_c.came:
        raise KeyboardInterrupt
    if not found:
        raise InputError(
            "no schedule fits, even if every waiting activation is offloaded", remedy=f"give more memory; without offload {best.reason}"
        )
    _, _, (_, problem, schedule, how), offloads = min(found, key=lambda offloaded: offloaded.sort_key)
    hosted = replace(problem, host=link)
    plan = Plan.from_schedule(hosted, hosted.bound(), schedule, perf_counter() - started, how, offloads)
    without = min((one.time for one in found if not one.moved), default=None)
    found_without = replace(plans[0], interrupted=is_cut_short or ctrl_c.came, seconds=perf_counter() - started)
    return found_without.with_winner(plan, OffloadSavings(plan, without, bound), *found_without.savings)


def _show(found: Sequence[_OffloadedOrder], bound: Bound, progress: ProgressCallback) -> None:
    """Call `progress` with the best of what is found so far."""
    best = min(found, key=lambda offloaded: offloaded.sort_key)
    problem, moved = best.order.problem, sum(len(rank.offloads) for rank in best.offloads)
    progress(
        PlanProgress.for_problem(problem.placement.name, problem, best.time, bound.time, f"{best.order.how}, {counted(moved, 'offload')}")
    )


def _all_of(problem: Problem) -> Limits:
    return ample_limits(problem.placement, problem.costs, problem.num_microbatches)


def _with_more_memory(problems: Mapping[str, Problem], ample: Mapping[str, Problem]) -> Iterator[Mapping[str, Problem]]:
    """The problems with more memory than given; `ample` are those with unlimited memory."""
    for factor in MEMORY_FACTORS:
        if factor is None:
            yield ample
        else:
            more = {name: [min(MAX_LIMIT, round(factor * limit)) for limit in problem.limits.memory] for name, problem in problems.items()}
            yield {name: replace(problem, limits=Limits(tuple(more[name]))) for name, problem in problems.items()}


def _orders(plans: Sequence[Plan], problems: Mapping[str, Problem], published: bool) -> list[_Order]:
    """The candidate orders, each once, the quickest with unlimited memory first."""
    limits = {problem.placement: problem.limits for problem in problems.values()}
    known: set[tuple[Placement, object, Costs]] = set()
    found: list[_Order] = []

    def add(problem: Problem, schedule: Schedule, how: str) -> None:
        if (problem.placement, schedule.rows, problem.costs) not in known:
            known.add((problem.placement, schedule.rows, problem.costs))
            fastest = problem.objective.time_of(schedule, problem.costs, metrics(schedule, problem.costs))
            found.append(_Order(fastest, replace(problem, limits=limits[problem.placement]), schedule, how))

    for plan in plans:
        for choice in plan.choices:
            if choice.plan.order is not None:
                add(choice.plan.problem, choice.plan.schedule, choice.plan.how)
    for problem in {choice.plan.problem: None for plan in plans for choice in plan.choices}:
        if published and not problem.has_divided_head:
            ample = replace(problem, limits=_all_of(problem))
            serial = with_recompute_passes(serial_schedule(problem.placement, problem.num_microbatches), problem)
            for schedule in (*fit_to_memory(ranked_seeds(ample), ample), serial):
                add(ample, schedule, schedule.name)
    return sorted(found, key=lambda order: order.fastest)


def _tried(orders: Sequence[_Order], link: HostLink, budget: Budget, until: float | None) -> Iterator[_OffloadedOrder]:
    """The quickest order that fits without offload, then those that may be quicker with it, found before `until`.

    Each gets minimal offloads first. A search over offloads follows for the quickest of them, and for the quickest with unlimited memory:
    minimal offloads often make these slow, and others do not.
    """
    best = next((_offloaded(order, link, 0, 0) for order in orders if fits_memory(order.schedule, order.problem)), None)
    if best is not None:
        yield best
    first: list[_OffloadedOrder] = []
    for order in orders:
        if best is not None and (order.fastest >= best.time or _is_over(until)):
            break
        one = _offloaded(order, link, 0, 0)
        if one is not None:
            first.append(one)
            best = one if best is None or one.sort_key < best.sort_key else best
            yield one
    quickest, without_limits = sorted(first, key=lambda offloaded: offloaded.sort_key)[:SHORT_LIST], first[:SHORT_LIST]
    for early in [*quickest, *(one for one in without_limits if not any(one is other for other in quickest))]:
        order = early.order
        if best is not None and order.fastest < min(early.time, best.time) and not (budget.is_empty or _is_over(until)):
            better = _offloaded(order, link, *_effort(order.problem, budget))
            if better is not None:
                best = min(best, better, key=lambda offloaded: offloaded.sort_key)
                yield better


def _is_over(until: float | None) -> bool:
    return until is not None and perf_counter() > until


def _effort(problem: Problem, budget: Budget) -> tuple[int, int]:
    """Changes of offloads to try for an order, and rounds in which ranks refine their choice, within `PASSES_PLAYED`."""
    changes = min(EVALUATIONS, PASSES_PLAYED // problem.num_passes)
    refines = CANDIDATES * problem.placement.num_ranks * ROUNDS * problem.num_passes <= PASSES_PLAYED
    return changes if budget.evaluations is None else min(changes, budget.evaluations), ROUNDS if refines else 0


def _offloaded(order: _Order, link: HostLink, evaluations: int, rounds: int) -> _OffloadedOrder | None:
    """The order with its offloads; None if it does not fit even with every waiting activation on the host."""
    _, problem, schedule, _ = order
    with suppress(InputError):
        by_span = problem.objective is Objective.PERIOD
        offloads = plan_offloads(schedule, problem.costs, problem.limits, link, evaluations, rounds, by_span=by_span)
        if not any(rank.offloads for rank in offloads):
            return _OffloadedOrder(order.fastest, 0, order, offloads)
        time = problem.objective.measure(play_offloads(schedule, problem.costs, offloads, link))
        return _OffloadedOrder(time, sum(rank.bytes for rank in offloads), order, offloads)
    return None
