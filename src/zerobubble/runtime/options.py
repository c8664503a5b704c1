"""The arguments of `Pipeline`: the requirements of each, which exclude each other, and what they need of the device of the stages.

All faults are reported at once, before anything is built. Each rank finds its own before the ranks compare their arguments, so that all
ranks raise them, and none waits for one that cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerobubble.arguments import COUNT, NUMBER, WHOLE, Wanted, each, either, faults_among, function, instance, number, optional, require
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.offload import HostLink, RankOffloads, require_offloads
from zerobubble.planned_run import NOT_RUN, Planned, PlannedRun
from zerobubble.rules import recomputed
from zerobubble.runtime.device import Feature, device_fault, has_nccl, holds_values, interface, is_host
from zerobubble.runtime.executor.offloading import Offloads
from zerobubble.runtime.executor.overrides import Overlap
from zerobubble.runtime.executor.program_cache import MICROBATCHES, MakeSchedule
from zerobubble.runtime.hooks.shared_parameters import Tied
from zerobubble.runtime.split.ways import TRACED
from zerobubble.runtime.stage.divided_head import DividedHead
from zerobubble.runtime.stage.levels import LEVELS, GivenLevels, RecomputeLevels
from zerobubble.runtime.stage.rank_stages import Build
from zerobubble.runtime.step.batch import BatchDims
from zerobubble.runtime.step.captured_step import STEP
from zerobubble.runtime.step.hook import StepHook
from zerobubble.runtime.step.loss import LossFunction, LossWeight, OnLoss
from zerobubble.runtime.step.ordering import TOKENS, CostOf
from zerobubble.runtime.step.planner import Replanner
from zerobubble.runtime.transport.choice import AUTO, NCCL, STAGED, fastest_for
from zerobubble.runtime.transport.endpoint import Endpoint
from zerobubble.runtime.transport.mesh import Layout, layout_of_group, layout_of_mesh, one_pipeline
from zerobubble.schedules import find

TIMEOUT = 120.0
"""The default timeout for a message, in seconds."""
Plays = str | Schedule | Planned | MakeSchedule | Replanner
"""The kinds of schedules that a pipeline accepts."""
LOSS, GRADIENTS, NONE = "loss", "gradients", "none"
"""The values that are scaled to give the mean over microbatches; "none" leaves the sum."""
ALIKE = frozenset({"dp", "dp_replicate"})
"""Dimensions of a mesh along which ranks hold the same stages."""
SHORTEST_S, LONGEST_S = 0.1, 1e6
"""The range of timeouts: a rank polls for failures ten times a second, and backends count in integers that cannot hold years."""


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of `Pipeline` by name."""

    build_or_modules: Build | nn.Module | Sequence[nn.Module]
    schedule: Plays
    num_microbatches: int
    loss_fn: LossFunction
    loss_weight: LossWeight | None
    scale: str
    tied: Tied
    split: str | Mapping[int, str]
    cuda_graphs: bool | str
    main_grad: torch.dtype | None
    overlap: Overlap | None
    group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    gathered_bytes: int | None
    bucket_bytes: int
    timeout: float
    hooks: Sequence[StepHook]
    on_loss: OnLoss | None
    pace: Costs | None
    transport: str | Endpoint
    survive: bool = False
    order_by: str | CostOf | None = None
    recompute: GivenLevels | None = None
    offload: Sequence[RankOffloads] | None = None
    link: HostLink | None = None
    batch_dims: BatchDims | None = None
    device: torch.device | str | None = None
    slices: int | None = None

    @property
    def num_slices(self) -> int:
        """Slices of each microbatch: those asked for, else those of the schedule."""
        if self.slices is not None:
            return self.slices
        schedule = self.schedule.to_run.schedule if isinstance(self.schedule, Planned) else self.schedule
        return schedule.slices if isinstance(schedule, Schedule) else 1

    @property
    def captures_steps(self) -> bool:
        """Whether each rank's whole step is captured as a CUDA graph."""
        return self.cuda_graphs == STEP


def _are_modules(value: Any) -> bool:
    return isinstance(value, (nn.Module, Sequence)) and not isinstance(value, str)


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, (str, torch.device)) and bool(torch.device(value))
    except RuntimeError:
        return False


def _device_meant(value: Any) -> str:
    if value == "gpu":
        return "write 'cuda'"
    return f"write 'cuda:{value}'" if WHOLE.accepts(value) else ""


def _are_dims(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and (dim is None or (WHOLE.accepts(dim) and dim >= 0)) for name, dim in value.items()
    )


_SECONDS = number(
    f"a number of seconds from {SHORTEST_S:g} to {LONGEST_S:.0f}",
    lambda value: NUMBER.accepts(value) and SHORTEST_S <= value <= LONGEST_S,
)
WANTED: dict[str, Wanted | type] = {
    "build_or_modules": either(function("stage_index", "num_stages", makes="nn.Module"), Wanted("the modules of this rank", _are_modules)),
    "schedule": either(
        Wanted("a name", lambda value: isinstance(value, str)),
        instance(Schedule),
        Wanted("a Plan or an Auto", lambda value: isinstance(value, (Planned, Replanner))),
        function("num_ranks", "num_microbatches", makes="Schedule"),
    ),
    "num_microbatches": MICROBATCHES,
    "loss_fn": function("output", "target", that="gives the mean loss of a microbatch"),
    "loss_weight": optional(function("target", that="gives the weight of a microbatch")),
    "scale": Wanted("'loss', 'gradients' or 'none'", lambda value: value in (LOSS, GRADIENTS, NONE)),
    "tied": Wanted("a list of groups such as [(0, 'tok.weight'), (3, 'head.weight')]", lambda value: isinstance(value, Sequence)),
    "split": instance(str, Mapping),
    "cuda_graphs": either(bool, Wanted(f"{STEP!r}", lambda value: isinstance(value, str) and value == STEP)),
    "main_grad": optional(torch.dtype),
    "overlap": optional(function("first", "second", that="runs both passes")),
    "gathered_bytes": optional(number("a number of bytes above 0", lambda value: WHOLE.accepts(value) and value > 0)),
    "bucket_bytes": number("a whole number of bytes from 1 on", lambda value: WHOLE.accepts(value) and value > 0),
    "timeout": _SECONDS,
    "hooks": Wanted("a list or tuple of hooks", each(object).accepts),
    "on_loss": optional(function("microbatch", "loss")),
    "pace": optional(Costs),
    "transport": instance(str, Endpoint),
    "survive": bool,
    "order_by": optional(
        either(
            Wanted(f"{TOKENS!r}", lambda value: isinstance(value, str) and value == TOKENS),
            function("microbatch", that="gives its relative cost"),
        )
    ),
    "recompute": optional(LEVELS),
    "offload": optional(each(RankOffloads)),
    "link": optional(HostLink),
    "batch_dims": optional(
        Wanted("dimensions by name such as {'position_ids': 1, 'mask': None}, None for what all microbatches share", _are_dims)
    ),
    "slices": optional(COUNT),
    "device": optional(Wanted("a device such as 'cuda' or torch.device('cuda', 1)", _is_device, _device_meant)),
}
"""The requirements of each argument. Whether names exist and values match each other is checked where they are used."""


def layout_for(options: PipelineOptions) -> Layout:
    """Returns the ranks that train together, and this rank's position among them.

    Raises `InputError` if this rank cannot communicate at all: without a process group or mesh, or with a wrong one.
    """
    group: object = options.group
    is_outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not is_outside:
        require("Pipeline: group", group, optional(dist.ProcessGroup))
    require("Pipeline: mesh", options.mesh, optional(DeviceMesh))
    if options.mesh is not None and group is not None:
        raise InputError('Pipeline: give the `mesh`, whose dimension "pp" is the pipeline, or the `group` of a single pipeline, not both')
    if isinstance(options.transport, Endpoint) and options.mesh is None:
        return one_pipeline(options.transport.group.name, range(options.transport.group.size))
    if not dist.is_initialized():
        faults = faults_in(options)  # now, so that all are mended before the next start of the ranks
        raise InputError(
            "{faults}a Pipeline connects the ranks of a process group",
            faults=f"{faults}; " if faults else "",
            remedy="call zb.init_distributed or torch.distributed.init_process_group first, in a program that torchrun starts",
        )
    if options.mesh is not None:
        return layout_of_mesh(options.mesh)
    if is_outside or _rank_in(options.group) < 0:
        raise InputError("Pipeline: this rank is not in `group`", remedy="make a Pipeline on the ranks of the group alone")
    return layout_of_group(options.group)


def _rank_in(group: dist.ProcessGroup | None) -> int:
    """Returns this rank in the group, below 0 if it is not a member."""
    try:
        return dist.get_rank(group)
    except ValueError as error:
        raise InputError("Pipeline: group cannot be used on this rank: {reason}", argument="group", reason=str(error)) from error


def refuse_wrong(options: PipelineOptions) -> None:
    """Raises `InputError` with every invalid argument."""
    faults = faults_in(options)
    if faults:
        raise InputError(faults)


def faults_in(options: PipelineOptions) -> str:
    """Returns all invalid arguments in one sentence; empty if there are none."""
    faults = faults_among(vars(options), WANTED)
    if options.device is not None and _is_device(options.device) and (fault := device_fault(options.device)):
        faults.append(fault)
    faults += filter(None, [_reduction_fault(options.loss_fn, options.scale)])
    if isinstance(options.schedule, str) and options.schedule != "auto":
        try:
            find(options.schedule)
        except InputError as error:
            faults.append(str(error))
    return "; ".join(faults)


def _reduction_fault(loss_fn: object, scale: str) -> str:
    """Returns the fault of a loss of torch that is not the mean of a microbatch; empty if it is, or if that is not known."""
    is_of_torch = isinstance(loss_fn, nn.Module) and type(loss_fn).__module__ == nn.MSELoss.__module__
    arguments = vars(loss_fn) if is_of_torch else loss_fn.keywords if isinstance(loss_fn, partial) else {}
    reduction = arguments.get("reduction")
    if reduction == "sum" and scale != NONE:
        return (
            "loss_fn has reduction='sum', and step takes the mean of the losses of microbatches: use 'mean', or scale='none' for their sum"
        )
    if reduction == "none":
        return "loss_fn has reduction='none', and must return one number, the mean loss of a microbatch: use 'mean'"
    return ""


def dependency_faults(options: PipelineOptions) -> str:
    """Returns the faults of arguments that need another one, or repeat one, in one sentence; empty if there is none."""
    faults = []
    if options.survive and max(_replicas(options), default=1) < 2:
        faults.append(
            "survive needs replicas that hold the same stages: give a mesh with a dimension 'dp' of at least 2 ranks, or leave it out"
        )
    if options.scale == NONE and options.loss_weight is not None:
        faults.append("scale='none' sums the losses, so loss_weight would have no effect: leave out one of the two")
    if options.link is not None and not uses_offloads(options):
        faults.append("link is for the copies of offloads: give offload, or leave link out")
    if options.offload is not None and _planned_offloads(options):
        faults.append("the plan already has offloads: leave offload out, or give the schedule of the plan instead of the plan")
    return "; ".join(faults)


def _replicas(options: PipelineOptions) -> list[int]:
    """Returns the sizes of the mesh dimensions along which ranks hold the same stages."""
    if options.mesh is None:
        return []
    return [options.mesh.size(place) for place, name in enumerate(options.mesh.mesh_dim_names or ()) if name in ALIKE]


def uses_offloads(options: PipelineOptions) -> bool:
    """Whether ranks offload saved tensors to the host."""
    return options.offload is not None or bool(_planned_offloads(options))


def offloads_in(options: PipelineOptions, schedule: Schedule) -> Offloads | None:
    """Returns what ranks offload in `schedule`; None if nothing. Raises `InputError` with all faults."""
    ranks = _planned_offloads(options) or options.offload
    if ranks is None:
        return None
    require_offloads(schedule, Costs.uniform(schedule.num_stages), ranks)
    return Offloads(schedule, tuple(ranks), options.link)


def ordering_costs(options: PipelineOptions) -> tuple[Costs | None, Limits | None]:
    """Returns the known costs of stages and their memory limits: those of the plan, or else the pace of a rehearsal."""
    plan = planned(options)
    return (options.pace, None) if plan is None else (plan.costs, plan.limits)


def usable_timeout(options: PipelineOptions) -> float:
    """Returns the timeout, or the default if it is invalid: ranks need one to report that it is."""
    return options.timeout if _SECONDS.accepts(options.timeout) else TIMEOUT


def planned(options: PipelineOptions) -> PlannedRun | None:
    """Returns what the pipeline runs of a plan; None if it plays a plain schedule."""
    return options.schedule.to_run if isinstance(options.schedule, Planned) else None


def recompute_levels(options: PipelineOptions, schedule: Schedule) -> RecomputeLevels:
    """Returns the levels of the R passes of `schedule`. Raises `InputError` if one of them is unknown."""
    plan = planned(options)
    levels = RecomputeLevels(options.recompute, list(plan.levels) if plan is not None and plan.levels else None)
    levels.refuse_unknown(sorted({stage for row in schedule.rows for stage, _ in recomputed(row)}), schedule.num_stages)
    return levels


def planned_cut(options: PipelineOptions) -> tuple[str, ...]:
    """Returns the names of the first layers of all stages but the first, from a plan for layers; empty without one."""
    plan = planned(options)
    return () if plan is None else plan.first_layers


def gathered_bytes_of(options: PipelineOptions) -> int | None:
    """Returns the bytes for gathered weights of a rank: the given ones, or else those of the plan; None if all may stay gathered."""
    plan = planned(options)
    return options.gathered_bytes if options.gathered_bytes is not None or plan is None else plan.gathered_bytes


def _planned_offloads(options: PipelineOptions) -> tuple[RankOffloads, ...]:
    """Returns what the ranks of a plan offload; empty for a plan without offloads, or no plan."""
    plan = planned(options)
    return () if plan is None else plan.offloads


_PLAN_BEFORE = "plan before with zb.plan and the costs of profile, and give the plan"

USED: Mapping[str, Callable[[PipelineOptions, Layout], bool]] = {
    "survive": lambda options, _: options.survive,
    "hooks": lambda options, _: bool(options.hooks),
    "'auto'": lambda options, _: options.schedule == "auto" or isinstance(options.schedule, Replanner),
    "order_by": lambda options, _: options.order_by is not None,
    "offload": lambda options, _: uses_offloads(options),
    "a DividedHead": lambda options, _: _divides_head(options),
    "slices": lambda options, _: options.num_slices > 1,
    "split='graph'": lambda options, _: _is_traced(options),
    "cuda_graphs": lambda options, _: bool(options.cuda_graphs),
    "cuda_graphs='step'": lambda options, _: options.captures_steps,
    "on_loss": lambda options, _: options.on_loss is not None,
    "loss_weight": lambda options, _: options.loss_weight is not None,
    "scale='gradients'": lambda options, _: options.scale == GRADIENTS,
    "a mesh of several pipelines": lambda _, layout: len(layout.ranks) > len(layout.pipeline),
    "stages divided over ranks": lambda options, _: bool(_dividing(options)),
    "a plan for weights in shards": lambda options, _: _is_planned_in_shards(options) and not _dividing(options),
    "stages that communicate with other pipelines": lambda _, layout: bool(layout.lockstep),
}
"""Options that others exclude, by their names in messages: whether they are used."""

EXCLUDED: Mapping[tuple[str, str], str] = {
    ("survive", "hooks"): "a hook is part of the pipeline that ends with a rank",
    ("survive", "'auto'"): "its planner is part of the pipeline that ends with a rank: plan before",
    ("survive", "order_by"): "the remaining ranks divide the microbatches by their places",
    ("survive", "offload"): "offloads are planned for one order of passes, and the remaining ranks play another",
    ("survive", "cuda_graphs='step'"): "the remaining ranks play other passes than were captured",
    ("survive", "a DividedHead"): "no other rank holds a lost rank's part of the head",
    ("survive", "stages divided over ranks"): "no other rank holds a lost rank's part of a stage",
    ("hooks", "cuda_graphs='step'"): "a replay calls no hook between passes",
    ("'auto'", "cuda_graphs='step'"): f"it changes the order of passes, which a graph repeats: {_PLAN_BEFORE}",
    ("'auto'", "order_by"): f"it plans for microbatches that are alike: {_PLAN_BEFORE}",
    ("'auto'", "offload"): "it changes the order of passes, which offload is for: plan before with zb.plan(host=...), and give the plan",
    ("'auto'", "a DividedHead"): f"it plans for a head in the last stage: {_PLAN_BEFORE}",
    (
        "'auto'",
        "stages that communicate with other pipelines",
    ): f"it plans each pipeline by itself, and all of these must run the same passes: {_PLAN_BEFORE}",
    ("survive", "slices"): "the remaining ranks play schedules without slices",
    ("'auto'", "slices"): "it plans whole microbatches",
    ("order_by", "slices"): "slices of a microbatch stay together",
    ("slices", "split='graph'"): "a traced graph has no keys of earlier slices",
    ("slices", "cuda_graphs"): "a graph has no keys of earlier slices",
    ("order_by", "cuda_graphs='step'"): "a graph repeats one order of passes",
    ("cuda_graphs='step'", "on_loss"): "a replay calls no function with the losses",
    ("cuda_graphs='step'", "loss_weight"): "a graph repeats the weights of the microbatches at its capture",
    ("cuda_graphs='step'", "scale='gradients'"): "a graph adds to the gradients of earlier steps, which must not be divided again",
    (
        "cuda_graphs='step'",
        "a mesh of several pipelines",
    ): "sums over replicas and collectives in stages are untested in graphs",
    ("order_by", "a DividedHead"): "orders are made for passes of stages alone",
    ("offload", "a DividedHead"): NOT_RUN["head", "host"],
    ("offload", "cuda_graphs"): "passes replayed as CUDA graphs save tensors in memory of the graph",
    ("a DividedHead", "cuda_graphs"): "its collectives have not been tested in CUDA graphs",
    ("a DividedHead", "stages divided over ranks"): NOT_RUN["sharded", "head"],
    ("a DividedHead", "a plan for weights in shards"): NOT_RUN["sharded", "head"],
}
"""Each pair of options that a pipeline refuses, and why. docs/combinations.md also has pairs of values that only a run reveals."""


def excluded_options(options: PipelineOptions, layout: Layout) -> str:
    """Returns all used pairs of options that exclude each other, in one sentence; empty if there are none."""
    asked = [name for name, is_used in USED.items() if is_used(options, layout)]
    pairs = [pair for pair in combinations(asked, 2) if pair in EXCLUDED]
    if not pairs:
        return ""
    dims = ", ".join(map(repr, _dividing(options)))
    said = [f"{name} excludes {other}{f' (along {dims})' if 'stages' in other else ''}: {EXCLUDED[name, other]}" for name, other in pairs]
    return f"{'; '.join(said)}. Leave out one of {'the two' if len(pairs) == 1 else 'each two'}"


def _divides_head(options: PipelineOptions) -> bool:
    """Returns whether ranks divide the head: by the loss function, or by passes of the schedule."""
    plan = planned(options)
    schedule = options.schedule if plan is None else plan.schedule
    return isinstance(options.loss_fn, DividedHead) or (isinstance(schedule, Schedule) and schedule.has_divided_head)


def _is_traced(options: PipelineOptions) -> bool:
    """Returns whether stages are split by their graph."""
    ways = options.split.values() if isinstance(options.split, Mapping) else (options.split,)
    return not set(TRACED).isdisjoint(ways)


def _is_planned_in_shards(options: PipelineOptions) -> bool:
    plan = planned(options)
    return plan is not None and plan.is_sharded


def _dividing(options: PipelineOptions) -> list[str]:
    """Returns the dimensions of the mesh along which ranks hold other parts of the same stages, or other experts."""
    names = () if options.mesh is None else options.mesh.mesh_dim_names or ()
    return [name for name in names if name not in {"pp", *ALIKE}]


def refuse_unusable(options: PipelineOptions, device: torch.device) -> None:
    """Raises `InputError` with everything that these options need and a rank with stages on `device` lacks."""
    if not holds_values(device):
        raise InputError("stages are on {device}, whose tensors hold no values", device=str(device), remedy="create them on another device")
    faults = [*_faults_of_rehearsals(options, device), *_faults_of_features(options, device)]
    if not is_host(device) and options.transport == NCCL and not has_nccl():
        faults.append(f"transport 'nccl' needs NCCL, which torch {torch.__version__} is built without: leave it out, or pass 'staged'")
    if faults:
        raise InputError("{faults}", faults="; ".join(faults), device=str(device))


def _faults_of_rehearsals(options: PipelineOptions, device: torch.device) -> Iterator[str]:
    for argument in ("pace", "link"):
        if getattr(options, argument) is not None and not is_host(device):
            yield f"{argument} is for rehearsals on CPUs, but stages are on {device}: leave it out, or move them"


def _faults_of_features(options: PipelineOptions, device: torch.device) -> Iterator[str]:
    for user, remedy, features in _needs(options, device):
        lacking = interface(device).lacking(features)
        if lacking:
            yield f"{user} needs {' and '.join(lacking)}, which {device} lacks in torch {torch.__version__}: {remedy}"


def _needs(options: PipelineOptions, device: torch.device) -> Iterator[tuple[str, str, tuple[Feature, ...]]]:
    """Yields what needs some features of the device, the remedy without them, and the features."""
    if not is_host(device):
        yield "a pipeline", "put the stages on another device", (Feature.STREAMS, Feature.TIMES)
        if options.transport == STAGED or (options.transport == AUTO and fastest_for(device) == STAGED):
            yield "transport 'staged'", "put the stages on another device, or pass a transport of your own", (Feature.PINNED,)
        if uses_offloads(options):
            yield "offload", "leave it out", (Feature.PINNED,)
    if options.cuda_graphs:
        yield "cuda_graphs", "leave it out", (Feature.GRAPHS,)
