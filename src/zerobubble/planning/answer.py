"""The result of planning: a `Plan` with the choices it was compared with and what each axis of the problem saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from math import isfinite
from textwrap import fill
from typing import Any, TypeVar

from zerobubble.bounds import Bound, Bounds
from zerobubble.bounds.overlap import fusing_saves
from zerobubble.costs import Costs, Level, Limits
from zerobubble.display import WIDEST, Displayed, clipped
from zerobubble.errors import InputError, ParseError, ScheduleError, line, reading, whole
from zerobubble.ir import Placement, Schedule
from zerobubble.offload import RankOffloads, offload_faults, play_offloads
from zerobubble.offload.choice import with_other_costs
from zerobubble.offload.offloads import link_from_dict, offloads_from_list, offloads_to_list
from zerobubble.partition import LayerCut, layers_from_dict, layers_to_dict
from zerobubble.planned_run import Planned, PlannedRun, not_run
from zerobubble.planning.problem.head import Head
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.problem.recomputation import Recomputation
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import Workload
from zerobubble.planning.table import NOTE_WIDTH, Line, comparison_table
from zerobubble.schedules import SCHEDULES
from zerobubble.simulation import Metrics, memory_faults, metrics, peak_memory, period, simulate
from zerobubble.timeline import Timeline
from zerobubble.units import counted, show_ms, show_percent

CUT_SHORT = "Ctrl-C ended the search early: this is the best plan found until then."


class Status(StrEnum):
    """The status of a plan: optimal, feasible, or infeasible."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"


class Saving(Displayed):
    """The savings from one axis of a plan, such as recomputation or offload. `str` gives sentences."""

    axis: str
    """Name of the axis, the key of `to_dict` in the JSON form of a plan."""

    def to_dict(self) -> dict[str, Any]:
        """The figures in JSON."""
        raise NotImplementedError

    def table(self, found: Plan) -> str:
        """The choices of the plan `found` as a table."""
        return found.comparison


Kind = TypeVar("Kind", bound=Saving)


@dataclass(frozen=True, repr=False)
class Choice(Displayed):
    """One choice of a plan, such as a placement: its best plan and a sentence that says why it won or lost.

    Attributes:
        name: The name of the choice, such as "vee".
        plan: Its best plan.
        note: The sentence.
        searched: Whether the plan was searched for; otherwise it is the best published schedule that fits.
    """

    name: str
    plan: Plan
    note: str
    searched: bool = False

    @property
    def is_result(self) -> bool:
        """Whether the plan was searched for or is proven optimal."""
        return self.searched or self.plan.status is Status.OPTIMAL

    def _summary(self) -> str:
        return f"{self.name}: {self.note}"


@dataclass(frozen=True, repr=False)
class Plan(Displayed, Planned):
    """The best schedule found for a problem, and its optimality gap.

    `zb.plan` returns one, `zb.Pipeline` plays it, and `str` gives a table of its candidates with reasons.

    Attributes:
        problem: The `Problem` that the plan solves.
        status: Whether the schedule is optimal, feasible, or there is none.
        bound: A proven lower bound on `time`, with its reason.
        order: The schedule; None if nothing fits. `schedule` raises instead.
        time: The problem's objective in ns; None without a schedule.
        seconds: The time of the search in seconds, without `compiling`.
        how: What found the schedule, such as the name of a published one.
        reason: Why there is no schedule; empty if there is one.
        makespan: The makespan of the schedule in ns. Among equally short schedules, the one with the smaller makespan wins.
        offloads: What each rank moves to the host; empty without offload.
        choices: The candidates, such as placements, without gathers and offload: the best first, those on which nothing can run last. A
            plan read from a file has none.
        savings: What each axis saved.
        simple: A published schedule that is nearly as short; None if there is none.
        compiling: The time to compile the search in seconds; 0 if it was compiled before.
        interrupted: Whether Ctrl-C ended the search.
        enough_seconds: If the budget ended before anything was searched, a budget in seconds that should suffice; else 0.
    """

    problem: Problem
    status: Status
    bound: Bound
    order: Schedule | None
    time: int | None
    seconds: float
    how: str
    reason: str = ""
    makespan: int | None = None
    offloads: tuple[RankOffloads, ...] = ()
    choices: tuple[Choice, ...] = ()
    savings: tuple[Saving, ...] = ()
    simple: Plan | None = None
    compiling: float = 0.0
    interrupted: bool = False
    enough_seconds: int = 0

    @classmethod
    def from_schedule(
        cls, problem: Problem, bound: Bound, schedule: Schedule, seconds: float, how: str, offloads: Sequence[RankOffloads] = ()
    ) -> Plan:
        """Makes a plan of `schedule` and its offloads, after verifying and playing it in plain Python.

        Args:
            problem: The problem that the schedule solves.
            bound: A proven lower bound on its time; the plan is optimal if it meets the bound.
            schedule: The order of passes.
            seconds: The time of the search in seconds.
            how: What found the schedule, such as the name of a published one.
            offloads: What each rank moves to the host; empty without offload.

        Raises `ScheduleError` if it breaks the rules or the limits.
        """
        offloads = tuple(offloads) if any(rank.offloads for rank in offloads) else ()
        played = _played(problem, schedule, offloads)
        time = problem.objective.measure(played)
        if time > bound.time and not offloads:  # a span that meets its bound is the period
            time = problem.objective.time_of(schedule, problem.costs, played)
        if schedule.has_divided_head != problem.has_divided_head:
            has, needs = ("a divided head", "a whole one or none") if schedule.has_divided_head else ("no divided head", "one")
            raise InputError(
                "the schedule has {has}, the problem has {needs}", has=has, needs=needs, remedy="plan with the head that the schedule has"
            )
        if offloads:
            faults = offload_faults(schedule, problem.costs, offloads, problem.limits)
        else:
            faults = memory_faults(schedule, problem.costs, problem.limits)
        if faults:
            raise ScheduleError(faults, schedule.name)
        status = Status.OPTIMAL if time == bound.time else Status.FEASIBLE
        return cls(problem, status, bound, schedule, time, seconds, how, makespan=played.makespan, offloads=offloads)

    def in_other(self, problem: Problem, suffix: str) -> Plan | None:
        """The order and offloads as a plan for another `problem`, not bounded yet, with `suffix` after `how`; None if they do not fit."""
        how = f"{self.how.removesuffix(suffix)}{suffix}"
        try:
            offloads = with_other_costs(self.schedule, problem.costs, problem.limits, self.offloads) if self.offloads else ()
            return Plan.from_schedule(problem, Bound(0, ""), self.schedule, self.seconds, how, offloads)
        except (InputError, ScheduleError):
            return None

    @property
    def schedule(self) -> Schedule:
        """The schedule; raises `InputError` with the reason if there is none."""
        if self.order is None:
            remedy = "raise the memory limit, or allow recomputation or offload"
            raise InputError("no schedule fits: {reason}", reason=self.reason, remedy=remedy)
        return self.order

    @property
    def to_run(self) -> PlannedRun:
        """What `zb.Pipeline` runs of this plan; raises `InputError` with the reason if there is no schedule."""
        problem, levels = self.problem, tuple(level.name for level in self.levels)
        gathered_bytes = None if problem.sharded is None else problem.sharded.memory
        is_sharded = problem.sharded is not None
        return PlannedRun(
            self.schedule, self.costs, problem.limits, levels, self.offloads, problem.first_layers, is_sharded, gathered_bytes
        )

    @property
    def costs(self) -> Costs:
        """Times and bytes of its passes."""
        return self.problem.costs

    @property
    def placement(self) -> Placement:
        """Which rank holds which stage."""
        return self.problem.placement

    @property
    def levels(self) -> tuple[Level, ...]:
        """Recompute level of each stage; empty without recomputation."""
        return () if self.problem.recomputation is None else self.problem.recomputation.chosen

    @property
    def head(self) -> Head | None:
        """The head that was planned along with the stages, None without one."""
        return self.problem.head

    @property
    def cut(self) -> LayerCut | None:
        """How the layers are cut into stages, None for a plan of stages or ranks."""
        return self.problem.cut

    @property
    def lower_bound(self) -> float:
        """Lower bound on the bubble rate over all placements tried."""
        with_schedule = [choice.plan for choice in self.choices if choice.plan.time is not None] or [self]
        return min(plan.least_bubble for plan in with_schedule)

    def with_winner(self, winner: Plan, *savings: Saving) -> Plan:
        """Returns the same search with `savings` and another `winner`, a plan that is not one of its choices."""
        names = ("choices", "seconds", "compiling", "interrupted", "enough_seconds")
        return replace(winner, savings=savings, **{name: getattr(self, name) for name in names})

    def saving(self, kind: type[Kind]) -> Kind | None:
        """The savings from the axis of `kind`; None if it was not planned."""
        return next((saving for saving in self.savings if isinstance(saving, kind)), None)

    def _summary(self) -> str:
        kind = "placement" if self.head is None else "head placement"
        among = f", best of {counted(len(self.choices), kind)}" if len(self.choices) > 1 else ""
        where = f"on {self.placement.name} over {counted(self.placement.num_ranks, 'rank')}{among}"
        if self.time is None or self.bubble is None:
            return f"{where}: {self.status}, {self.reason}"
        aim, bubbles = self.problem.objective, f"{show_percent(self.bubble)} of the {self.problem.objective}"
        figures = f"{aim} {show_ms(self.time)}, bubble {bubbles} (bound {show_percent(self.least_bubble)})"
        return f"{figures}, {self.status}: {self.how} {where}"

    def __repr__(self) -> str:
        return clipped(f"<Plan {self._summary()}>", ">", WIDEST)

    def _details(self) -> Iterator[str]:
        yield f"no schedule takes less than {show_ms(self.bound.time)}: {self.bound.reason}"
        if self.order is not None:
            yield from "\n".join([*map(_filled, self.not_run), str(self.order)]).split("\n")

    def __str__(self) -> str:
        if not self.choices:
            return super().__str__()
        table = self.savings[0].table(self) if self.savings else self.comparison
        remarks = [*self.not_run, self.simple_text, *map(str, self.savings), CUT_SHORT if self.interrupted else "", self.unsearched_text]
        return "\n\n".join([table, *map(_filled, filter(None, remarks))])

    @property
    def not_run(self) -> tuple[str, ...]:
        """One sentence for each pair of axes in the schedule that no pipeline can run together yet. Empty if `zb.Pipeline` can run it."""
        if self.order is None:
            return ()
        used = {"head": self.order.has_divided_head, "sharded": self.problem.sharded is not None, "host": bool(self.offloads)}
        return not_run([axis for axis, is_used in used.items() if is_used])

    @property
    def unsearched_text(self) -> str:
        """A sentence on a budget that ended before anything was searched; empty otherwise."""
        remedy = f"give {self.enough_seconds} s or more, or fewer placements"
        return f"The budget ended before anything was searched: {remedy}." if self.enough_seconds else ""

    @property
    def simple_text(self) -> str:
        """A sentence on the published schedule that is nearly as short; empty if there is none."""
        simple = self.simple
        if simple is None or simple.time is None or simple.timeline is None or self.time is None:
            return ""
        longer = show_percent(simple.time / self.time - 1 if self.time else 0.0)
        than = "as short as the winner" if longer == show_percent(0) else f"{longer} longer than the winner"
        bubbles = f"bubble {show_percent(simple.bubble_at(simple.time))}"
        stages = f" --stages-per-rank {simple.placement.stages_per_rank}" if SCHEDULES[simple.how].any_stages else ""
        slices = f" --set slices={simple.problem.slices}" if simple.problem.slices > 1 else ""
        shape = f"--ranks {simple.placement.num_ranks} --microbatches {simple.problem.whole_microbatches}{stages}{slices}"
        show = f"zerobubble show {simple.how} {shape}"
        return f"Simple choice: {simple.how}, a published schedule, is {than} ({bubbles}) and needs no file: {show}"

    @property
    def comparison(self) -> str:
        """The choices as a table, with the reasons."""
        lines = [Line(choice.name, choice.plan.cells, choice.note, choice.is_result) for choice in self.choices]
        best = self.choices[0].plan.problem
        recompute, fused = best.recomputation is not None, fusing_saves(best.costs)
        return comparison_table(lines, self.problem.objective, self.seconds, recompute=recompute, fused=fused)

    @property
    def cells(self) -> tuple[str, ...]:
        """The figures in a table, under `table.titles` without the name."""
        bound = show_percent(self.least_bubble)
        if self.order is None or self.gap is None:
            return "–", "–", bound, "–", "–", "–", "not made" if self.status is Status.FEASIBLE else "nothing fits"
        over_bound = "optimal" if self.status is Status.OPTIMAL else show_percent(self.gap)
        step = show_ms(self.time or 0), show_percent(self.bubble_at(self.time or 0))
        return *step, bound, over_bound, f"{self.peak_microbatches:.4g}", f"{self.problem.messages:,}", self.how

    @cached_property
    def timeline(self) -> Timeline | None:
        """When each pass runs, and each copy to and from the host; None without a schedule."""
        if self.order is None:
            return None
        played = _played(self.problem, self.order, self.offloads)
        return played if isinstance(played, Timeline) else simulate(self.order, self.problem.costs)

    @cached_property
    def period(self) -> int | None:
        """Time per step in ns if nothing global runs between steps; None without a schedule. With offload, it is the span."""
        if self.order is None or self.timeline is None:
            return None
        if self.problem.objective is Objective.PERIOD:
            return self.time
        return self.timeline.span if self.offloads else period(self.order, self.problem.costs)

    @property
    def gap(self) -> float | None:
        """Relative distance of the objective from the bound; None without a schedule."""
        return None if self.time is None else self.time / self.bound.time - 1 if self.bound.time else 0.0

    @property
    def bubble(self) -> float | None:
        """Bubble rate of the objective; None without a schedule."""
        return None if self.time is None else self.bubble_at(self.time)

    def bubble_at(self, time: int) -> float:
        """Share of rank time that is idle if the schedule takes `time` ns. Time that overlapped steps hide does not count as work."""
        if self.order is None or not self.order.overlaps or self.timeline is None:
            return self.problem.bubble(time)
        return self.timeline.bubble_at(time)

    @property
    def bounds(self) -> Bounds:
        """Lower bounds on span and makespan: the plan's `bound` for its objective, the problem's for the other."""
        known = self.problem.bounds()
        if self.problem.objective is Objective.MAKESPAN:
            return known._replace(makespan=self.bound)
        return Bounds(self.bound, max(known.makespan, self.bound, key=lambda bound: bound.time))

    @property
    def least_bubble(self) -> float:
        """Lower bound on the bubble rate of the objective."""
        return self.problem.least_bubble(self.bound)

    @property
    def peak_microbatches(self) -> float | None:
        """Peak memory of the fullest rank, in the microbatches in which memory is given; None without a schedule."""
        if self.order is None:
            return None
        return max(peak / size for peak, size in zip(self.peaks, self.problem.microbatch_bytes, strict=True))

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Peak memory of each rank in bytes; empty without a schedule."""
        if self.offloads:
            return tuple(rank.peak_bytes for rank in self.offloads)
        return () if self.order is None else peak_memory(self.schedule, self.problem.costs)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of a plan, which `from_dict` reads. Raises `InputError` if there is no schedule."""
        if self.order is None or self.timeline is None:
            raise InputError("there is no plan to write: {reason}", reason=self.reason)
        data = {
            "format": "zerobubble plan 1",
            "status": self.status.value,
            "objective": self.problem.objective.value,
            "bound": {"time": self.bound.time, "reason": self.bound.reason},
            "figures": {
                "period": self.period,
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
            "cut": self.problem.cut and _cut_to_dict(self.problem.cut),
            "sharded": self.problem.sharded and self.problem.sharded.to_dict(),
            "recomputation": self.problem.recomputation and self.problem.recomputation.to_dict(),
            "head": self.problem.head and self.problem.head.to_dict(),
            "host": self.problem.host and asdict(self.problem.host),
            "offloads": offloads_to_list(self.offloads),
            "schedule": self.schedule.to_dict(),
        }
        return data | {"proof": _checksum(data)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Reads `data`, as `to_dict` returns it; status and figures are recomputed from schedule, costs and bound.

        The bound of the file counts if neither it nor the problem has been changed since, and otherwise the bound that is computed here.
        Raises `ParseError` for a missing or malformed part, a schedule that cannot run, and a bound that the schedule beats.
        """
        with reading("plan", data, remedy="io.save_plan and `zerobubble plan -o` write files with all keys"):
            schedule = Schedule.from_dict(data["schedule"])
            problem = _problem_of(schedule, data)
            stated, seconds = Bound(whole(data["bound"]["time"]), line(data["bound"]["reason"])), float(data["seconds"])
            bound = _bound_of_file(data, stated, problem.bound())
            if not isfinite(seconds):
                raise ParseError("it took {seconds} seconds, which is not a finite number", seconds=seconds)
            try:
                offloads = offloads_from_list(data["offloads"], schedule, problem.costs) if problem.host and data["offloads"] else ()
                plan = cls.from_schedule(problem, bound, schedule, seconds, line(data["how"]), offloads)
            except ScheduleError as error:
                raise ParseError(str(error)) from error
            if plan.time is not None and plan.time < stated.time:
                raise ParseError(
                    "its schedule takes {time} ns, less than its bound of {bound} ns, so the bound is wrong",
                    time=plan.time,
                    bound=stated.time,
                )
        return plan


def _filled(text: str) -> str:
    """The lines of a text, wrapped to the width of notes."""
    return "\n".join(fill(line, NOTE_WIDTH, break_on_hyphens=False) for line in text.split("\n"))


def _played(problem: Problem, schedule: Schedule, offloads: Sequence[RankOffloads]) -> Metrics | Timeline:
    """Plays `schedule` with the copies of `offloads`, if there are any."""
    if not offloads:
        return metrics(schedule, problem.costs)
    if problem.host is None:
        raise InputError("the plan has offloads, but the problem has no link to the host", remedy="give the problem a host")
    return play_offloads(schedule, problem.costs, offloads, problem.host)


def _bound_of_file(data: dict[str, Any], stated: Bound, computed: Bound) -> Bound:
    """The bound that a file has `stated` if its parts are as planned, or the one `computed` here, with a remark on what was not proved."""
    proved = data["proof"] == _checksum(data)
    if stated.time <= computed.time:
        return computed
    if proved:
        return stated if stated.reason.endswith(_PROVED) else stated._replace(reason=f"{stated.reason}{_PROVED}")
    changed = f"its file states {show_ms(stated.time)}, but was changed after that was proved"
    return computed._replace(reason=f"{computed.reason} ({changed})")


_PROVED = " (proved when its file was made)"
_NOT_PROVED = ("status", "figures", "how", "seconds", "layer_names", "offloads", "proof")
"""The parts of a plan's file that its bound does not depend on; of the schedule it depends on the placement and number of microbatches."""


def _checksum(data: dict[str, Any]) -> str:
    """The checksum of the parts of a plan's file that its bound depends on."""
    parts = {name: part for name, part in data.items() if name not in _NOT_PROVED}
    parts["schedule"] = {name: part for name, part in data["schedule"].items() if name in ("placement", "microbatches")}
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _problem_of(schedule: Schedule, data: dict[str, Any]) -> Problem:
    """The problem in the JSON form of a plan with this schedule."""
    workload, sharded, recomputation, head, host = (data.get(name) for name in ("workload", "sharded", "recomputation", "head", "host"))
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
        None if recomputation is None else Recomputation.from_dict(recomputation),
        None if head is None else Head.from_dict(head),
        None if host is None else link_from_dict(host),
        None if data.get("cut") is None else _cut_from_dict(data, schedule.placement),
    )


def _cut_to_dict(cut: LayerCut) -> dict[str, Any]:
    """The layers of a cut and the bound on its slowest rank; the number of layers of each stage is stored with the plan."""
    speeds = {name: list(values) for name, values in (("speeds", cut.speeds), ("links", cut.links)) if values}
    return {**layers_to_dict(cut.layers), "bound": cut.bound, "reason": cut.reason, **speeds}


def _cut_from_dict(data: dict[str, Any], placement: Placement) -> LayerCut:
    """The cut in the JSON form of a plan."""
    cut, cuts = data["cut"], list(accumulate(map(whole, data["layers_per_stage"])))[:-1]
    layers = layers_from_dict(cut)  # refuses what is no JSON object
    speeds, links = (tuple(cut.get(name, ())) for name in ("speeds", "links"))
    return LayerCut(layers, placement, tuple(cuts), whole(cut["bound"]), line(cut["reason"]), speeds, links)
