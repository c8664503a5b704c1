"""Placement of a heavy head: whole on the last stage, or divided over all ranks by vocabulary. All are planned, and the quickest wins.

With the head whole, schedules are searched for stages of which the last is heavier. With it divided, they are searched for the stages
alone, with memory headroom for what division holds, and the passes of the head are then inserted by each algorithm. Every result is
verified and played with its head, so the comparison is exact and never worse than the best plan with a whole head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zerobubble.bounds import Bound
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Kind, Placement
from zerobubble.planning.answer import Choice, Plan, Saving
from zerobubble.planning.axes.axis import ChoicesOfAxis, Contest
from zerobubble.planning.candidate import UNBOUNDED, Candidate, Lift
from zerobubble.planning.problem.from_work import ample_limits, has_ample_memory
from zerobubble.planning.problem.head import COLUMNS, HEAD_BYTES, Head, has_parts, parts_on, without_parts
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.table import aligned
from zerobubble.planning.transforms import fits_memory
from zerobubble.schedules import with_vocabulary
from zerobubble.units import ms, show_ms, show_percent

NAME, DIVIDED = "head", "divided"

NAMES = {0: "whole on the last stage", 1: "divided by algorithm 1", 2: "divided by algorithm 2"}
"""Placements of the head, by the paper's number of the algorithm; 0 is a whole head."""

EXTRA_MICROBATCHES = (0, 1, 2)
"""Extra microbatches of headroom to try: division holds one more by algorithm 2, and two more by algorithm 1."""


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


@dataclass(frozen=True)
class HeadChoices(ChoicesOfAxis):
    """The head whole on the last stage, or divided with memory headroom for more or fewer microbatches."""

    head_parts: HeadParts

    def choices(self, candidate: Candidate) -> Iterator[Candidate]:
        stages, target = (replace(problem, trains=True) for problem in (candidate.problem, candidate.target))  # a head has a backward pass
        yield candidate.choose(NAME, NAMES[0], self.head_parts.whole(stages), self.head_parts.whole(target))
        divided, lift = self.head_parts.divided(stages), Lift(lambda plan, effort: self._divided(plan, stages))
        for more in EXTRA_MICROBATCHES[:1] if has_ample_memory(stages) else EXTRA_MICROBATCHES:
            smaller = _with_headroom(stages, divided, more) if more else stages
            if smaller is not None:
                headroom = candidate.choose("headroom", f"{more} microbatches", smaller, self.head_parts.divided(target), lift)
                yield headroom.choose(NAME, DIVIDED, smaller)

    def _divided(self, plan: Plan, stages: Problem) -> Iterator[Plan]:
        """The plan for stages alone with the head divided by each algorithm, if that fits the limits of `stages`."""
        divided = self.head_parts.divided(replace(plan.problem, limits=stages.limits))
        alone = replace(plan.schedule, overlaps=frozenset())
        for algorithm in (1, 2):
            schedule = with_vocabulary(alone, algorithm, plan.costs)
            if fits_memory(schedule, divided):
                yield Plan.from_schedule(divided, UNBOUNDED, schedule, plan.seconds, plan.how)

    def finish(self, found: Plan, contest: Contest) -> Plan:
        ways = []
        for algorithm in NAMES:
            plans = [plan for plan in contest.on_device if _algorithm(plan) == algorithm]
            if plans:
                label, best = NAMES[0] if algorithm == 0 else DIVIDED, min(plans, key=_length)
                ways.append(HeadOption(algorithm, best, contest.least_bound(best, NAME, label)))
        if not ways:
            reason = f"no schedule fits with the head whole or divided: {found.reason or 'raise the memory'}"
            return replace(found, reason=reason, choices=(Choice(NAMES[0], replace(found, reason=reason), reason),))
        best = min(ways, key=_price).plan
        savings = HeadSavings(tuple(ways), contest.least_bound(best))
        ranked = [Choice(NAMES[way.algorithm], way.plan, way.note, searched=contest.is_searched) for way in sorted(ways, key=_price)]
        return replace(found.with_winner(best, savings, *found.savings), choices=tuple(ranked), simple=None)


def _algorithm(plan: Plan) -> int:
    """The algorithm that divides the head of the plan, 0 if it is whole."""
    kinds = {op.kind for row in plan.schedule.rows for op in row}
    return 1 if Kind.SL in kinds else 2 if Kind.S in kinds else 0


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


def _with_headroom(stages: Problem, divided: Problem, more: int) -> Problem | None:
    """The problem with memory reserved for `more` microbatches and the bytes that the head keeps of them; None if none fits any more."""
    sizes, held = stages.microbatch_bytes, divided.costs.column(HEAD_BYTES)
    share = max(stages.costs.shares, default=1)
    kept = [held[stage] for stage in parts_on(stages.placement)]
    memory = [limit - round(more * share * (size + part)) for limit, size, part in zip(stages.limits.memory, sizes, kept, strict=True)]
    smaller = replace(stages, limits=Limits(tuple(memory))) if min(memory) > 0 else None
    return None if smaller is None or smaller.shortage_reason else smaller


def _length(plan: Plan) -> tuple[int, int]:
    return plan.time or 0, plan.makespan or 0
