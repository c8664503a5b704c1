"""Plans with offload: orders of passes that need more memory than there is, with what must go to the host, and those that fit without.

Which orders are good with offload is not known before what they move is chosen. So the planner's best for the memory are compared with
its best for more memory and with the published schedules: each with what it must move at least, the quickest with a better choice, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

from zerobubble.bounds import Bound
from zerobubble.costs import MOST_ROOM, Costs, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.offload import HostLink, RankOffloads, plan_offloads, play_offloads
from zerobubble.offload.choice import EVALUATIONS, ROUNDS
from zerobubble.planning.answer import Plan, Saving
from zerobubble.planning.attempt import Budget, PlanProgress, ProgressCallback, Search
from zerobubble.planning.competition import room_for_all
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.rounds import CtrlC
from zerobubble.planning.seeds import computed_again, fits_memory, fitting, promising, serial_schedule
from zerobubble.simulation import metrics
from zerobubble.units import counted, ms, show_ms

WITHOUT, ROOMIER = 0.4, 0.15
"""The shares of the budget: plans for the memory that there is, and those for each larger one. The rest of the seconds is for offloads."""

ROOMS = (1.5, 2.0, None)
"""The larger memories that orders are planned for, as multiples of what there is; None is room for everything."""

SHORT_LIST = 3
"""How many orders more is tried for than to move what they must: so many of the quickest with that, and of the quickest without limits."""

PASSES_PLAYED = 1_200_000
"""Passes that may be played in changes of the offloads of one order, some seconds; ranks choose again where as many are enough for that."""

CANDIDATES = 56
"""Choices that a rank has at most when it chooses again."""

MOST_PASSES = 20_000
"""Passes of an order up to which offloads are chosen: what waits on a rank is weighed against each of its steps."""


@dataclass(frozen=True, repr=False)
class OffloadSavings(Saving):
    """What offload saved: `without` is the least objective in ns found without it, None if nothing fits so.

    `found` is the quickest schedule with what its ranks move to the host. No schedule on any placement tried takes less than `bound`,
    whatever goes to the host.
    """

    axis = "offload"

    found: Plan
    without: int | None
    bound: Bound

    @property
    def gain(self) -> float | None:
        """The share of the time without offload that it saves; None if nothing fits without."""
        time = self.found.time or 0
        return None if self.without is None else 1 - time / self.without if self.without else 0.0

    def _summary(self) -> str:
        bound = f"No schedule takes less than {show_ms(self.bound.time)}, whatever goes to the host: {self.bound.reason}"
        takes, moved = show_ms(self.found.time or 0), sum(len(rank.offloads) for rank in self.found.offloads)
        plan = f"{self.found.how} on {self.found.placement.name}"
        if not moved:
            return f"Offload buys nothing that was found: {plan} takes {takes} with all on the device. {bound}"
        without = (
            "nothing fits without it"
            if self.without is None
            else f"without it the {self.found.problem.objective} is {show_ms(self.without)}"
        )
        gain = "" if self.gain is None else f", {100 * self.gain:.1f} % less"
        return f"What offload buys: {without}, with it {takes}{gain} ({plan}, {counted(moved, 'offload')}). {bound}"

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
    """An order of passes that may need more memory than its `problem` has, and its objective where that is no matter, in ns."""

    fastest: int
    problem: Problem
    schedule: Schedule
    how: str


class _Priced(NamedTuple):
    """An order with what its ranks move to the host: less is better, by the objective, and then by the bytes of all ranks."""

    time: int
    moved: int
    order: _Order
    offloads: tuple[RankOffloads, ...]

    @property
    def price(self) -> tuple[int, int]:
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
    """The shortest schedule over the placements of `problems`, where ranks may move what waits to the host.

    It is never slower than the best that `search` finds without offload, for which 40 % of the budget is: it is one of those compared. What
    moves is chosen as by `zb.offload.plan_offloads`, with fewer tries where there are many passes, so that it takes no more than some
    seconds. `least` gives a bound of a problem, with all that the search may choose; the published schedules are tried unless
    requested otherwise. Ctrl-C gives the best so far.

    Raises `InputError` where no order fits even with all that waits on the host, and for more than `MOST_PASSES` passes.
    """
    started = perf_counter()
    for name, problem in problems.items():
        if problem.num_passes > MOST_PASSES:
            what = f"offloads are planned for up to {MOST_PASSES:,} passes, and there are {problem.num_passes:,} on {name}"
            raise InputError(f"{what}: plan fewer microbatches, or on placements of fewer stages")
    roomy = {name: replace(problem, limits=_all_of(problem)) for name, problem in problems.items()}
    bound = min((least(problem) for problem in roomy.values()), key=lambda one: one.time)
    plans = [search(problems, budget.part(WITHOUT), seed)]
    best = plans[0]
    with CtrlC() as ctrl_c:
        if not plans[0].interrupted and (best.time is None or best.time > bound.time):
            for more in _roomier(problems, roomy):
                plans.append(search(more, budget.part(ROOMIER), seed))
                if plans[-1].interrupted:
                    break
    is_cut_short = plans[-1].interrupted or ctrl_c.came
    is_counted = budget.evaluations is not None or budget.is_empty
    until = started if is_cut_short else None if is_counted else started + budget.seconds + sum(plan.compiling for plan in plans)
    found: list[_Priced] = []
    with CtrlC() as ctrl_c:
        for one in _tried(_orders(plans, problems, published), link, budget, until):
            found.append(one)  # one after another, so that Ctrl-C leaves what was found before
            if progress is not None:
                _show(found, bound, progress)
    if not found and ctrl_c.came:
        raise KeyboardInterrupt
    if not found:
        raise InputError(f"no schedule fits, even with all that waits on the host: give more memory; without offload {best.reason}")
    _, _, (_, problem, schedule, how), offloads = min(found, key=lambda priced: priced.price)
    hosted = replace(problem, host=link)
    solved = Plan.of(hosted, hosted.bound(), schedule, perf_counter() - started, how, offloads)
    without = min((one.time for one in found if not one.moved), default=None)
    found_without = replace(plans[0], interrupted=is_cut_short or ctrl_c.came, seconds=perf_counter() - started)
    return found_without.won_by(solved, OffloadSavings(solved, without, bound), *found_without.savings)


def _show(found: Sequence[_Priced], bound: Bound, progress: ProgressCallback) -> None:
    """Call `progress` with the best of what is found so far."""
    best = min(found, key=lambda priced: priced.price)
    problem, moved = best.order.problem, sum(len(rank.offloads) for rank in best.offloads)
    progress(PlanProgress.of(problem.placement.name, problem, best.time, bound.time, f"{best.order.how}, {counted(moved, 'offload')}"))


def _all_of(problem: Problem) -> Limits:
    return room_for_all(problem.placement, problem.costs, problem.num_microbatches)


def _roomier(problems: Mapping[str, Problem], roomy: Mapping[str, Problem]) -> Iterator[Mapping[str, Problem]]:
    """The problems with more memory than there is; `roomy` are those with room for everything."""
    for room in ROOMS:
        if room is None:
            yield roomy
        else:
            more = {name: [min(MOST_ROOM, round(room * limit)) for limit in problem.limits.memory] for name, problem in problems.items()}
            yield {name: replace(problem, limits=Limits(tuple(more[name]))) for name, problem in problems.items()}


def _orders(plans: Sequence[Plan], problems: Mapping[str, Problem], published: bool) -> list[_Order]:
    """The orders that may be good with offload, each once, the quickest where memory is no matter first."""
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
            roomy = replace(problem, limits=_all_of(problem))
            leanest = computed_again(serial_schedule(problem.placement, problem.num_microbatches), problem)
            for schedule in (*fitting(promising(roomy), roomy), leanest):
                add(roomy, schedule, schedule.name)
    return sorted(found, key=lambda order: order.fastest)


def _tried(orders: Sequence[_Order], link: HostLink, budget: Budget, until: float | None) -> Iterator[_Priced]:
    """The quickest order that fits with all on the device, and then those that could be quicker with offloads, found before `until`.

    What must move is tried on each of them. More than that is tried on the quickest, and on those that would be so with memory for all:
    what must move often makes these slow, and other offloads do not. No order is quicker than where memory is no matter.
    """
    best = next((_offloaded(order, link, 0, 0) for order in orders if fits_memory(order.schedule, order.problem)), None)
    if best is not None:
        yield best
    first: list[_Priced] = []
    for order in orders:
        if best is not None and (order.fastest >= best.time or _is_over(until)):
            break
        one = _offloaded(order, link, 0, 0)
        if one is not None:
            first.append(one)
            best = one if best is None or one.price < best.price else best
            yield one
    quickest, without_limits = sorted(first, key=lambda priced: priced.price)[:SHORT_LIST], first[:SHORT_LIST]
    for early in [*quickest, *(one for one in without_limits if not any(one is other for other in quickest))]:
        order = early.order
        if best is not None and order.fastest < min(early.time, best.time) and not (budget.is_empty or _is_over(until)):
            better = _offloaded(order, link, *_effort(order.problem, budget))
            if better is not None:
                best = min(best, better, key=lambda priced: priced.price)
                yield better


def _is_over(until: float | None) -> bool:
    return until is not None and perf_counter() > until


def _effort(problem: Problem, budget: Budget) -> tuple[int, int]:
    """How many changes to try for the offloads of an order, and how often ranks choose again, as far as `PASSES_PLAYED` go."""
    changes = min(EVALUATIONS, PASSES_PLAYED // problem.num_passes)
    again = CANDIDATES * problem.placement.num_ranks * ROUNDS * problem.num_passes <= PASSES_PLAYED
    return changes if budget.evaluations is None else min(changes, budget.evaluations), ROUNDS if again else 0


def _offloaded(order: _Order, link: HostLink, evaluations: int, rounds: int) -> _Priced | None:
    """The order with what its ranks move to the host; None where it does not fit even with all that waits on the host."""
    _, problem, schedule, _ = order
    with suppress(InputError):
        by_span = problem.objective is Objective.PERIOD
        offloads = plan_offloads(schedule, problem.costs, problem.limits, link, evaluations, rounds, by_span=by_span)
        if not any(rank.offloads for rank in offloads):
            return _Priced(order.fastest, 0, order, offloads)
        time = problem.objective.of(play_offloads(schedule, problem.costs, offloads, link))
        return _Priced(time, sum(rank.bytes for rank in offloads), order, offloads)
    return None
