"""The arguments of `Pipeline`: what each must be, judged before anything is made of them, and all that is wrong told at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerobubble.arguments import NUMBER, WHOLE, Wanted, each, either, instance, optional, require
from zerobubble.costs import Costs, Limits
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.offload import HostLink, RankOffloads, require_offloads
from zerobubble.planning import Plan
from zerobubble.rules import recomputed
from zerobubble.runtime.executor.offloading import Offloads
from zerobubble.runtime.executor.overlapped import Overlap
from zerobubble.runtime.executor.program_cache import MICROBATCHES, MakeSchedule
from zerobubble.runtime.hooks.auto import Auto
from zerobubble.runtime.hooks.shared_parameters import Tied
from zerobubble.runtime.stage.levels import LEVELS, GivenLevels, RecomputeLevels
from zerobubble.runtime.stage.rank_stages import Build
from zerobubble.runtime.step.batch import BatchDims
from zerobubble.runtime.step.hook import StepHook
from zerobubble.runtime.step.loss import LossFunction, LossWeight, OnLoss
from zerobubble.runtime.step.ordering import TOKENS, CostOf
from zerobubble.runtime.transport.endpoint import Endpoint
from zerobubble.runtime.transport.mesh import Layout, layout_of_group, layout_of_mesh, one_pipeline

TIMEOUT = 120.0
"""Seconds that a rank waits for a message where nobody says."""
Plays = str | Schedule | Plan | MakeSchedule | Auto
"""What a pipeline can be given to play."""
LOSS, GRADIENTS = "loss", "gradients"
"""What is scaled for the mean over microbatches."""
ALIKE = frozenset({"dp", "dp_replicate"})
"""Dimensions of a mesh along which ranks hold the same."""
SHORTEST_S, LONGEST_S = 0.1, 1e6
"""The timeouts that make sense: a rank looks for failures ten times a second, and backends count in numbers that do not hold years."""


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of `Pipeline`, by their names."""

    build_or_modules: Build | nn.Module | Sequence[nn.Module]
    schedule: Plays
    num_microbatches: int
    loss_fn: LossFunction
    loss_weight: LossWeight | None
    scale: str
    tied: Tied
    split: str | Mapping[int, str]
    cuda_graphs: bool
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


def function(call: str) -> Wanted:
    """Something that can be called as `call` says."""
    return Wanted(f"a function {call}", callable)


def _are_modules(given: Any) -> bool:
    return isinstance(given, (nn.Module, Sequence)) and not isinstance(given, str)


def _are_dims(given: Any) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(name, str) and (dim is None or (WHOLE.accepts(dim) and dim >= 0)) for name, dim in given.items()
    )


WANTED: dict[str, Wanted | type] = {
    "build_or_modules": either(function("(stage_index, num_stages) -> nn.Module"), Wanted("the modules of this rank", _are_modules)),
    "schedule": either(
        Wanted("a name", lambda given: isinstance(given, str)),
        instance(Schedule, Plan, Auto),
        function("(num_ranks, num_microbatches) -> Schedule"),
    ),
    "num_microbatches": MICROBATCHES,
    "loss_fn": function("(output, target) that gives the mean loss of a microbatch"),
    "loss_weight": optional(function("(target) that gives the weight of a microbatch")),
    "scale": Wanted("'loss' or 'gradients'", lambda given: given in (LOSS, GRADIENTS)),
    "tied": Wanted("a list of groups such as [(0, 'tok.weight'), (3, 'head.weight')]", lambda given: isinstance(given, Sequence)),
    "split": instance(str, Mapping),
    "cuda_graphs": bool,
    "main_grad": optional(torch.dtype),
    "overlap": optional(function("(first, second) that runs both passes")),
    "gathered_bytes": optional(Wanted("a number of bytes above 0", lambda given: WHOLE.accepts(given) and given > 0)),
    "bucket_bytes": Wanted("a whole number of bytes from 1 on", lambda given: WHOLE.accepts(given) and given > 0),
    "timeout": Wanted(
        f"a number of seconds from {SHORTEST_S:g} to {LONGEST_S:.0f}",
        lambda given: NUMBER.accepts(given) and SHORTEST_S <= given <= LONGEST_S,
    ),
    "hooks": Wanted("a list or tuple of hooks", each(object).accepts),
    "on_loss": optional(function("(microbatch, loss)")),
    "pace": optional(Costs),
    "transport": instance(str, Endpoint),
    "survive": bool,
    "order_by": optional(
        either(
            Wanted(f"{TOKENS!r}", lambda given: isinstance(given, str) and given == TOKENS),
            function("(microbatch) that gives what it costs beside the others"),
        )
    ),
    "recompute": optional(LEVELS),
    "offload": optional(each(RankOffloads)),
    "link": optional(HostLink),
    "batch_dims": optional(
        Wanted("dimensions by name such as {'position_ids': 1, 'mask': None}, None for what all microbatches share", _are_dims)
    ),
}
"""What each argument must be. Whether names are known and values fit each other is judged where they are used."""


def layout_for(options: PipelineOptions) -> Layout:
    """The ranks that train together, and this rank's place among them.

    Raises `InputError` where this rank cannot even talk to others: no process group or mesh, another one, or something else in its place.
    """
    given: object = options.group
    is_outside = given is dist.GroupMember.NON_GROUP_MEMBER
    if not is_outside:
        require("Pipeline: group", given, optional(dist.ProcessGroup))
    require("Pipeline: mesh", options.mesh, optional(DeviceMesh))
    if options.mesh is not None and given is not None:
        raise InputError('Pipeline: give the `mesh`, whose dimension "pp" is the pipeline, or the `group` of a single pipeline, not both')
    if isinstance(options.transport, Endpoint) and options.mesh is None:
        return one_pipeline(options.transport.group.name, range(options.transport.group.size))
    if not dist.is_initialized():
        raise InputError("a Pipeline connects the ranks of a process group: call torch.distributed.init_process_group first")
    if options.mesh is not None:
        return layout_of_mesh(options.mesh)
    if is_outside or _rank_in(options.group) < 0:
        raise InputError("Pipeline: this rank is not in `group`: make a Pipeline on the ranks of the group alone")
    return layout_of_group(options.group)


def _rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's number in the group, below 0 where it has none there."""
    try:
        return dist.get_rank(group)
    except ValueError as error:
        raise InputError(f"Pipeline: group cannot be used on this rank: {error}") from error


def refuse_wrong(options: PipelineOptions) -> None:
    """Raise `InputError` with every argument that is not what it must be."""
    faults = faults_in(options)
    if faults:
        raise InputError(faults)


def faults_in(options: PipelineOptions) -> str:
    """Every argument that is not what it must be, in one sentence; empty where all are."""
    return "; ".join(
        fault for field in fields(options) if field.name in WANTED for fault in _faults(field.name, getattr(options, field.name))
    )


def _faults(name: str, value: Any) -> list[str]:
    try:
        require(name, value, WANTED[name])
    except InputError as error:
        return [str(error)]
    return []


def lone_faults(options: PipelineOptions) -> str:
    """What is wrong with arguments that need another one, or say the same twice, in one sentence; empty where nothing is."""
    faults = []
    if options.survive and max(_replicas(options), default=1) < 2:
        faults.append(
            "survive needs replicas that hold the same stages: give a mesh with a dimension 'dp' of at least 2 ranks, or leave it out"
        )
    if options.link is not None and not moves_to_host(options):
        faults.append("link is for the copies of offloads: give offload, or leave link out")
    if options.offload is not None and _planned_offloads(options):
        faults.append(
            "the plan says already what goes to the host: leave offload out, or give the plan's schedule in the place of the plan"
        )
    return "; ".join(faults)


def _replicas(options: PipelineOptions) -> list[int]:
    """The sizes of the dimensions of the mesh along which ranks hold the same stages."""
    if options.mesh is None:
        return []
    return [options.mesh.size(place) for place, name in enumerate(options.mesh.mesh_dim_names or ()) if name in ALIKE]


def moves_to_host(options: PipelineOptions) -> bool:
    """Whether ranks are to move to the host what waits for its backward pass."""
    return options.offload is not None or bool(_planned_offloads(options))


def offloads_in(options: PipelineOptions, schedule: Schedule) -> Offloads | None:
    """What ranks move to the host in `schedule`, None for nothing; raises `InputError` with all that is wrong with it."""
    ranks = _planned_offloads(options) or options.offload
    if ranks is None:
        return None
    require_offloads(schedule, Costs.uniform(schedule.num_stages), ranks)
    return Offloads(schedule, tuple(ranks), options.link)


def priced_by(options: PipelineOptions) -> tuple[Costs | None, Limits | None]:
    """What is known of the costs of the stages, and what bounds their memory: the plan's, or else the pace of a rehearsal."""
    plan = planned(options)
    return (options.pace, None) if plan is None else (plan.costs, plan.problem.limits)


def usable_timeout(options: PipelineOptions) -> float:
    """The timeout, or the usual one where it is none: ranks need one to tell each other that it is wrong."""
    return options.timeout if not _faults("timeout", options.timeout) else TIMEOUT


def planned(options: PipelineOptions) -> Plan | None:
    """The plan that the pipeline plays, None for a schedule that is none."""
    return options.schedule if isinstance(options.schedule, Plan) else None


def recompute_levels(options: PipelineOptions, schedule: Schedule) -> RecomputeLevels:
    """What the R passes of `schedule` compute again; raises `InputError` where that is not known of one of them."""
    plan = planned(options)
    levels = RecomputeLevels(options.recompute, [level.name for level in plan.levels] if plan is not None and plan.levels else None)
    levels.refuse_unknown(sorted({stage for row in schedule.rows for stage, _ in recomputed(row)}), schedule.num_stages)
    return levels


def planned_cut(options: PipelineOptions) -> tuple[str, ...]:
    """The names of the parts with which a plan for layers begins the stages behind the first; empty for what holds none."""
    plan = planned(options)
    return () if plan is None else plan.problem.first_layers


def room_for_weights(options: PipelineOptions) -> int | None:
    """The bytes that a rank has for gathered weights: those given, or else those of the plan; None where all may stay."""
    plan = planned(options)
    if options.gathered_bytes is not None or plan is None or plan.problem.sharded is None:
        return options.gathered_bytes
    return plan.problem.sharded.memory


def _planned_offloads(options: PipelineOptions) -> tuple[RankOffloads, ...]:
    """What the ranks of a plan move to the host, empty for what moves nothing or is no plan."""
    plan = planned(options)
    return () if plan is None else plan.offloads
