"""A heavy head: whole on the last stage or divided over all ranks by its vocabulary, each planned for, whichever is quicker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

from zerobubble.bounds import Bound
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Placement
from zerobubble.planning.answer import Choice, Plan, Saving
from zerobubble.planning.attempt import Budget, ProgressCallback
from zerobubble.planning.competition import plan_problems, problems_of, room_for_all
from zerobubble.planning.problem.head import HELD_OF_HEAD, Head, has_parts, parts_on, without_parts
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.problem.workload import Workload
from zerobubble.planning.seeds import fits_memory
from zerobubble.planning.table import aligned, percent
from zerobubble.schedules import with_vocabulary
from zerobubble.units import ms, show_ms

NAMES = {0: "whole on the last stage", 1: "divided by algorithm 1", 2: "divided by algorithm 2"}
"""What becomes of the head, by the paper's number of the algorithm, 0 for none."""

ROOMS = (0, 1, 2)
"""For how many microbatches more the stages are planned to leave room: division holds one more by algorithm 2, and two by algorithm 1."""


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


def plan_head(
    work: Workload | Costs,
    num_microbatches: int,
    head: Head,
    memory: float | Limits | None,
    tried: Mapping[str, Placement],
    objective: Objective,
    budget: Budget,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Plan:
    """The quickest schedule for `work` and a head over the placements `tried`: the head whole on the last stage, or divided over all ranks.

    With the head whole, schedules are planned for stages of which the last one is heavier. Divided, they are planned for the stages alone,
    with room left for none, one and two of the microbatches that division holds more, and divided by both algorithms, as `with_vocabulary`
    does. The budget is shared equally by these plans; to divide and judge what they find takes time besides. The answer is never slower
    than the best that is found with the head whole. Raises `InputError` for parts that cannot be used, and where nothing fits.

    `Costs` have the parts of the head as ranks divide it: divided it takes what each part took, and whole what `head` says.
    """
    started, searches = perf_counter(), _Searches(seed, progress)
    stages = problems_of(without_parts(work) if isinstance(work, Costs) else work, num_microbatches, memory, tried, objective)
    whole = {name: _with_costs(problem, head.whole(problem.costs), head, memory) for name, problem in stages.items()}
    parts = {name: work if isinstance(work, Costs) else head.divided(problem.costs, work.num_ranks) for name, problem in stages.items()}
    divided = {name: _with_costs(problem, parts[name], head, memory) for name, problem in stages.items()}
    rooms = [(stages if more == 0 else _leaner(stages, divided, more)) for more in (ROOMS if memory is not None else ROOMS[:1])]
    plans = [problems for problems in (whole, *rooms) if problems]
    found = [searches.best_of(problems, budget.share(len(plans))) for problems in plans]
    when_whole = min(choice.plan.bound for choice in found[0])
    when_divided = min(problem.bound() for problem in divided.values())
    played = [HeadWay(0, choice.plan, when_whole) for choice in found[0] if choice.plan.order is not None]
    for choice in (choice for choices in found[1:] for choice in choices):
        played += _divided(choice, stages[choice.name], divided[choice.name], when_divided)
    if not played:
        raise InputError(f"no schedule fits with the head whole or divided: {found[0][0].plan.reason or 'raise the memory'}")
    each = [[way for way in played if way.algorithm == algorithm] for algorithm in NAMES]
    ways = tuple(min(same, key=_price) for same in each if same)
    savings = HeadSavings(ways, min(when_whole, when_divided))
    choices = [Choice(NAMES[way.algorithm], way.plan, _note(way), searched=not budget.is_empty) for way in sorted(ways, key=_price)]
    seconds = perf_counter() - started - searches.compiling
    return replace(
        savings.best.plan,
        choices=tuple(choices),
        savings=(savings,),
        seconds=seconds,
        compiling=searches.compiling,
        interrupted=searches.interrupted,
    )


def _note(way: HeadWay) -> str:
    return f"a {way.plan.problem.objective} {percent(way.gap)} over its bound: {way.bound.reason}"


def given_head(head: Head | None, costs: Costs, placement: Placement) -> tuple[Head, Costs]:
    """The head that goes with the costs of stages, and these costs with the parts of it that ranks take if they divide it.

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
    return measured, parts


def _with_costs(stages: Problem, costs: Costs, head: Head, memory: float | Limits | None) -> Problem:
    """The problem for stages as one with the head in the costs, which is given room where there is room for everything."""
    limits = stages.limits if memory is not None else room_for_all(stages.placement, costs, stages.num_microbatches)
    return replace(stages, costs=costs, limits=limits, head=head)


class _Searches:
    """Searches one after another, none of them any longer once Ctrl-C came."""

    def __init__(self, seed: int, progress: ProgressCallback | None) -> None:
        self.seed, self.progress, self.interrupted, self.compiling = seed, progress, False, 0.0

    def best_of(self, problems: Mapping[str, Problem], budget: Budget) -> tuple[Choice, ...]:
        """The best on each placement."""
        left = Budget(0.0, budget.evaluations and 0) if self.interrupted else budget
        found = plan_problems(problems, left, self.seed, self.progress)
        self.interrupted |= found.interrupted
        self.compiling += found.compiling
        return found.choices


def _leaner(stages: Mapping[str, Problem], divided: Mapping[str, Problem], more: int) -> dict[str, Problem]:
    """The problems with room left for `more` microbatches and what the head keeps of them, of those in which one microbatch then fits."""
    leaner = {}
    for name, problem in stages.items():
        sizes, held = problem.microbatch_bytes, divided[name].costs.column(HELD_OF_HEAD)
        kept = [held[stage] for stage in parts_on(problem.placement)]
        memory = [room - more * (size + part) for room, size, part in zip(problem.limits.memory, sizes, kept, strict=True)]
        if min(memory) > 0 and not (less := replace(problem, limits=Limits(tuple(memory)))).shortage_reason:
            leaner[name] = less
    return leaner


def _divided(choice: Choice, stages: Problem, divided: Problem, bound: Bound) -> Iterator[HeadWay]:
    """The answer for stages alone with the head divided by either algorithm, as far as that fits."""
    if choice.plan.order is None:
        return
    alone = replace(choice.plan.schedule, overlaps=frozenset())
    for algorithm in (1, 2):
        schedule = with_vocabulary(alone, algorithm, stages.costs)
        if fits_memory(schedule, divided):
            solved = Plan.of(divided, divided.bound(), schedule, choice.plan.seconds, choice.plan.how)
            yield HeadWay(algorithm, solved, bound)
