"""Placement of a heavy head: whole on the last stage, or divided over all ranks by vocabulary. All are planned, and the quickest wins.

With the head whole, schedules are searched for stages of which the last is heavier. With it divided, they are searched for the stages
alone, with memory headroom for what division holds, and the passes of the head are then inserted by each algorithm. Every result is
verified and played with its head, so the comparison is exact and never worse than the best plan with a whole head.
"""

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
from zerobubble.planning.competition import ample_limits, has_ample_memory
from zerobubble.planning.problem.head import COLUMNS, HEAD_BYTES, Head, has_parts, parts_on, without_parts
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.recompute.plan import RecomputeSavings, with_levels
from zerobubble.planning.table import aligned
from zerobubble.planning.transforms import fits_memory
from zerobubble.schedules import with_vocabulary
from zerobubble.units import ms, show_ms, show_percent

NAMES = {0: "whole on the last stage", 1: "divided by algorithm 1", 2: "divided by algorithm 2"}
"""Placements of the head, by the paper's number of the algorithm; 0 is a whole head."""

EXTRA_MICROBATCHES = (0, 1, 2)
"""Extra microbatches of headroom to try: division holds one more by algorithm 2, and two more by algorithm 1."""


DOES_NOT_FIT = "without R it does not fit with the head divided"


class HeadOption(NamedTuple):
    """The best plan with the head divided by `algorithm` 1 or 2, or 0 for whole on the last stage.

    The bound of the plan holds on its placement, and `bound` on all placements tried.
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
        """Relative distance of the objective from the bound."""
        return _over(self.time, self.bound)

    @property
    def note(self) -> str:
        gap = _over(self.time, self.plan.bound)  # that of its placement, as everywhere in the choices of a plan
        return f"a {self.plan.problem.objective} {show_percent(gap)} over its bound: {self.plan.bound.reason}"

    @property
    def peak_microbatches(self) -> float:
        """Peak memory of the fullest rank, in microbatches of its stages without the head."""
        return self.plan.peak_microbatches or 0.0

    @property
    def cells(self) -> tuple[str, ...]:
        """The figures in a table."""
        figures = show_ms(self.time), show_percent(self.gap), show_ms(self.plan.makespan or 0), f"{self.peak_microbatches:.4g}"
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
    """What dividing the head saved: the best plan for each placement of the head that fits, a whole head first.

    `bound` is a lower bound on the objective for any placement of the head.
    """

    axis = "head"

    ways: tuple[HeadOption, ...]
    bound: Bound

    @property
    def best(self) -> HeadOption:
        """The quickest option. If several are equally quick, the one with the smaller makespan wins, then the first."""
        return min(self.ways, key=_price)

    def _summary(self) -> str:
        whole, best = self.ways[0], self.best
        if whole.algorithm:
            return f"The plan takes {show_ms(best.time)} with the head {NAMES[best.algorithm]}; whole on the last stage it does not fit"
        divided = min(self.ways[1:], key=lambda way: way.time, default=None)
        if divided is None:
            return f"The head stays {NAMES[0]}, {show_ms(whole.time)}: divided it does not fit"
        if best is whole:
            return f"The head stays {NAMES[0]}: {show_ms(whole.time)}, against {show_ms(divided.time)} {NAMES[divided.algorithm]}"
        gain = f"{show_percent(1 - best.time / whole.time)} less than {show_ms(whole.time)} with it {NAMES[0]}"
        held = f"ranks hold up to {best.peak_microbatches:.4g} microbatches instead of {whole.peak_microbatches:.4g}"
        return f"The head {NAMES[best.algorithm]} takes {show_ms(best.time)}, {gain}; {held}"

    def __str__(self) -> str:
        objective, best = self.best.plan.problem.objective, self.best.time
        over = f"{show_ms(best)} is {show_percent(_over(best, self.bound))} more"
        return f"{self._summary()}.\n\nNo schedule has a shorter {objective} than {show_ms(self.bound.time)}: {self.bound.reason}. {over}."

    def table(self, found: Plan) -> str:
        """The best plan of each option, the quickest first."""
        titles = ("head", str(found.problem.objective), "over its bound", "makespan", "peak", "placement", "stages by")
        return "\n".join(aligned([titles, *(way.cells for way in sorted(self.ways, key=_price))], left=(0, 5, 6)))

    def to_dict(self) -> dict[str, Any]:
        """The figures of all options in JSON, with the bound."""
        return {
            "best": self.best.algorithm,
            "summary": f"{self._summary()}.",
            "bound_ms": ms(self.bound.time),
            "bound_reason": self.bound.reason,
            "ways": [way.to_dict() for way in self.ways],
        }


def _price(way: HeadOption) -> tuple[int, int]:
    return way.time, way.plan.makespan or 0


def _over(time: int, bound: Bound) -> float:
    """The excess of a time (ns) over the bound, as a fraction of the bound."""
    return time / bound.time - 1 if bound.time else 0.0


@dataclass(frozen=True)
class HeadParts:
    """A head and the costs of its parts on each rank: `parts` are columns of costs by name, if they were measured."""

    head: Head
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def whole(self, stages: Problem) -> Problem:
        """The problem with the whole head in the last stage; ample limits stay ample."""
        return _with_costs(stages, self.head.whole(stages.costs), self.head)

    def divided(self, stages: Problem) -> Problem:
        """The problem with a part of the head on each rank, but without its passes."""
        if self.parts:
            return _with_costs(stages, stages.costs.with_columns(**self.parts), self.head)
        return _with_costs(stages, self.head.divided(stages.costs, stages.placement.num_ranks), self.head)


def plan_head(
    stages: Mapping[str, Problem], budget: Budget, seed: int, *, head_parts: HeadParts, search: Search, offered: Sequence[Level] = ()
) -> Plan:
    """Finds the quickest schedule for the stages and a head, by `search`, with the head whole on the last stage or divided over all ranks.

    The budget is shared equally by the searches: one with a whole head, and one for each number of `EXTRA_MICROBATCHES` of headroom if
    memory is limited. Both algorithms divide the head in each result, as `with_vocabulary` does; this takes additional time. The answer is
    never slower than the best plan with a whole head. If nothing fits, it has no schedule, and a reason.
    """
    started, searches = perf_counter(), _Searches(search, seed)
    stages = {name: replace(problem, trains=True) for name, problem in stages.items()}  # the head has a backward pass
    whole = {name: head_parts.whole(problem) for name, problem in stages.items()}
    divided = {name: head_parts.divided(problem) for name, problem in stages.items()}
    limited = not all(has_ample_memory(problem) for problem in stages.values())
    variants = [
        (stages if more == 0 else _with_headroom(stages, divided, more))
        for more in (EXTRA_MICROBATCHES if limited else EXTRA_MICROBATCHES[:1])
    ]
    plans = [problems for problems in (whole, *variants) if problems]
    found: list[Plan] = []
    for problems in plans:
        if len(found) > 1 and perf_counter() > budget.end(started + searches.compiling):
            break
        found.append(searches.best_of(problems, budget.share(len(plans))))
    when_whole = min(choice.plan.bound for choice in found[0].choices)
    when_divided = min(may_recompute(problem, offered).bound() for problem in divided.values())
    played = [HeadOption(0, choice.plan, when_whole) for choice in found[0].choices if choice.plan.order is not None]
    alone = {problem.placement: problem for problem in stages.values()}
    for plan in found[1:]:
        for choice in plan.choices:
            played += _divided(choice.plan, alone[choice.plan.placement], head_parts, when_divided)
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
    ranked = [Choice(NAMES[way.algorithm], way.plan, way.note, searched=not budget.is_empty) for way in sorted(ways, key=_price)]
    recompute_savings = _recompute_savings(savings.best, found, alone, head_parts)
    return replace(savings.best.plan, choices=tuple(ranked), savings=(savings, *recompute_savings), **timing)


def _recompute_savings(
    best: HeadOption, found: Sequence[Plan], alone: Mapping[Placement, Problem], head_parts: HeadParts
) -> tuple[RecomputeSavings, ...]:
    """The savings from recomputation, compared with the plan of the same search without R, with the head in the same place."""
    if not best.algorithm:
        return tuple(saving for saving in found[0].savings if isinstance(saving, RecomputeSavings))
    known = [saving for plan in found[1:] if (saving := plan.saving(RecomputeSavings)) is not None]
    if not known:
        return ()
    ways = [way for one in known for way in _divided(one.without, alone[one.without.placement], head_parts, best.bound)]
    without = min(ways, key=_price).plan if ways else replace(known[0].without, order=None, time=None, makespan=None, reason=DOES_NOT_FIT)
    return (RecomputeSavings(without, None, best.plan),)


def least_bound(stages: Problem, head_parts: HeadParts | None, offered: Sequence[Level]) -> Bound:
    """A bound for any placement of the head, and any choice of the recompute levels `offered`."""
    ways = [stages] if head_parts is None else [head_parts.whole(stages), head_parts.divided(stages)]
    return min((may_recompute(problem, offered).bound() for problem in ways), key=lambda bound: bound.time)


def may_recompute(problem: Problem, offered: Sequence[Level]) -> Problem:
    """The problem with recomputation at any of the levels `offered`; its bounds hold for all of them."""
    return with_levels(problem, tuple(offered), offered[0]) if offered and problem.recomputation is None else problem


def given_head(head: Head | None, costs: Costs, placement: Placement) -> tuple[HeadParts, Costs]:
    """The head that belongs to costs of stages, with its parts, and the costs without these.

    Costs with parts, as `Pipeline.profile` measures them, determine the head except for its slowdown. Raises `InputError` if they
    contradict the given head.
    """
    costs.require_fit(placement, "the placement")
    parts = costs
    if not has_parts(costs):
        assert head is not None, "there is a head or its parts"
        parts = head.divided(costs, placement.num_ranks)
    measured = Head.from_parts(parts, placement, 1.0 if head is None else head.slowdown)
    if head is not None and has_parts(costs) and head != measured:
        raise InputError(
            "the costs have the parts of another head, {measured}", measured=measured._summary(), remedy="use Head.from_parts(costs)"
        )
    return HeadParts(measured, {name: parts.column(name) for name in COLUMNS}), without_parts(costs)


def _with_costs(stages: Problem, costs: Costs, head: Head) -> Problem:
    """The problem with the head in its costs; ample limits stay ample."""
    limits = ample_limits(stages.placement, costs, stages.num_microbatches) if has_ample_memory(stages) else stages.limits
    return replace(stages, costs=costs, limits=limits, head=head, trains=False)


class _Searches:
    """Runs searches one after another, with no budget after Ctrl-C."""

    def __init__(self, search: Search, seed: int) -> None:
        self.search, self.seed, self.interrupted, self.compiling = search, seed, False, 0.0

    def best_of(self, problems: Mapping[str, Problem], budget: Budget) -> Plan:
        """The plan over the problems, with the best on each placement."""
        left = budget.emptied if self.interrupted else budget
        found = self.search(problems, left, self.seed)
        self.interrupted |= found.interrupted
        self.compiling += found.compiling
        return found


def _with_headroom(stages: Mapping[str, Problem], divided: Mapping[str, Problem], more: int) -> dict[str, Problem]:
    """The problems with memory reserved for `more` microbatches and the bytes that the head keeps of them.

    Leaves out problems in which no microbatch fits any more.
    """
    smaller = {}
    for name, problem in stages.items():
        sizes, held = problem.microbatch_bytes, divided[name].costs.column(HEAD_BYTES)
        share = max(problem.costs.shares, default=1)
        kept = [held[stage] for stage in parts_on(problem.placement)]
        memory = [limit - round(more * share * (size + part)) for limit, size, part in zip(problem.limits.memory, sizes, kept, strict=True)]
        if min(memory) > 0 and not (less := replace(problem, limits=Limits(tuple(memory)))).shortage_reason:
            smaller[name] = less
    return smaller


def _divided(plan: Plan, stages: Problem, head_parts: HeadParts, bound: Bound) -> Iterator[HeadOption]:
    """The plan for stages alone with the head divided by each algorithm, if that fits the limits of `stages`."""
    if plan.order is None:
        return
    divided = head_parts.divided(replace(plan.problem, limits=stages.limits))
    alone, least = replace(plan.schedule, overlaps=frozenset()), divided.bound()
    for algorithm in (1, 2):
        schedule = with_vocabulary(alone, algorithm, plan.costs)
        if fits_memory(schedule, divided):
            yield HeadOption(algorithm, Plan.from_schedule(divided, least, schedule, plan.seconds, plan.how), bound)
