"""A heavy head: whole on the last stage or divided over all ranks by its vocabulary, each planned for, whichever is quicker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

from zerobubble.bounds import Bound
from zerobubble.costs import Costs, Level, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement
from zerobubble.planning.answer import Choice, Plan, Saving
from zerobubble.planning.attempt import Budget, Search
from zerobubble.planning.competition import room_for_all
from zerobubble.planning.problem.head import COLUMNS, HELD_OF_HEAD, Head, has_parts, parts_on, without_parts
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.recompute.plan import with_levels
from zerobubble.planning.recompute.savings import RecomputeSavings
from zerobubble.planning.seeds import fits_memory
from zerobubble.planning.table import aligned, percent
from zerobubble.schedules import with_vocabulary
from zerobubble.units import ms, show_ms

NAMES = {0: "whole on the last stage", 1: "divided by algorithm 1", 2: "divided by algorithm 2"}
"""What becomes of the head, by the paper's number of the algorithm, 0 for none."""

ROOMS = (0, 1, 2)
"""For how many microbatches more the stages are planned to leave room: division holds one more by algorithm 2, and two by algorithm 1."""


DOES_NOT_FIT = "without R it does not fit with the head divided"


class HeadWay(NamedTuple):
    """The best plan found with the head placed by `algorithm` 1 or 2, or 0 for whole on the last stage.

    The bound of the plan holds on its placement, and `bound` on any of the placements tried.
    """

    algorithm: int
    plan: Plan
    bound: Bound

    @property
    def time(self) -> int:
        """The objective in ns."""
        return self.plan.time or 0

    @property
    def gap(self) -> float:
        """How much longer than the bound the schedule is, as a share of the bound."""
        return _over(self.time, self.bound)

    @property
    def peak_microbatches(self) -> float:
        """The most that a rank holds, in microbatches of its stages without the head."""
        return self.plan.peak_microbatches or 0.0

    @property
    def cells(self) -> tuple[str, ...]:
        """The figures in a table."""
        figures = show_ms(self.time), percent(self.gap), show_ms(self.plan.makespan or 0), f"{self.peak_microbatches:.4g}"
        return NAMES[self.algorithm], *figures, self.plan.placement.name, self.plan.how

    def to_dict(self) -> dict[str, Any]:
        """The figures in JSON, times in ms, with the text of the schedule."""
        return {
            "algorithm": self.algorithm,
            "head": NAMES[self.algorithm],
            "placement": self.plan.placement.name,
            "how": self.plan.how,
            "time_ms": ms(self.time),
            "makespan_ms": ms(self.plan.makespan or 0),
            "bound_ms": ms(self.bound.time),
            "bound_reason": self.bound.reason,
            "gap": self.gap,
            "peak_microbatches": self.peak_microbatches,
            "schedule": self.plan.schedule.to_text(),
        }


@dataclass(frozen=True, repr=False)
class HeadSavings(Saving):
    """What dividing the head saved: the best plan of each of the `ways` to place it that fit, that with a whole head first.

    A way in which nothing was found that fits is missing. No schedule is quicker than `bound`, wherever its head is.
    """

    axis = "head"

    ways: tuple[HeadWay, ...]
    bound: Bound

    @property
    def best(self) -> HeadWay:
        """The quickest, of equal ones that with the smaller makespan, and then the first."""
        return min(self.ways, key=_price)

    def _summary(self) -> str:
        whole, best = self.ways[0], self.best
        if whole.algorithm:
            return f"The head {NAMES[best.algorithm]} takes {show_ms(best.time)}; whole on the last stage it does not fit"
        divided = min(self.ways[1:], key=lambda way: way.time, default=None)
        if divided is None:
            return f"The head stays {NAMES[0]}, {show_ms(whole.time)}: divided it does not fit"
        if best is whole:
            return f"The head stays {NAMES[0]}: {show_ms(whole.time)}, against {show_ms(divided.time)} {NAMES[divided.algorithm]}"
        gain = f"{100 * (1 - best.time / whole.time):.1f} % less than {show_ms(whole.time)} with it {NAMES[0]}"
        held = f"ranks hold up to {best.peak_microbatches:.4g} microbatches instead of {whole.peak_microbatches:.4g}"
        return f"The head {NAMES[best.algorithm]} takes {show_ms(best.time)}, {gain}; {held}"

    def __str__(self) -> str:
        objective, best = self.best.plan.problem.objective, self.best.time
        over = f"{show_ms(best)} is {percent(_over(best, self.bound))} more"
        return f"{self._summary()}.\n\nNo schedule has a shorter {objective} than {show_ms(self.bound.time)}: {self.bound.reason}. {over}."

    def table(self, found: Plan) -> str:
        """The best of each way, the quickest first."""
        titles = ("head", str(found.problem.objective), "over its bound", "makespan", "peak", "placement", "stages by")
        return "\n".join(aligned([titles, *(way.cells for way in sorted(self.ways, key=_price))], left=(0, 5, 6)))

    def to_dict(self) -> dict[str, Any]:
        """The figures of all ways in JSON, the bound and what dividing the head buys."""
        return {
            "best": self.best.algorithm,
            "bought": f"{self._summary()}.",
            "bound_ms": ms(self.bound.time),
            "bound_reason": self.bound.reason,
            "ways": [way.to_dict() for way in self.ways],
        }


def _price(way: HeadWay) -> tuple[int, int]:
    return way.time, way.plan.makespan or 0


def _over(time: int, bound: Bound) -> float:
    """How much longer than the bound a time (ns) is, as a share of the bound."""
    return time / bound.time - 1 if bound.time else 0.0


@dataclass(frozen=True)
class PlacedHead:
    """A head with what the part of each rank costs where it is divided: `parts` are columns of costs, by name, if they were measured."""

    head: Head
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def whole(self, stages: Problem) -> Problem:
        """The problem for stages alone with the whole head in the last one, which is given room where there is room for everything."""
        return _with_costs(stages, self.head.whole(stages.costs), self.head)

    def divided(self, stages: Problem) -> Problem:
        """The problem for stages alone with a part of the head on each rank."""
        if self.parts:
            return _with_costs(stages, stages.costs.with_columns(**self.parts), self.head)
        return _with_costs(stages, self.head.divided(stages.costs, stages.placement.num_ranks), self.head)


def plan_head(
    stages: Mapping[str, Problem], budget: Budget, seed: int, *, placed: PlacedHead, search: Search, offered: Sequence[Level] = ()
) -> Plan:
    """The quickest schedule for the stages and a head, found by `search`: the head whole on the last stage, or divided over all ranks.

    With the head whole, schedules are planned for stages of which the last one is heavier. Divided, they are planned for the stages alone,
    with room left for none, one and two of the microbatches that division holds more, and divided by both algorithms, as `with_vocabulary`
    does. The budget is shared equally by these plans; to divide and judge what they find takes time besides. The answer is never slower
    than the best that is found with the head whole. Where nothing fits it has no schedule, and the reason.
    """
    started, searches = perf_counter(), _Searches(search, seed)
    whole = {name: placed.whole(problem) for name, problem in stages.items()}
    divided = {name: placed.divided(problem) for name, problem in stages.items()}
    limited = not all(is_roomy(problem) for problem in stages.values())
    rooms = [(stages if more == 0 else _leaner(stages, divided, more)) for more in (ROOMS if limited else ROOMS[:1])]
    plans = [problems for problems in (whole, *rooms) if problems]
    found = [searches.best_of(problems, budget.share(len(plans))) for problems in plans]
    when_whole = min(choice.plan.bound for choice in found[0].choices)
    when_divided = min(may_recompute(problem, offered).bound() for problem in divided.values())
    played = [HeadWay(0, choice.plan, when_whole) for choice in found[0].choices if choice.plan.order is not None]
    alone = {problem.placement: problem for problem in stages.values()}
    for plan in found[1:]:
        for choice in plan.choices:
            played += _divided(choice.plan, alone[choice.plan.placement], placed, when_divided)
    seconds = perf_counter() - started - searches.compiling
    timing: dict[str, Any] = {"seconds": seconds, "compiling": searches.compiling, "interrupted": searches.interrupted}
    if not played:
        first = found[0].choices[0].plan
        reason = f"no schedule fits with the head whole or divided: {first.reason or 'raise the memory'}"
        choices = (Choice(NAMES[0], replace(first, reason=reason), reason),)
        return replace(first, reason=reason, choices=choices, **timing)
    each = [[way for way in played if way.algorithm == algorithm] for algorithm in NAMES]
    ways = tuple(min(same, key=_price) for same in each if same)
    savings = HeadSavings(ways, min(when_whole, when_divided))
    ranked = [Choice(NAMES[way.algorithm], way.plan, _note(way), searched=not budget.is_empty) for way in sorted(ways, key=_price)]
    again = _savings_again(savings.best, found, alone, placed)
    return replace(savings.best.plan, choices=tuple(ranked), savings=(savings, *again), **timing)


def _savings_again(
    best: HeadWay, found: Sequence[Plan], alone: Mapping[Placement, Problem], placed: PlacedHead
) -> tuple[RecomputeSavings, ...]:
    """What recomputation saved with the head where it is now, against the plan without R of the same search."""
    if not best.algorithm:
        return tuple(saving for saving in found[0].savings if isinstance(saving, RecomputeSavings))
    known = [saving for plan in found[1:] if (saving := plan.saving(RecomputeSavings)) is not None]
    if not known:
        return ()
    ways = [way for one in known for way in _divided(one.without, alone[one.without.placement], placed, best.bound)]
    without = min(ways, key=_price).plan if ways else replace(known[0].without, order=None, time=None, makespan=None, reason=DOES_NOT_FIT)
    return (RecomputeSavings(without, None, best.plan),)


def least_bound(stages: Problem, placed: PlacedHead | None, offered: Sequence[Level]) -> Bound:
    """A bound for the stages of a problem with a head, wherever it is, and whatever is computed again of the levels `offered`."""
    ways = [stages] if placed is None else [placed.whole(stages), placed.divided(stages)]
    return min((may_recompute(problem, offered).bound() for problem in ways), key=lambda bound: bound.time)


def may_recompute(problem: Problem, offered: Sequence[Level]) -> Problem:
    """The problem as one whose stages may have any of the levels `offered`: its bounds hold for all of them."""
    return with_levels(problem, tuple(offered), offered[0]) if offered and problem.recomputation is None else problem


def is_roomy(problem: Problem) -> bool:
    """Whether memory is no matter."""
    return problem.limits == room_for_all(problem.placement, problem.costs, problem.num_microbatches)


def _note(way: HeadWay) -> str:
    return f"a {way.plan.problem.objective} {percent(way.gap)} over its bound: {way.bound.reason}"


def given_head(head: Head | None, costs: Costs, placement: Placement) -> tuple[PlacedHead, Costs]:
    """The head that goes with the costs of stages, with the parts of it that ranks take if they divide it, and the costs without these.

    Costs with parts, as `Pipeline.profile` measures them, say all of the head but its slowdown. Raises `InputError` where they contradict
    each other.
    """
    costs.require_fit(placement, "the placement")
    parts = costs
    if not has_parts(costs):
        assert head is not None, "there is a head or its parts"
        parts = head.divided(costs, placement.num_ranks)
    measured = Head.of_parts(parts, placement, 1.0 if head is None else head.slowdown)
    if head is not None and has_parts(costs) and head != measured:
        raise InputError(f"the costs have the parts of another head, {measured._summary()}: give that with Head.of_parts")
    return PlacedHead(measured, {name: parts.column(name) for name in COLUMNS}), without_parts(costs)


def _with_costs(stages: Problem, costs: Costs, head: Head) -> Problem:
    """The problem for stages as one with the head in the costs, which is given room where there is room for everything."""
    limits = room_for_all(stages.placement, costs, stages.num_microbatches) if is_roomy(stages) else stages.limits
    return replace(stages, costs=costs, limits=limits, head=head)


class _Searches:
    """Searches one after another, none of them any longer once Ctrl-C came."""

    def __init__(self, search: Search, seed: int) -> None:
        self.search, self.seed, self.interrupted, self.compiling = search, seed, False, 0.0

    def best_of(self, problems: Mapping[str, Problem], budget: Budget) -> Plan:
        """The plan over the problems, with the best on each placement."""
        left = budget.emptied if self.interrupted else budget
        found = self.search(problems, left, self.seed)
        self.interrupted |= found.interrupted
        self.compiling += found.compiling
        return found


def _leaner(stages: Mapping[str, Problem], divided: Mapping[str, Problem], more: int) -> dict[str, Problem]:
    """The problems with room left for `more` microbatches and what the head keeps of them, of those in which one microbatch then fits."""
    leaner = {}
    for name, problem in stages.items():
        sizes, held = problem.microbatch_bytes, divided[name].costs.column(HELD_OF_HEAD)
        share = max(problem.costs.shares, default=1)
        kept = [held[stage] for stage in parts_on(problem.placement)]
        memory = [room - round(more * share * (size + part)) for room, size, part in zip(problem.limits.memory, sizes, kept, strict=True)]
        if min(memory) > 0 and not (less := replace(problem, limits=Limits(tuple(memory)))).shortage_reason:
            leaner[name] = less
    return leaner


def _divided(plan: Plan, stages: Problem, placed: PlacedHead, bound: Bound) -> Iterator[HeadWay]:
    """The answer for stages alone with the head divided by either algorithm, as far as that fits the room of `stages`."""
    if plan.order is None:
        return
    divided = placed.divided(replace(plan.problem, limits=stages.limits))
    alone, least = replace(plan.schedule, overlaps=frozenset()), divided.bound()
    for algorithm in (1, 2):
        schedule = with_vocabulary(alone, algorithm, plan.costs)
        if fits_memory(schedule, divided):
            yield HeadWay(algorithm, Plan.of(divided, least, schedule, plan.seconds, plan.how), bound)
