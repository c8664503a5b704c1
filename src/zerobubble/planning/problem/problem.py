"""What is to be planned and what comes out: a problem on one placement, a workload for any, a solved problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

from zerobubble.arguments import WHOLE, Wanted, optional, require
from zerobubble.bounds import Bound, Bounds, bounds_again, bounds_divided, lower_bounds, shortage, shortage_again
from zerobubble.costs import NONE, Costs, Level, Limits
from zerobubble.display import Displayed
from zerobubble.errors import InputError, ParseError, ScheduleError, line, reading, whole
from zerobubble.ir import Kind, Placement, Schedule
from zerobubble.kinds import traits_of
from zerobubble.offload import HostLink, RankOffloads, offload_faults, play_offloads
from zerobubble.offload.form import link_from_dict, link_to_dict, offloads_from_list, offloads_to_list
from zerobubble.planning.problem.head import Head, has_parts, parts_on
from zerobubble.planning.problem.recomputation import Recomputation
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import Workload
from zerobubble.simulation import Metrics, memory_faults, metrics, peak_memory, simulate
from zerobubble.timeline import Timeline
from zerobubble.units import counted, show_ms

MOST_TOGETHER = 2**62
"""The most that the search can add up."""

PARTS_OF_HEAD = tuple(dict.fromkeys((*traits_of(Kind.S).times, *traits_of(Kind.T).times)))
"""The columns of costs with what a rank's part of a divided head takes."""


class Objective(StrEnum):
    """What to make short: the longest span of a rank (no barrier at the optimizer step), or the makespan."""

    SPAN = "span"
    MAKESPAN = "makespan"

    def of(self, played: Timeline | Metrics) -> int:
        """The time that counts of a schedule that was played, in ns."""
        return played.span if self is Objective.SPAN else played.makespan

    @classmethod
    def named(cls, name: str) -> Objective:
        """The objective by its name; raises `InputError` for any other."""
        if name not in list(cls):
            raise InputError(f"there is no objective {name!r}: give {' or '.join(cls)}")
        return cls(name)


@dataclass(frozen=True, slots=True, repr=False)
class Problem(Displayed):
    """Find the shortest schedule of `num_microbatches` on `placement` within `limits`, stages as in `costs`.

    Where the costs came from something larger, a plan keeps it: `workload` is the work of each rank that the stages share equally, and
    `layers_per_stage` says how many layers of the model each stage has, `layer_names` what all of these are called, where they have names.
    None of it changes the answer. Where weights are `sharded`, `zb.plan` chooses among the shortest by their gathers. With
    `recomputation` the costs have the columns of the levels that its stages have, and bounds hold for all that they may have. With a `head`
    the costs have it too, whole in the last stage or divided over the ranks. With a link to the `host`, ranks may move
    over it what waits for its backward pass, and bounds hold for any memory.
    Raises `InputError` for parts that do not fit each other, and for a placement of several routes.

    >>> import zerobubble as zb
    >>> zb.planning.Problem(zb.Placement.vee(4), 8, zb.Costs.uniform(8), zb.Limits((8_000_000,) * 4))
    <Problem on vee over 4 ranks: 8 microbatches for the shortest span>
    """

    placement: Placement
    num_microbatches: int
    costs: Costs
    limits: Limits
    objective: Objective = Objective.SPAN
    workload: Workload | None = None
    layers_per_stage: tuple[int, ...] = ()
    layer_names: tuple[str, ...] = ()
    sharded: Sharded | None = None
    recomputation: Recomputation | None = None
    head: Head | None = None
    host: HostLink | None = None

    def __post_init__(self) -> None:
        for name, wanted in _PARTS.items():
            require(f"{name} of a Problem", getattr(self, name), wanted)
        ranks, stages = self.placement.num_ranks, self.placement.num_stages
        if len(self.placement.routes) > 1:
            raise InputError(f"plans are made for one route, the placement {self.placement.name!r} has {len(self.placement.routes)}")
        if self.num_microbatches < 1:
            raise InputError(f"a plan needs at least 1 microbatch, got {self.num_microbatches}")
        self.costs.require_fit(self.placement, "the placement")
        if self.costs.shares and len(self.costs.shares) != self.num_microbatches:
            raise InputError(
                f"a plan for {self.num_microbatches} microbatches needs as many shares, the costs have {len(self.costs.shares)}"
            )
        if len(self.limits.memory) != ranks:
            raise InputError(f"the placement has {ranks} ranks, the limits describe {len(self.limits.memory)}")
        if self.layers_per_stage and len(self.layers_per_stage) != stages:
            raise InputError(f"the placement has {stages} stages, the cut gives layers to {len(self.layers_per_stage)}")
        if self.layer_names and len(self.layer_names) != sum(self.layers_per_stage):
            raise InputError(f"the stages have {sum(self.layers_per_stage)} layers, and there are names of {len(self.layer_names)}")
        if max(self.work, round(self._total_share * sum((*self.costs.held_after_f, *self.costs.held_after_b)))) > MOST_TOGETHER:
            raise InputError(f"the times of all passes together, and the bytes they hold, must stay below {MOST_TOGETHER:.0e} ns or bytes")
        if self.recomputation is not None:
            self.recomputation.require_fit(self.costs)
        if self.head is not None and self.workload is None and self.has_divided_head:
            parts = Head.of_parts(self.costs, self.placement, self.head.slowdown)
            if parts != self.head:
                raise InputError(f"the costs have the parts of another head, {parts._summary()}: give that with Head.of_parts")
        if self.workload is not None and self._costs_of(self.workload) != self._costs_alone:
            raise InputError("the workload gives other costs on this placement than those of the problem: leave the workload out")
        if self.sharded is not None:
            self.sharded.sizes(self.placement)  # raises where they are those of other stages

    def _summary(self) -> str:
        where = f"{self.placement.name} over {counted(self.placement.num_ranks, 'rank')}"
        return f"on {where}: {counted(self.num_microbatches, 'microbatch')} for the shortest {self.objective}"

    def _details(self) -> Iterator[str]:
        yield from (str(self.placement), str(self.limits), *str(self.costs).split("\n"))

    @property
    def _costs_alone(self) -> Costs:
        return replace(self.costs, shares=(), further=self.costs.further if self.recomputation is None else ())

    def _costs_of(self, workload: Workload) -> Costs:
        """What the stages cost for the work of the ranks, with the head, where there is one."""
        costs = workload.costs(self.placement)
        if self.head is None:
            return costs
        return self.head.divided(costs, self.placement.num_ranks) if self.has_divided_head else self.head.whole(costs)

    @property
    def has_divided_head(self) -> bool:
        """Whether ranks divide the head by its vocabulary: the costs have what their parts take."""
        return self.head is not None and has_parts(self.costs)

    def recomputes(self, stage: int) -> bool:
        """Whether forwards of `stage` may be computed again."""
        return self.recomputation is not None and self.recomputation.chosen[stage] != NONE

    def with_levels(self, chosen: Sequence[Level]) -> Problem:
        """The problem with these levels of its stages, of those that may be chosen."""
        assert self.recomputation is not None, "only problems with recomputation have levels"
        return replace(self, costs=self.costs.with_recompute(chosen), recomputation=replace(self.recomputation, chosen=tuple(chosen)))

    @property
    def first_layers(self) -> tuple[str, ...]:
        """The names of the layers with which the stages behind the first begin, for `zb.split(cuts=...)`; empty where layers have none."""
        starts = list(accumulate(self.layers_per_stage))[:-1]
        return tuple(self.layer_names[start] for start in starts) if self.layer_names else ()

    @property
    def num_passes(self) -> int:
        """Passes of a schedule with B and W apart."""
        return 3 * self.placement.num_stages * self.num_microbatches

    @property
    def work(self) -> int:
        """The time of all passes of all ranks, in ns."""
        columns = [self.costs.forward, self.costs.backward, self.costs.weight]
        if self.costs.shares:
            return sum(round(time * share) for share in self.costs.shares for times in columns for time in times)
        if self.has_divided_head:
            parts = parts_on(self.placement)
            columns += [tuple(self.costs.column(name)[stage] for stage in parts) for name in PARTS_OF_HEAD]
        return self.num_microbatches * sum(map(sum, columns))

    @property
    def _total_share(self) -> float:
        """All microbatches, counted in microbatches of share 1."""
        return sum(self.costs.shares) if self.costs.shares else self.num_microbatches

    def bubble(self, time: float) -> float:
        """The share of rank time that is idle when the objective is `time`."""
        return 1 - self.work / (self.placement.num_ranks * time) if time else 0.0

    def least_bubble(self, bound: Bound) -> float:
        """No schedule has a smaller bubble rate, by a lower bound on the time; the time that overlapped passes hide makes none negative."""
        return max(0.0, self.bubble(bound.time))

    @property
    def bytes_of_whole_head(self) -> int:
        """What the last stage keeps for a head that is whole on it, in bytes."""
        return 0 if self.head is None or self.has_divided_head else round(self.head.held)

    @property
    def microbatch_bytes(self) -> tuple[int, ...]:
        """Per rank, the bytes of one microbatch in all its stages without a head, in which memory is counted."""
        return microbatch_bytes(self.placement, self.costs, self.bytes_of_whole_head)

    @property
    def shortage_reason(self) -> str:
        """Why nothing can run: the ranks that cannot hold one microbatch, and what they miss; empty where one fits, or goes to the host."""
        if self.host is not None:
            return ""
        sizes = () if self.workload is None else self.microbatch_bytes
        if self.recomputation is not None:
            return shortage_again(self.placement, self.costs, self.limits, [(level,) for level in self.recomputation.chosen], sizes)
        return shortage(self.placement, self.costs, self.limits, sizes)

    def bounds(self) -> Bounds:
        """Proven lower bounds on span and makespan; where nothing can run, those for unlimited memory.

        With recomputation they hold for every choice of levels that may be chosen, by stage and microbatch.
        """
        if self.recomputation is not None:
            return bounds_again(self.placement, self.num_microbatches, self.costs, self.limits, self.recomputation.offered)
        limits = None if self.shortage_reason or self.host is not None else self.limits
        if self.has_divided_head:
            return bounds_divided(self.placement, self.num_microbatches, self.costs, limits)
        return lower_bounds(self.placement, self.num_microbatches, self.costs, limits)

    def bound(self) -> Bound:
        """The proven lower bound on the objective."""
        bounds = self.bounds()
        return bounds.span if self.objective is Objective.SPAN else bounds.makespan

    @property
    def messages(self) -> int:
        """Messages between ranks in one step: an activation and a gradient per microbatch and border between ranks."""
        borders = sum(here != there for here, there in pairwise(self.placement.routes[0]))
        return 2 * self.num_microbatches * borders


_PARTS: dict[str, Wanted | type] = {
    "placement": Placement,
    "num_microbatches": WHOLE,
    "costs": Costs,
    "limits": Limits,
    "objective": Objective,
    "sharded": optional(Sharded),
    "recomputation": optional(Recomputation),
    "head": optional(Head),
    "host": optional(HostLink),
}
"""What the parts of a `Problem` must be."""


class Status(StrEnum):
    """How much is known: nothing can be shorter, this can be run, nothing can be run."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, repr=False)
class Solved(Displayed):
    """The best schedule found, and how far from perfect it can be at most.

    `time` is the problem's objective in ns and `bound` a proven lower bound on it. `how` names what found the schedule in `seconds`,
    `reason` says why there is none. Of two that are equally short, the one with the smaller `makespan` in ns is better. `offloads` are what
    each rank moves to the host, empty where nothing goes there.
    """

    problem: Problem
    status: Status
    bound: Bound
    schedule: Schedule | None
    time: int | None
    seconds: float
    how: str
    reason: str = ""
    makespan: int | None = None
    offloads: tuple[RankOffloads, ...] = ()

    @classmethod
    def of(
        cls, problem: Problem, bound: Bound, schedule: Schedule, seconds: float, how: str, offloads: Sequence[RankOffloads] = ()
    ) -> Solved:
        """`schedule` as an answer to `problem`, checked and played anew, with what its ranks move to the host.

        Raises `ScheduleError` when it breaks the rules or the limits.
        """
        played = _played(problem, schedule, offloads)
        time = problem.objective.of(played)
        if schedule.has_divided_head != problem.has_divided_head:
            has, of = ("a divided head", "a whole one or none") if schedule.has_divided_head else ("no divided head", "one")
            raise InputError(f"the schedule has {has}, and the problem {of}: plan with the head that the schedule has")
        if offloads:
            faults = offload_faults(schedule, problem.costs, offloads, problem.limits)
        else:
            faults = memory_faults(schedule, problem.costs, problem.limits)
        if faults:
            raise ScheduleError(faults, schedule.name)
        status = Status.OPTIMAL if time == bound.time else Status.FEASIBLE
        return cls(problem, status, bound, schedule, time, seconds, how, makespan=played.makespan, offloads=tuple(offloads))

    def _summary(self) -> str:
        where = f"on {self.problem.placement.name} over {counted(self.problem.placement.num_ranks, 'rank')}"
        if self.schedule is None or self.time is None or self.bubble is None:
            return f"{where}: {self.status}, {self.reason}"
        figures = f"{self.problem.objective} {show_ms(self.time)}, bubble {100 * self.bubble:.2f} % (bound {100 * self.least_bubble:.2f} %)"
        return f"{where}: {self.how}, {figures}, {self.status}"

    def _details(self) -> Iterator[str]:
        yield f"no schedule takes less than {show_ms(self.bound.time)}: {self.bound.reason}"
        if self.schedule is not None:
            yield from str(self.schedule).split("\n")

    @cached_property
    def timeline(self) -> Timeline | None:
        """What runs when, copies to the host and back included; None without a schedule."""
        if self.schedule is None:
            return None
        played = _played(self.problem, self.schedule, self.offloads)
        return played if isinstance(played, Timeline) else simulate(self.schedule, self.problem.costs)

    @property
    def gap(self) -> float | None:
        """How much longer than the bound the schedule is, as a share of the bound; None without a schedule."""
        return None if self.time is None else self.time / self.bound.time - 1 if self.bound.time else 0.0

    @property
    def bubble(self) -> float | None:
        """The bubble rate of the objective; None without a schedule."""
        return None if self.time is None else self.bubble_at(self.time)

    def bubble_at(self, time: int) -> float:
        """The share of rank time that is idle if the schedule takes `time` ns. Time that overlapped steps hide is no work."""
        if self.schedule is None or not self.schedule.overlaps or self.timeline is None:
            return self.problem.bubble(time)
        return 1 - self.timeline.work / (self.timeline.num_ranks * time) if time else 0.0

    @property
    def bounds(self) -> Bounds:
        """Proven lower bounds on span and makespan: on the objective the `bound` of the answer, on the other what the problem tells."""
        known = self.problem.bounds()
        if self.problem.objective is Objective.MAKESPAN:
            return known._replace(makespan=self.bound)
        return Bounds(self.bound, max(known.makespan, self.bound, key=lambda bound: bound.time))

    @property
    def least_bubble(self) -> float:
        """No schedule has a smaller bubble rate of the objective."""
        return self.problem.least_bubble(self.bound)

    @property
    def peak_microbatches(self) -> float | None:
        """The most activations a rank holds, counted in microbatches of all its stages without a head; None without a schedule.

        A stage counts with the most that it ever holds of a microbatch: what F saved, or what B leaves for W where that is more.
        """
        if self.schedule is None:
            return None
        costs = self.problem.costs
        most = replace(costs, held_after_f=tuple(map(max, costs.held_after_f, costs.held_after_b)))
        sizes = microbatch_bytes(self.problem.placement, most, self.problem.bytes_of_whole_head)
        return max(peak / size for peak, size in zip(self.peaks, sizes, strict=True))

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes that each rank holds on its device; empty without a schedule."""
        if self.offloads:
            return tuple(rank.peak_bytes for rank in self.offloads)
        return () if self.schedule is None else peak_memory(self.schedule, self.problem.costs)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of a plan; `from_dict` reads it back. Raises `InputError` when there is no schedule."""
        if self.schedule is None or self.timeline is None:
            raise InputError(f"there is no plan to write: {self.reason}")
        return {
            "format": f"zerobubble plan {self._version}",
            "status": self.status.value,
            "objective": self.problem.objective.value,
            "bound": {"time": self.bound.time, "reason": self.bound.reason},
            "figures": {
                "span": self.timeline.span,
                "makespan": self.timeline.makespan,
                "bubble_span": self.timeline.bubble_span,
                "bubble_makespan": self.timeline.bubble_makespan,
                "peak_bytes": list(self.peaks),
                "messages": self.problem.messages,
            },
            "how": self.how,
            "seconds": self.seconds,
            "costs": self.problem.costs.to_dict(),
            "limits": list(self.problem.limits.memory),
            "workload": self.problem.workload and self.problem.workload.to_dict(),
            "layers_per_stage": list(self.problem.layers_per_stage),
            "layer_names": list(self.problem.layer_names),
            "sharded": self.problem.sharded and self.problem.sharded.to_dict(),
            "recomputation": self.problem.recomputation and self.problem.recomputation.to_dict(),
            "head": self.problem.head and self.problem.head.to_dict(),
            "host": self.problem.host and link_to_dict(self.problem.host),
            "offloads": offloads_to_list(self.offloads),
            "schedule": self.schedule.to_dict(),
        }

    @property
    def _version(self) -> int:
        """The oldest version of the JSON form that says all."""
        if self.problem.head is not None or self.problem.host is not None:
            return 4
        return 2 if self.problem.recomputation is None else 3

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Solved:
        """Read the JSON form; status and figures are found anew from schedule, costs and bound.

        Raises `ParseError` for a part that is missing or malformed, a schedule that cannot run, and a bound that it beats.
        """
        with reading("plan", data, newest=4):
            schedule = Schedule.from_dict(data["schedule"])
            problem = _problem_of(schedule, data)
            bound, seconds = Bound(whole(data["bound"]["time"]), line(data["bound"]["reason"])), float(data["seconds"])
            if not isfinite(seconds):
                raise ParseError(f"it took {seconds} seconds, which is not a finite number")
            try:
                offloads = offloads_from_list(data["offloads"], schedule, problem.costs) if problem.host is not None else ()
                solved = cls.of(problem, bound, schedule, seconds, line(data["how"]), offloads)
            except ScheduleError as error:
                raise ParseError(str(error)) from error
            if solved.time is not None and solved.time < bound.time:
                raise ParseError(f"its schedule takes {solved.time} ns, less than the bound of {bound.time} ns: no bound of this problem")
        return solved


def _played(problem: Problem, schedule: Schedule, offloads: Sequence[RankOffloads]) -> Metrics | Timeline:
    """What `schedule` takes, with the copies of `offloads` where there are some; raises as those do."""
    if not offloads:
        return metrics(schedule, problem.costs)
    if problem.host is None:
        raise InputError("ranks move something to the host, and the problem has no link to it: give its host")
    return play_offloads(schedule, problem.costs, offloads, problem.host)


def _problem_of(schedule: Schedule, data: dict[str, Any]) -> Problem:
    """The problem in the JSON form of a plan whose schedule is `schedule`."""
    workload, sharded, again, head, host = (data.get(name) for name in ("workload", "sharded", "recomputation", "head", "host"))
    return Problem(
        schedule.placement,
        schedule.num_microbatches,
        Costs.from_dict(data["costs"]),
        Limits(tuple(map(whole, data["limits"]))),
        Objective(data["objective"]),
        None if workload is None else Workload.from_dict(workload),
        tuple(map(whole, data.get("layers_per_stage", ()))),
        tuple(map(line, data.get("layer_names", ()))),
        None if sharded is None else Sharded.from_dict(sharded),
        None if again is None else Recomputation.from_dict(again),
        None if head is None else Head.from_dict(head),
        None if host is None else link_from_dict(host),
    )


def microbatch_bytes(placement: Placement, costs: Costs, of_head: int = 0) -> tuple[int, ...]:
    """Per rank, the bytes that one microbatch saves in F in all its stages together, at least 1; of the last stage but those `of_head`.

    A stage that saves nothing in F counts with what its B leaves for W. Of several routes the one that saves most counts.
    """
    saved = (*costs.held_after_f[:-1], max(0, costs.held_after_f[-1] - of_head))
    held = [0] * placement.num_ranks
    for route in placement.routes:
        here = [0] * placement.num_ranks
        for rank, after_f, after_b in zip(route, saved, costs.held_after_b, strict=True):
            here[rank] += after_f or after_b
        held = list(map(max, held, here))
    return tuple(max(1, count) for count in held)
