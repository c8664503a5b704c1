"""Plans with a heavy head: whole on the last stage or divided over all ranks by its vocabulary, each planned for, whichever is quicker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from typing import Any

from zerobubble.arguments import NUMBER, WHOLE, either, instance, optional, takes
from zerobubble.bounds import Bound
from zerobubble.costs import HEAD_TIMES, Costs, Limits
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.planning.attempt import Budget, ProgressCallback
from zerobubble.planning.competition import (
    MICROBATCHES,
    SECONDS,
    Choice,
    as_budget,
    placements_for,
    plan_problems,
    problems_of,
    room_for_all,
)
from zerobubble.planning.head.choice import NAMES
from zerobubble.planning.problem.head import HELD_OF_HEAD, Head, parts_on, without_parts
from zerobubble.planning.problem.problem import Objective, Problem, Solved
from zerobubble.planning.problem.workload import Workload
from zerobubble.planning.reasons import NOTE_WIDTH, aligned, percent
from zerobubble.planning.seeds import fits_memory
from zerobubble.schedules import with_vocabulary
from zerobubble.units import ms, show_ms

ROOMS = (0, 1, 2)
"""For how many microbatches more the stages are planned to leave room: division holds one more by algorithm 2, and two by algorithm 1."""


@dataclass(frozen=True, slots=True, repr=False)
class PlannedHead(Displayed):
    """The best schedule found with the head placed in one way: by `algorithm` 1 or 2, or 0 for whole on the last stage.

    `solved` is the plan, which a file can keep. Its bound holds on its placement, and `bound` is a proven lower bound on the objective for
    all schedules with the head placed so, on any of the placements tried.
    """

    algorithm: int
    solved: Solved
    bound: Bound

    @property
    def placement(self) -> str:
        """Where the stages lie."""
        return self.solved.problem.placement.name

    @property
    def schedule(self) -> Schedule:
        """The schedule, with the passes of its head."""
        assert self.solved.schedule is not None
        return self.solved.schedule

    @property
    def costs(self) -> Costs:
        """What its passes take and hold."""
        return self.solved.problem.costs

    @property
    def time(self) -> int:
        """The objective in ns."""
        assert self.solved.time is not None
        return self.solved.time

    @property
    def makespan(self) -> int:
        """The makespan in ns."""
        assert self.solved.makespan is not None
        return self.solved.makespan

    @property
    def peaks(self) -> tuple[int, ...]:
        """The bytes that each rank holds at most."""
        return self.solved.peaks

    @property
    def peak_microbatches(self) -> float:
        """The most that a rank holds, in microbatches of its stages without the head."""
        assert self.solved.peak_microbatches is not None
        return self.solved.peak_microbatches

    @property
    def how(self) -> str:
        """What found the order of the stages."""
        return self.solved.how

    @property
    def gap(self) -> float:
        """How much longer than the bound the schedule is, as a share of the bound."""
        return _over(self.time, self.bound)

    def _summary(self) -> str:
        return f"{NAMES[self.algorithm]} on {self.placement}: {show_ms(self.time)}, {percent(self.gap)} over its bound"

    def to_dict(self) -> dict[str, Any]:
        """The figures in JSON, times in ms, with the text of the schedule."""
        return {
            "algorithm": self.algorithm,
            "head": NAMES[self.algorithm],
            "placement": self.placement,
            "how": self.how,
            "time_ms": ms(self.time),
            "makespan_ms": ms(self.makespan),
            "bound_ms": ms(self.bound.time),
            "bound_reason": self.bound.reason,
            "gap": self.gap,
            "peak_microbatches": self.peak_microbatches,
            "schedule": self.schedule.to_text(),
        }


@dataclass(frozen=True, repr=False)
class HeadPlan(Displayed):
    """The best schedule with the head placed in each of the `ways` that fit, that with a whole head first; `best` is the quickest of them.

    A way in which nothing was found that fits is missing. No schedule is quicker than `bound`, wherever its head is. `interrupted` says
    that Ctrl-C cut the search short.
    """

    ways: tuple[PlannedHead, ...]
    bound: Bound
    objective: Objective
    interrupted: bool = False

    @property
    def best(self) -> PlannedHead:
        """The quickest, of equal ones that with the smaller makespan, and then the first."""
        return min(self.ways, key=lambda way: (way.time, way.makespan))

    @property
    def schedule(self) -> Schedule:
        """The schedule of the best."""
        return self.best.schedule

    @property
    def bought(self) -> str:
        """What dividing the head buys, in a sentence."""
        whole, best = self.ways[0], self.best
        if whole.algorithm:
            return f"The head {NAMES[best.algorithm]} takes {show_ms(best.time)}; whole on the last stage it does not fit."
        divided = min(self.ways[1:], key=lambda way: way.time, default=None)
        if divided is None:
            return f"The head stays {NAMES[0]}, {show_ms(whole.time)}: divided it does not fit."
        if best is whole:
            return f"The head stays {NAMES[0]}: {show_ms(whole.time)}, against {show_ms(divided.time)} {NAMES[divided.algorithm]}."
        gain = f"{100 * (1 - best.time / whole.time):.1f} % less than {show_ms(whole.time)} with it {NAMES[0]}"
        held = f"ranks hold up to {best.peak_microbatches:.4g} microbatches instead of {whole.peak_microbatches:.4g}"
        return f"The head {NAMES[best.algorithm]} takes {show_ms(best.time)}, {gain}; {held}."

    def _summary(self) -> str:
        return self.bought.removesuffix(".")

    def __str__(self) -> str:
        titles = ("head", str(self.objective), "over its bound", "makespan", "peak", "placement", "stages by")
        rows = [_row(way) for way in (self.best, *(way for way in self.ways if way is not self.best))]
        over = f"{show_ms(self.best.time)} is {percent(_over(self.best.time, self.bound))} more"
        remarks = [self.bought, f"No schedule has a shorter {self.objective} than {show_ms(self.bound.time)}: {self.bound.reason}. {over}."]
        remarks += ["Ctrl-C cut the search short: this is the best until then."] if self.interrupted else []
        return "\n".join(
            [*aligned([titles, *rows], left=(0, 5, 6)), *(f"\n{fill(each, NOTE_WIDTH, break_on_hyphens=False)}" for each in remarks)]
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures of all ways in JSON, the bound and what dividing the head buys."""
        return {
            "objective": self.objective.value,
            "best": self.best.algorithm,
            "bought": self.bought,
            "bound_ms": ms(self.bound.time),
            "bound_reason": self.bound.reason,
            "ways": [way.to_dict() for way in self.ways],
            "interrupted": self.interrupted,
        }


def _over(time: int, bound: Bound) -> float:
    """How much longer than the bound a time (ns) is, as a share of the bound."""
    return time / bound.time - 1 if bound.time else 0.0


def _row(way: PlannedHead) -> tuple[str, ...]:
    figures = show_ms(way.time), percent(way.gap), show_ms(way.makespan), f"{way.peak_microbatches:.4g}"
    return NAMES[way.algorithm], *figures, way.placement, way.how


@takes(
    work=instance(Workload, Costs),
    num_microbatches=WHOLE,
    head=optional(HEAD_TIMES),
    memory=optional(either(MICROBATCHES, Limits)),
    held=NUMBER,
    collective=NUMBER,
    slowdown=NUMBER,
    objective=str,
    seconds=NUMBER,
    seed=WHOLE,
    evaluations=optional(WHOLE),
)
def plan_head(
    work: Workload | Costs,
    num_microbatches: int,
    head: Sequence[float] | None = None,
    memory: float | Limits | None = None,
    *,
    held: float = 0.0,
    collective: float = 0.0,
    slowdown: float = 1.0,
    placements: str | Placement | Iterable[str | Placement] | None = None,
    objective: str = Objective.SPAN,
    seconds: float = SECONDS,
    seed: int = 0,
    evaluations: int | None = None,
    progress: ProgressCallback | None = None,
) -> HeadPlan:
    """The quickest schedule for `work` and a head, over `placements`: the head whole on the last stage, or divided over all ranks.

    With the head whole, schedules are planned for stages of which the last one is heavier. Divided, they are planned for the stages alone,
    with room left for none, one and two of the microbatches that division holds more, and divided by both algorithms, as `with_vocabulary`
    does. The budget is shared equally by these plans; to divide and judge what they find takes time besides. The answer is never slower
    than the best that is found with the head whole. Raises `InputError` for parts that cannot be used, and where nothing fits.

    `Costs` of stages with the parts of a divided head, as `Pipeline.profile` measures them, have all that is asked of the head: divided it
    takes what each part took, and whole what `Head.of_parts` makes of them. They are planned for on their placement.

    Arguments:
        work: what each rank does, without the head, or the costs of stages and of the parts of a head.
        num_microbatches: slices of each batch.
        head: beside a workload, what the whole head takes for a microbatch, in ms: its forward with the loss, the gradients for its input
            and its weights.
        memory: room on each rank, in microbatches of all its stages, or in bytes as `Limits`, for costs always; None for no limit.
        held: what the whole head keeps from its forward to its backward, as a share of what the last rank's stages save in F.
        collective: ms until what one rank gives of a divided head has reached the others.
        slowdown: by how much a part takes longer than its even share; published are 1.07 to 1.32.
        placements: where to look, as in `zb.plan`.
        objective: "span" or "makespan", as in `zb.plan`.
        seconds: how long to search, for all plans together; 0 takes the best published schedules.
        seed: another one makes other random choices.
        evaluations: how many schedules to play instead, so that the answer is the same on every machine.
        progress: called now and then with how far the search is.

    >>> import zerobubble as zb
    >>> work = zb.Workload.uniform(4, times=(10, 10, 8))
    >>> zb.planning.plan_head(work, 8, (10, 10, 10), memory=6, placements="vee", seconds=0).best
    <PlannedHead divided by algorithm 2 on vee: 292.5 ms, 2.99 % over its bound>
    """
    budget, searches = as_budget(seconds, evaluations), _Searches(seed, progress)
    tried = placements_for(work, placements)
    if isinstance(work, Costs):
        placed = _measured_head(work, next(iter(tried.values())), head, held, collective, slowdown)
    else:
        placed = _given_head(work, head, held, collective, slowdown)
    stages = problems_of(without_parts(work) if isinstance(work, Costs) else work, num_microbatches, memory, tried, objective)
    whole = {name: _with_costs(problem, placed.whole(problem.costs), placed, memory) for name, problem in stages.items()}
    parts = {name: work if isinstance(work, Costs) else placed.divided(problem.costs, work.num_ranks) for name, problem in stages.items()}
    divided = {name: _with_costs(problem, parts[name], placed, memory) for name, problem in stages.items()}
    rooms = [(stages if more == 0 else _leaner(stages, divided, more)) for more in (ROOMS if memory is not None else ROOMS[:1])]
    plans = [problems for problems in (whole, *rooms) if problems]
    found = [searches.best_of(problems, budget.share(len(plans))) for problems in plans]
    when_whole = min(choice.solved.bound for choice in found[0])
    when_divided = min(problem.bound() for problem in divided.values())
    played = [way for choice in found[0] for way in _whole(choice, when_whole)]
    for choice in (choice for choices in found[1:] for choice in choices):
        played += _divided(choice, stages[choice.name], divided[choice.name], when_divided)
    if not played:
        raise InputError(f"no schedule fits with the head whole or divided: {found[0][0].solved.reason or 'raise the memory'}")
    ways = [[way for way in played if way.algorithm == algorithm] for algorithm in NAMES]
    return HeadPlan(
        tuple(min(same, key=lambda way: (way.time, way.makespan)) for same in ways if same),
        min(when_whole, when_divided),
        Objective.named(objective),
        searches.interrupted,
    )


def _given_head(work: Workload, head: Sequence[float] | None, held: float, collective: float, slowdown: float) -> Head:
    """The head beside the work of ranks."""
    if head is None:
        raise InputError("a head beside the work of ranks needs its times in ms: give head=(forward, for the input, for the weights)")
    return Head((head[0], head[1], head[2]), held * work.held_after_f[-1], collective, slowdown)


def _measured_head(
    costs: Costs, placement: Placement, head: Sequence[float] | None, held: float, collective: float, slowdown: float
) -> Head:
    """The head whose parts are in `costs`, of which nothing may be said besides but what `slowdown` parts have."""
    costs.require_alike("plan_head")
    costs.require_fit(placement, "the placement")
    measured = Head.of_parts(costs, placement, slowdown)
    given = [name for name, value in (("head", head is not None), ("held", held), ("collective", collective)) if value]
    if given:
        raise InputError(f"the costs tell what the parts of the head take and hold: leave {' and '.join(given)} out")
    return measured


def _with_costs(stages: Problem, costs: Costs, head: Head, memory: float | Limits | None) -> Problem:
    """The problem for stages as one with the head in the costs, which is given room where there is room for everything."""
    limits = stages.limits if memory is not None else room_for_all(stages.placement, costs, stages.num_microbatches)
    return replace(stages, costs=costs, limits=limits, head=head)


class _Searches:
    """Searches one after another, none of them any longer once Ctrl-C came."""

    def __init__(self, seed: int, progress: ProgressCallback | None) -> None:
        self.seed, self.progress, self.interrupted = seed, progress, False

    def best_of(self, problems: Mapping[str, Problem], budget: Budget) -> tuple[Choice, ...]:
        """The best on each placement."""
        left = Budget(0.0, budget.evaluations and 0) if self.interrupted else budget
        found = plan_problems(problems, left, self.seed, self.progress)
        self.interrupted |= found.interrupted
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


def _whole(choice: Choice, bound: Bound) -> Iterator[PlannedHead]:
    """The answer with a whole head, if there is one."""
    if choice.solved.schedule is not None:
        yield PlannedHead(0, choice.solved, bound)


def _divided(choice: Choice, stages: Problem, divided: Problem, bound: Bound) -> Iterator[PlannedHead]:
    """The answer for stages alone with the head divided by either algorithm, as far as that fits."""
    if choice.solved.schedule is None:
        return
    alone = replace(choice.solved.schedule, overlaps=frozenset())
    for algorithm in (1, 2):
        schedule = with_vocabulary(alone, algorithm, stages.costs)
        if fits_memory(schedule, divided):
            solved = Solved.of(divided, divided.bound(), schedule, choice.solved.seconds, choice.solved.how)
            yield PlannedHead(algorithm, solved, bound)
