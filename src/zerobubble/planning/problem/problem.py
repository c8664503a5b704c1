"""The problem to plan: costs, limits and axes on one placement, its validation, and its lower bounds.

A solver needs nothing but a `Problem`. Each axis is a field that is absent by default, and adds its columns to the costs and its term to
the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise

from zerobubble.arguments import WHOLE, Wanted, optional, require, takes, wrong
from zerobubble.bounds import (
    Bound,
    Bounds,
    bounds_with_divided_head,
    bounds_with_recompute,
    lower_bounds,
    shortage,
    shortage_with_recompute,
)
from zerobubble.bounds.overlap import remark_on_savings, saves_time, without_fused, without_savings
from zerobubble.costs import MAX_LIMIT, NONE, UNIT_BYTES, Costs, Level, Limits
from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.ir import Kind, Placement, Schedule
from zerobubble.kinds import traits_of
from zerobubble.offload import HostLink
from zerobubble.partition import Layer, LayerCut
from zerobubble.planning.problem.head import Head, has_parts, parts_on
from zerobubble.planning.problem.recomputation import Recomputation
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import RANK_BYTES, Workload
from zerobubble.simulation import Metrics, period, simulate
from zerobubble.timeline import Timeline
from zerobubble.units import counted, show_ms

MOST_TOGETHER = 2**62
"""The largest sum that the search can compute."""

PARTS_OF_HEAD = tuple(dict.fromkeys((*traits_of(Kind.S).times, *traits_of(Kind.T).times)))
"""Columns of costs with the times of a rank's part of a divided head."""

OF_LEVELS = ("recompute", "held_input")
"""Columns of costs with the times and bytes of the stages' recompute levels: see `Costs.with_recompute`."""


class Objective(StrEnum):
    """What to minimize: the time per step of consecutive steps, depending on what runs between them.

    - `PERIOD`: nothing global, as with plain optimizers and `PostValidation`. A rank begins its next step when it has ended this one.
    - `MAKESPAN`: all ranks meet, as for a norm of all gradients (`clip_grad_norm_`) or the overflow check of a `GradScaler`.
    """

    PERIOD = "period"
    MAKESPAN = "makespan"

    def measure(self, played: Timeline | Metrics) -> int:
        """The value that a search minimizes in `played`, a simulation, in ns. For the period it is the longest span, an upper bound."""
        return played.span if self is Objective.PERIOD else played.makespan

    def time_of(self, schedule: Schedule, costs: Costs, played: Timeline | Metrics) -> int:
        """The time per step in ns, if `schedule` was played under `costs` as `played`, with nothing but its passes."""
        return period(schedule, costs) if self is Objective.PERIOD else played.makespan

    @classmethod
    def named(cls, name: str) -> Objective:
        """The objective with the name `name`; raises `InputError` if there is none."""
        if name not in list(cls):
            raise wrong("objective", name, " or ".join(cls))
        return cls(name)


@takes()
@dataclass(frozen=True, slots=True, repr=False)
class Problem(Displayed):
    """A question to the planner: the shortest schedule on one placement, with given costs and within limits of memory.

    Attributes:
        placement: Which rank holds which stage, on one route.
        num_microbatches: The number of microbatches, or of slices if the costs have slices of a sequence.
        costs: The times and bytes of each stage.
        limits: The activation memory of each rank in bytes.
        objective: The time to minimize: the period or the makespan.
        workload: The work of each rank, which its stages share equally, if the costs were made from it; else None.
        layers_per_stage: The number of layers of each stage, from the cut or a file; empty if unknown.
        layer_names: The names of all layers, from the cut or a file; empty if unknown.
        sharded: The weights that FSDP2 shards: `zb.plan` then chooses among the shortest schedules by their gathers.
        recomputation: The levels of recomputation that stages may have. Costs have the columns of the chosen levels; bounds hold for all.
        head: The head of the model, whole in the last stage or divided over the ranks. The costs include it.
        host: The link over which ranks may offload waiting activations to the host. Bounds then hold for any memory.
        cut: The layers of each stage, if the costs were made from layers; else None.
        trains: Whether there are backward passes. By default, backward passes that all take no time mean inference.

    Raises `InputError` for parts that do not match, and for a placement of several routes.

    >>> import zerobubble as zb
    >>> zb.planning.Problem(zb.Placement.vee(4), 8, zb.Costs.uniform(8), zb.Limits((8_000_000,) * 4))
    <Problem on vee over 4 ranks: 8 microbatches for the shortest period>
    """

    placement: Placement
    num_microbatches: int
    costs: Costs
    limits: Limits
    objective: Objective = Objective.PERIOD
    workload: Workload | None = None
    layers_per_stage: tuple[int, ...] = ()
    layer_names: tuple[str, ...] = ()
    sharded: Sharded | None = None
    recomputation: Recomputation | None = None
    head: Head | None = None
    host: HostLink | None = None
    cut: LayerCut | None = None
    trains: bool = False

    def __post_init__(self) -> None:
        for name, wanted in _PARTS.items():
            require(f"{name} of a Problem", getattr(self, name), wanted)
        if self.cut is not None:
            names = tuple(layer.full_name for layer in self.cut.layers)
            object.__setattr__(self, "layers_per_stage", tuple(map(len, self.cut.stages)))
            object.__setattr__(self, "layer_names", names if all(names) else ())
        ranks, stages = self.placement.num_ranks, self.placement.num_stages
        if len(self.placement.routes) > 1:
            raise InputError(
                "a plan needs a placement of {expected} route, {placement!v} has {got}",
                argument="placement",
                got=len(self.placement.routes),
                expected=1,
                placement=self.placement.name,
                remedy="give a placement such as linear or vee",
            )
        if self.num_microbatches < 1:
            raise wrong("num_microbatches", self.num_microbatches, "at least 1")
        self.costs.require_fit(self.placement, "the placement")
        if self.num_microbatches % self.slices:
            raise InputError(
                "microbatches of {slices} slices need a multiple of {slices} numbers, got {got}",
                slices=self.slices,
                got=self.num_microbatches,
            )
        if self.costs.shares and len(self.costs.shares) != self.num_microbatches:
            raise InputError(
                "a plan for {num_microbatches} microbatches needs as many shares, the costs have {num_shares}",
                num_microbatches=self.num_microbatches,
                num_shares=len(self.costs.shares),
            )
        self.limits.require_ranks(ranks, "the placement")
        if self.layers_per_stage and len(self.layers_per_stage) != stages:
            raise InputError(
                "the placement has {stages} stages, the cut gives layers to {num_layers_per_stage}",
                stages=stages,
                num_layers_per_stage=len(self.layers_per_stage),
            )
        if self.layer_names and len(self.layer_names) != sum(self.layers_per_stage):
            raise InputError(
                "the stages have {got} layers, and there are names of {num_layer_names}",
                got=sum(self.layers_per_stage),
                num_layer_names=len(self.layer_names),
            )
        if max(self.work, round(self._total_share * sum((*self.costs.held_after_f, *self.costs.held_after_b)))) > MOST_TOGETHER:
            raise InputError(
                "the times of all passes together, and the bytes they hold, must stay below {most:.0e} ns or bytes", most=MOST_TOGETHER
            )
        if self.recomputation is not None:
            self.recomputation.require_fit(self.costs)
        if self.head is not None and self.workload is None and self.cut is None and self.has_divided_head:
            parts = Head.from_parts(self.costs, self.placement, self.head.slowdown)
            if parts != self.head:
                raise InputError(
                    "the costs have the parts of another head, {parts}", parts=parts._summary(), remedy="use Head.from_parts(costs)"
                )
        if self.workload is not None and self.with_head(self.workload.costs(self.placement)) != self._costs_alone:
            raise InputError("the workload has other costs on this placement than the problem", remedy="leave the workload out")
        if self.cut is not None and (other := self.with_head(self.cut.costs)) != self._costs_alone:
            raise InputError(
                "the layers have other costs of the stages than the problem{difference}",
                difference=self._difference(other),
                remedy="leave the cut out",
            )
        if self.sharded is not None:
            self.sharded.sizes(self.placement)  # raises if they are those of other stages

    def _summary(self) -> str:
        where = f"{self.placement.name} over {counted(self.placement.num_ranks, 'rank')}"
        microbatches = counted(self.whole_microbatches, "microbatch")
        slices = f" of {self.slices} slices" if self.slices > 1 else ""
        return f"on {where}: {microbatches}{slices} for the shortest {self.objective}"

    def _details(self) -> Iterator[str]:
        yield from (str(self.placement), str(self.limits), *str(self.costs).split("\n"))

    @property
    def _costs_alone(self) -> Costs:
        """The costs without the columns of shares of microbatches and of recompute levels."""
        left_out = () if self.recomputation is None else OF_LEVELS
        further = tuple(column for column in self.costs.further if column[0] not in left_out)
        return replace(self.costs, shares=(), slices=(), further=further)

    def _difference(self, of_layers: Costs) -> str:
        """The first number in which the costs of the layers differ from those of the problem, with the speed of its rank."""
        assert self.cut is not None, "the layers are those of a cut"
        for name in ("forward", "backward", "weight", "held_after_f", "held_after_b", "comm"):
            pairs = zip(of_layers.column(name), self.costs.column(name), strict=True)
            for stage, (ours, theirs) in enumerate(pairs):
                if ours != theirs:
                    rank = self.cut.placement.routes[0][stage]
                    where = f" on rank {rank} of speed {self.cut.speeds[rank]:g}" if self.cut.speeds else ""
                    return f" ({name} of stage {stage}{where} is {ours}, and {theirs} in the problem)"
        return ""

    def with_head(self, costs: Costs) -> Costs:
        """These `costs` of the stages with the head, if there is one."""
        if self.head is None:
            return costs
        return self.head.divided(costs, self.placement.num_ranks) if self.has_divided_head else self.head.whole(costs)

    @property
    def slices(self) -> int:
        """Number of slices of each microbatch."""
        return len(self.costs.slices) or 1

    @property
    def whole_microbatches(self) -> int:
        """Number of microbatches, each with all its slices."""
        return self.num_microbatches // self.slices

    @property
    def of_mean_slices(self) -> Problem:
        """The problem in which slices are microbatches of mean size, whose passes may run in any order."""
        return replace(self, costs=self.costs.mean_slice, workload=None, cut=None, trains=True) if self.costs.slices else self

    @property
    def has_divided_head(self) -> bool:
        """Whether ranks divide the head by vocabulary: the costs have the columns of its parts."""
        return self.head is not None and has_parts(self.costs)

    @property
    def is_forward_only(self) -> bool:
        """Whether only forwards take time: the schedule then has no other passes, as for inference."""
        work = self.workload or (self.costs if self.cut is None else self.cut.layers)  # the costs of stages may round to 0
        return self.head is None and not self.trains and is_forward_only(work)

    @property
    def plans_steps(self) -> bool:
        """Whether steps of several passes save time and are planned: only for F, B and W of equal microbatches."""
        others = (self.recomputation, self.head, self.host, self.sharded)
        return saves_time(self.costs) and self.costs.are_alike and all(other is None for other in others)

    @property
    def without_savings(self) -> Problem:
        """A problem with passes one at a time, shortened so that every schedule takes at most its time here.

        So its bounds hold here, too. If there are several such problems, returns the one with the strongest bound.
        """
        if not saves_time(self.costs):
            return self
        costs = without_savings(self.placement, self.costs)
        if self.recomputation is not None:  # a shorter F has a shorter R, and the times of R follow from the levels
            costs = [each.with_recompute(self.recomputation.chosen) for each in costs]
        ways = [replace(self, costs=each, workload=None, cut=None, trains=True) for each in costs]
        return max(ways, key=lambda way: way.bound().time) if len(ways) > 1 else ways[0]

    @property
    def remark_on_savings(self) -> str:
        """The costs that a bound from `without_savings` ignores, to append to its reason; empty if it ignores nothing."""
        return remark_on_savings(self.costs)

    def recomputes(self, stage: int) -> bool:
        """Whether forwards of `stage` may be recomputed."""
        return self.recomputation is not None and self.recomputation.chosen[stage] != NONE

    @property
    def recomputes_any(self) -> bool:
        """Whether forwards of any stage may be recomputed."""
        return any(map(self.recomputes, range(self.placement.num_stages)))

    def with_levels(self, chosen: Sequence[Level]) -> Problem:
        """The problem with a `chosen` level for each stage, of those offered."""
        assert self.recomputation is not None, "only problems with recomputation have levels"
        return replace(self, costs=self.costs.with_recompute(chosen), recomputation=replace(self.recomputation, chosen=tuple(chosen)))

    def offering(self, offered: Sequence[Level], *chosen: Level) -> Problem:
        """The problem with recomputation at the levels `offered`: the `chosen` ones, one for each stage or the same for all."""
        levels = chosen if len(chosen) > 1 else chosen * self.placement.num_stages
        return replace(self, costs=self.costs.with_recompute(levels), recomputation=Recomputation(tuple(offered), levels))

    @property
    def first_layers(self) -> tuple[str, ...]:
        """Names of the first layers of all stages but the first, for `zb.split(cuts=...)`; empty if layers have no names."""
        starts = list(accumulate(self.layers_per_stage))[:-1]
        return tuple(self.layer_names[start] for start in starts) if self.layer_names else ()

    @property
    def num_passes(self) -> int:
        """Passes of a schedule with B and W split."""
        return 3 * self.placement.num_stages * self.num_microbatches

    @property
    def work(self) -> int:
        """Total time of all passes on all ranks in ns, with a BW instead of B and W if it takes less."""
        least = without_fused(self.costs)
        columns = [least.forward, least.backward, least.weight]
        if self.has_divided_head:
            parts = parts_on(self.placement)
            columns += [tuple(self.costs.column(name)[stage] for stage in parts) for name in PARTS_OF_HEAD]
        if self.costs.shares:
            return sum(round(time * share) for share in self.costs.shares for times in columns for time in times)
        if self.costs.slices:
            kinds = (Kind.F, Kind.B, Kind.W)
            each = sum(sum(least.times(kind, stage)) for kind in kinds for stage in range(self.placement.num_stages))
            return self.whole_microbatches * each
        return self.num_microbatches * sum(map(sum, columns))

    @property
    def _total_share(self) -> float:
        """The number of microbatches, weighted by share."""
        return sum(self.costs.shares) if self.costs.shares else self.num_microbatches

    def bubble(self, time: float) -> float:
        """The share of rank time that is idle if the objective is `time`."""
        return 1 - self.work / (self.placement.num_ranks * time) if time else 0.0

    @property
    def has_speeds(self) -> bool:
        """Whether ranks run layers at different speeds: work then depends on the cut, and a smaller bubble is not always a shorter plan."""
        return self.cut is not None and bool(self.cut.speeds)

    @property
    def work_varies(self) -> bool:
        """Whether plans of the same model differ in work, with speeds or a head that may be divided: a smaller bubble may be no shorter."""
        return self.has_speeds or self.head is not None

    @property
    def at_first_level(self) -> Problem:
        """The problem with the first recompute level for all stages; bounds do not depend on the levels that are chosen."""
        return self if self.recomputation is None else self.with_levels(self.recomputation.offered[:1] * self.placement.num_stages)

    def least_bubble(self, bound: Bound) -> float:
        """Lower bound on the bubble rate from `bound`, one on the time; at least 0 even if overlapped passes hide time."""
        return max(0.0, self.bubble(bound.time))

    @property
    def bytes_of_whole_head(self) -> int:
        """Bytes that the last stage keeps for a whole head."""
        return 0 if self.head is None or self.has_divided_head else round(self.head.held)

    @property
    def microbatch_bytes(self) -> tuple[int, ...]:
        """Per rank, the most bytes that its stages hold of one microbatch, without a head: the unit of memory."""
        return microbatch_bytes(self.placement, self.costs, self.bytes_of_whole_head)

    @property
    def shortage_reason(self) -> str:
        """The ranks that cannot hold one microbatch, with what they lack; empty if one fits or can be offloaded."""
        if self.host is not None or self.is_forward_only:
            return ""
        sizes = self.microbatch_bytes
        if self.workload is None and set(self.costs.held_after_f) != {UNIT_BYTES} and set(sizes) != {RANK_BYTES}:
            sizes = ()
        if self.recomputation is not None:
            return shortage_with_recompute(
                self.placement, self.costs, self.limits, [(level,) for level in self.recomputation.chosen], sizes
            )
        return shortage(self.placement, self.costs, self.limits, sizes)

    def bounds(self, is_quick: bool = False) -> Bounds:
        """Lower bounds on span and makespan; without limits if nothing can run.

        With recomputation they hold for every choice of offered levels, by stage and microbatch. With a host they are those for unlimited
        memory. With sharded weights they ignore gathers, which only make a schedule longer. `is_quick` leaves out the slow part
        of the bounds with recomputation.
        """
        if self.is_forward_only:
            return bounds_forward(self.placement, self.num_microbatches, self.costs)
        limits = self.limits if self.host is None else None
        if self.recomputation is not None and not self.has_divided_head:
            memory = limits or Limits((MAX_LIMIT,) * self.placement.num_ranks)
            return bounds_with_recompute(self.placement, self.num_microbatches, self.costs, memory, self.recomputation.offered, is_quick)
        if self.has_divided_head:
            levels = () if self.recomputation is None else self.recomputation.offered
            limits = limits if levels or not self.shortage_reason else None
            return bounds_with_divided_head(self.placement, self.num_microbatches, self.costs, limits, levels)
        return lower_bounds(self.placement, self.num_microbatches, self.costs, None if self.shortage_reason else limits)

    def require_schedule(self, schedule: Schedule, noun: str, remedy: str = "leave it out") -> None:
        """Raise `InputError` unless `schedule`, a `noun` such as a seed, has this placement and number of microbatches.

        `remedy` is the advice of the error.
        """
        shape = schedule.placement.routes, schedule.num_microbatches, schedule.slices
        if shape != (self.placement.routes, self.num_microbatches, self.slices):
            message = "the {noun} {schedule!r} is for another placement, or another number of microbatches or slices"
            raise InputError(message, noun=noun, schedule=schedule.name, remedy=remedy)

    def measure(self, schedule: Schedule) -> int:
        """The time of `schedule` that a search minimizes, in ns."""
        return self.objective.measure(simulate(schedule, self.costs))

    def bound(self, is_quick: bool = False) -> Bound:
        """The lower bound on the objective; `is_quick` as in `bounds`."""
        bounds = self.bounds(is_quick)
        return bounds.span if self.objective is Objective.PERIOD else bounds.makespan

    @property
    def messages(self) -> int:
        """Messages between ranks in one step: an activation and a gradient per microbatch and boundary between ranks."""
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
    "cut": optional(LayerCut),
}
"""Types of the fields of a `Problem`."""


def microbatch_bytes(placement: Placement, costs: Costs, head_bytes: int = 0) -> tuple[int, ...]:
    """Per rank, the most bytes that all its stages hold of one microbatch, at least 1; the last stage without `head_bytes`.

    Those are what F saves, or what B leaves for W if that is more. If there are several routes, the one that holds most counts.
    """
    saved = (*costs.held_after_f[:-1], max(0, costs.held_after_f[-1] - head_bytes))
    held = [0] * placement.num_ranks
    for route in placement.routes:
        here = [0] * placement.num_ranks
        for rank, after_f, after_b in zip(route, saved, costs.held_after_b, strict=True):
            here[rank] += max(after_f, after_b)
        held = list(map(max, held, here))
    return tuple(max(1, count) for count in held)


Work = Workload | Costs | Sequence[Layer]


def is_forward_only(work: Work) -> bool:
    """Whether no stage, rank or layer has a B or W that takes time, as in inference."""
    if isinstance(work, (Workload, Costs)):
        return not any((*work.backward, *work.weight)) and any(work.forward)
    return not any(layer.backward or layer.weight for layer in work) and any(layer.forward for layer in work)


def without_held(work: Work) -> Work:
    """The same work, with no activations kept for a backward pass."""
    if isinstance(work, (Workload, Costs)):
        nothing = (0,) * len(work.forward)
        return replace(work, held_after_f=nothing, held_after_b=nothing)
    return [replace(layer, held_after_f=0, held_after_b=0) for layer in work]


def bounds_forward(placement: Placement, num_microbatches: int, costs: Costs) -> Bounds:
    """Lower bounds for forwards alone: the work of a rank, plus the least time before its first pass and after its last one.

    >>> import zerobubble as zb
    >>> bounds_forward(zb.Placement.linear(2), 4, zb.Costs.uniform(2, (3, 0, 0), comm=1)).makespan.time
    16000000
    """
    home, microbatches = placement.routes[0], range(num_microbatches)
    hops = [0 if here == there else time for time, (here, there) in zip(costs.comm, pairwise(home), strict=True)]
    each = [[costs.time(Kind.F, stage, microbatch) for stage in range(len(home))] for microbatch in microbatches]
    span = makespan = Bound(0, "no pass takes time")
    for rank in range(placement.num_ranks):
        stages = [stage for stage, owner in enumerate(home) if owner == rank]
        work = sum(times[stage] for times in each for stage in stages)
        before = sum(hops[: stages[0]]) + min(sum(times[: stages[0]]) for times in each)
        after = sum(hops[stages[-1] :]) + min(sum(times[stages[-1] + 1 :]) for times in each)
        reason = f"rank {rank} has {show_ms(work)} of work"
        if work > span.time:
            span = Bound(work, reason)
        if before + work + after > makespan.time:
            makespan = Bound(before + work + after, f"{reason}, {show_ms(before)} before its first F and {show_ms(after)} after its last")
    longest = sum(hops) + max(map(sum, each))
    return Bounds(span, max(makespan, Bound(longest, f"a microbatch takes {show_ms(longest)}"), key=lambda bound: bound.time))
