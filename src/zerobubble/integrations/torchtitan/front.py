"""`pipelining_fn` and `pipelined`: from a schedule and torchtitan's configuration to model parts and a schedule object."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import zerobubble as zb
from zerobubble.cost_model.gpus import known_gpu
from zerobubble.cost_model.held import RUNTIME_BYTES
from zerobubble.costs import Limits
from zerobubble.errors import InputError, raise_faults
from zerobubble.integrations.described_run import DescribedRun
from zerobubble.integrations.torchtitan.cut import PARTIAL_DTENSOR, exchange_local_tensors, names_of_stages, part_of
from zerobubble.integrations.torchtitan.schedule import TitanSchedule
from zerobubble.integrations.torchtitan.shape import run_of
from zerobubble.integrations.versions import refuse_wrong_versions
from zerobubble.ir import Placement, Schedule
from zerobubble.planning import Plan

AUTO = "auto"
EVALUATIONS = 500
"""The budget of "auto"."""
OWN = frozenset({"build_or_modules", "schedule", "num_microbatches", "loss_fn", "loss_weight", "scale", "on_loss", "group", "mesh"})
"""The options of a pipeline that are set here."""
Pipelined = tuple[TitanSchedule, list[nn.Module], bool, bool]
"""The result that torchtitan expects of a `pipelining_fn`: the schedule, the model parts, and whether this rank has the first and the last
stage."""
ENDS_ON_FIRST_RANK = "ZBVZeroBubble"
"""The torchtitan name for schedules that end on the first rank: with it, torchtitan logs the loss there."""
ENDS_ON_LAST_RANK = "Interleaved1F1B"
"""A torchtitan name for schedules that end on the last rank."""
NAMES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved-1f1b",
    "loopedbfs": "breadth-first",
    "interleavedzerobubble": "interleaved-zb",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
"""Schedules by torchtitan's names, in lowercase."""


def pipelining_fn(
    schedule: str | os.PathLike[str] | Schedule | Plan | None = None, *, gpu: str | None = None, **options: Any
) -> Callable[..., Pipelined]:
    """Returns a function for `ModelSpec.pipelining_fn` that trains with `schedule`.

    Args:
        schedule: The name of a schedule such as "zb-v", the path of a plan or schedule file, a `Schedule` or a `Plan`; or "auto", which
            plans from the configuration, with times from the data sheet of `gpu`. By default it is
            `parallelism.pipeline_parallel_schedule_csv`, or else `parallelism.pipeline_parallel_schedule`, by torchtitan's name or ours.
        gpu: With "auto", the name of a GPU that the cost model knows, such as "H100".
        options: Further options of `zb.Pipeline`, such as `split="compiled"` or `hooks`.

    Raises `InputError` for options that a pipeline in torchtitan does not have. The returned function raises one with all faults
    of the configuration.
    """
    _refuse_options(options)
    refuse_wrong_versions("torchtitan")

    def fn(
        model: nn.Module,
        *,
        parallel_dims: Any,
        training: Any,
        parallelism: Any,
        compile_config: Any,
        ac_config: Any,
        dump_folder: str,
        device: torch.device,
        model_config: Any,
        parallelize_fn: Callable[..., nn.Module],
        loss_fn: Any,
    ) -> Pipelined:
        num_microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        if schedule == AUTO:
            dp_shard = parallel_dims.dp_shard
            dp = parallel_dims.dp_replicate * dp_shard
            run = run_of(model_config, type(model).__name__, training, parallelism, ac_config, dp=dp, dp_shard=dp_shard)
            planned: Schedule | Plan = _planned(run, gpu, parallelism)
        else:
            planned = _schedule_of(schedule, parallelism, model, num_microbatches)
        played = _played(planned)
        _refuse(played, parallel_dims, parallelism, num_microbatches)
        rank = parallel_dims.get_mesh("pp").get_local_rank()
        first_layers = planned.problem.first_layers if isinstance(planned, Plan) else ()
        names = names_of_stages(model, parallelism, played.num_stages, first_layers)
        stages = sorted({stage for _, stage in played.placement.stages(rank)})
        cut = {stage: part_of(model, names[stage]) for stage in stages}
        if parallel_dims.tp > 1 and parallel_dims.spmd_backend == PARTIAL_DTENSOR:
            between = (Shard(1) if parallelism.enable_sequence_parallel else Replicate(),)
            for stage, part in cut.items():
                ends = {"first": stage == 0, "last": stage == played.num_stages - 1}
                exchange_local_tensors(part, parallel_dims.get_mesh("tp"), between, **ends)
        parts = [
            parallelize_fn(
                part,
                parallel_dims=parallel_dims,
                training=training,
                parallelism=parallelism,
                compile_config=compile_config,
                ac_config=ac_config,
                dump_folder=dump_folder,
            )
            for part in cut.values()
        ]
        mesh_option = {"mesh": _mesh_of(parallel_dims, device)} if parallel_dims.world_size > parallel_dims.pp else {}
        pipeline = TitanSchedule(parts, planned, num_microbatches, loss_fn, {**mesh_option, **options})
        return pipeline, parts, 0 in stages, played.num_stages - 1 in stages

    return fn


def pipelined(config: Any, schedule: str | os.PathLike[str] | Schedule | Plan = "zb-v", *, gpu: str | None = None, **options: Any) -> Any:
    """Returns a copy of a `Trainer.Config` of torchtitan whose model trains with `schedule`; the arguments are those of `pipelining_fn`.

    It also names a schedule of torchtitan that ends on the same rank, so that torchtitan logs the loss where it is known, and disables
    CUDA graphs of whole steps, which torchtitan does not have for pipelines.
    """
    return with_pipeline(config, pipelining_fn(schedule, gpu=gpu, **options), _name_for(schedule))


def with_pipeline(config: Any, fn: Callable[..., Pipelined], name: str) -> Any:
    """Returns a copy of a configuration with this `pipelining_fn`, this name of a schedule, and without CUDA graphs of whole steps.

    Several ranks that torchtitan gives no pipeline raise `InputError`.
    """
    spec = replace(config.model_spec, pipelining_fn=fn, parallelize_fn=_in_a_pipeline(config.model_spec.parallelize_fn))
    parallelism = replace(config.parallelism, pipeline_parallel_schedule=name)
    training = replace(config.training, disable_cuda_graphs=True)
    return replace(config, model_spec=spec, parallelism=parallelism, training=training)


def _in_a_pipeline(parallelize_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns a `parallelize_fn` that refuses several ranks without a pipeline: there torchtitan calls no `pipelining_fn`."""

    @functools.wraps(parallelize_fn)
    def fn(model: nn.Module, *, parallel_dims: Any, **others: Any) -> nn.Module:
        if parallel_dims.world_size > 1 and not parallel_dims.pp_enabled:
            raise InputError(
                "{argument} is {got}, so torchtitan makes no pipeline of {ranks} ranks",
                argument="pipeline_parallel_degree",
                got=parallel_dims.pp,
                ranks=parallel_dims.world_size,
                remedy="set --parallelism.pipeline_parallel_degree, or take the configuration of torchtitan",
            )
        return parallelize_fn(model, parallel_dims=parallel_dims, **others)

    return fn


def _name_for(schedule: str | os.PathLike[str] | Schedule | Plan) -> str:
    """Returns torchtitan's name of a schedule that ends on the same rank; for "auto", on the first rank, as `_planned` then does."""
    if schedule == AUTO:
        return ENDS_ON_FIRST_RANK
    planned = _read(schedule) if not isinstance(schedule, str) or _is_path(schedule) else zb.make(_own_name(schedule), 2, 4)
    return _name_ending_on(_last_rank(_played(planned)))


def _played(planned: Schedule | Plan) -> Schedule:
    return planned.schedule if isinstance(planned, Plan) else planned


def _name_ending_on(rank: int) -> str:
    return ENDS_ON_FIRST_RANK if rank == 0 else ENDS_ON_LAST_RANK


def _planned(run: DescribedRun, gpu: str | None, parallelism: Any) -> Plan:
    """Returns a plan of cut and schedule that ends on the rank whose loss torchtitan logs. It is the same on every rank."""
    if gpu is None:
        raise InputError('schedule="auto" needs the name of a GPU, whose data sheet gives the times: give gpu="H100"', argument="gpu")
    layers, last = run.layers(gpu), _logging_rank(parallelism, run.pp)
    ranks = run.pp
    placements = (
        Placement.linear(ranks),
        *(Placement.looped(ranks, count) for count in (2, 3, 4)),
        Placement.vee(ranks),
        Placement.wave(ranks, 2),
    )
    fitting = [placement for placement in placements if placement.routes[0][-1] == last and placement.num_stages <= len(layers)]
    tried = {f"{placement.name}-{placement.stages_per_rank}": placement for placement in fitting}
    limits = Limits((known_gpu(gpu).memory_bytes - RUNTIME_BYTES,) * ranks)
    return zb.plan(layers, run.num_microbatches, limits, placements=tried, evaluations=EVALUATIONS)


def _schedule_of(configured: Any, parallelism: Any, model: Any, num_microbatches: int) -> Schedule | Plan:
    """Returns the schedule or plan for this run."""
    if configured is None:
        configured = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
    if not isinstance(configured, str) or _is_path(configured):
        return _read(configured)
    arguments = _own_name(configured), parallelism.pipeline_parallel_degree, num_microbatches
    try:
        return zb.make(*arguments, _stages_per_rank(parallelism, model))
    except InputError:
        if parallelism.module_fqns_per_model_part is None:
            raise
        return zb.make(*arguments)  # `names_of_stages` raises instead, with the length of this list


def _own_name(name: str) -> str:
    return NAMES.get(name.lower(), name)


def _is_path(text: str) -> bool:
    """Whether `text` is the path of a file, not the name of a schedule: it has a suffix, or the file exists."""
    return bool(Path(text).suffix) or Path(text).is_file()


def _read(source: Any) -> Schedule | Plan:
    """Returns `source` if it is a schedule or plan, and otherwise reads it from the file at this path."""
    if isinstance(source, (Schedule, Plan)):
        return source
    loaded = zb.io.load_document(source)
    if not isinstance(loaded, (Schedule, Plan)):
        raise InputError(
            "{got} has a {kind}: give the file of a plan or a schedule", got=str(source), kind=type(loaded).__name__, argument="schedule"
        )
    return loaded


def _stages_per_rank(parallelism: Any, model: Any) -> int | None:
    """Returns the number of stages per rank that the configuration implies; None if it leaves that open."""
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    listed = parallelism.module_fqns_per_model_part
    if listed is not None:
        return max(1, len(listed) // parallelism.pipeline_parallel_degree)
    if per_stage is None:
        return None
    count = len(model.layers) + parallelism.pipeline_parallel_first_stage_less_layers
    count += parallelism.pipeline_parallel_last_stage_less_layers
    num_stages = -(-count // per_stage)
    if num_stages % parallelism.pipeline_parallel_degree:
        raise InputError(
            "parallelism.pipeline_parallel_layers_per_stage={got} makes {stages} stages, which {ranks} ranks cannot divide equally",
            argument="pipeline_parallel_layers_per_stage",
            got=per_stage,
            stages=num_stages,
            ranks=parallelism.pipeline_parallel_degree,
            remedy="set another number, or leave it out",
        )
    return num_stages // parallelism.pipeline_parallel_degree


def _last_rank(schedule: Schedule) -> int:
    return schedule.placement.routes[0][-1]


def _logging_rank(parallelism: Any, num_ranks: int) -> int:
    """Returns the pipeline rank whose loss torchtitan logs."""
    return 0 if parallelism.pipeline_parallel_schedule == ENDS_ON_FIRST_RANK else num_ranks - 1


def _refuse_options(options: Mapping[str, Any]) -> None:
    accepted = sorted(set(inspect.signature(zb.Pipeline).parameters) - OWN)
    if wrong := [name for name in options if name not in accepted]:
        raise InputError(
            "a pipeline in torchtitan has no option {got}: its losses, ranks and schedule come from torchtitan; the options are {expected}",
            argument=wrong[0],
            got=", ".join(wrong),
            expected=", ".join(accepted),
        )


def _refuse(schedule: Schedule, parallel_dims: Any, parallelism: Any, num_microbatches: int) -> None:
    """Raises one `InputError` with all faults of the schedule and the configuration."""
    faults = []
    if schedule.num_ranks != parallel_dims.pp:
        faults.append(f"the schedule is for {schedule.num_ranks} ranks: set parallelism.pipeline_parallel_degree={schedule.num_ranks}")
    if schedule.num_microbatches != num_microbatches:
        batch = schedule.num_microbatches * parallelism.pipeline_parallel_microbatch_size
        faults.append(
            f"the schedule is for {schedule.num_microbatches} microbatches, but training.local_batch_size makes {num_microbatches}: "
            f"set it to {batch}"
        )
    if len(schedule.placement.routes) > 1:
        faults.append(f"{schedule.name} holds each stage on two ranks, which torchtitan would save and clip twice: use zb-v or dualpipe-v")
    if schedule.has_divided_head:
        faults.append("the schedule divides the head over ranks, and torchtitan's loss is on one: plan without a divided head")
    if schedule.is_forward_only:
        faults.append(f"{schedule.name} has no backward passes: choose a schedule that trains")
    if parallel_dims.spmd_backend == "full_dtensor":
        faults.append("with parallelism.spmd_backend='full_dtensor' stages would send DTensors: set 'spmd_types' or 'partial_dtensor'")
    last, logs = _last_rank(schedule), _logging_rank(parallelism, parallel_dims.pp)
    if len(schedule.placement.routes) == 1 and schedule.num_ranks == parallel_dims.pp and last != logs:
        faults.append(
            f"{schedule.name} ends on pipeline rank {last}, and torchtitan would log the loss of rank {logs}: use "
            "pipelined(config, schedule), which sets parallelism.pipeline_parallel_schedule to a schedule that ends there, "
            f"{_name_ending_on(last)!r}"
        )
    raise_faults(faults)


def _mesh_of(parallel_dims: Any, device: torch.device) -> DeviceMesh:
    """Returns the mesh of all ranks as torchtitan numbers them, with the dimensions that have several."""
    sizes = {name: getattr(parallel_dims, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    names = [name for name, size in sizes.items() if size > 1 or name == "pp"]
    ranks = torch.arange(parallel_dims.world_size, device="cpu").view([sizes[name] for name in names])
    return DeviceMesh(device.type, ranks, mesh_dim_names=tuple(names), _init_backend=False)
