"""Schedules for `torch.distributed.pipelining`: any legal one runs as a schedule object of PyTorch's own runtime.

PyTorch's runtime executes a list of actions per rank, with both ends of each message. It does not check them: messages in a different order
silently give wrong gradients. Here the schedule is verified, and the messages have the order that `export/torch_comms.py` proves
free of deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage

from zerobubble.arguments import takes, wrong
from zerobubble.errors import raise_faults
from zerobubble.export.torch_comms import torch_rows
from zerobubble.ir import Schedule


@takes(schedule=Schedule)
def pipelining_schedule(
    schedule: Schedule, stages: Sequence[PipelineStage], loss_fn: Any = None, *, unsharded: int = 0, **options: Any
) -> Any:
    """Return a schedule of `torch.distributed.pipelining` that plays `schedule`, with `step` and `eval` as PyTorch has them.

    Every rank of the pipeline calls it. Raises `InputError` if `stages` are not those of this rank, and for a schedule that PyTorch cannot
    run: one with several routes, with passes other than F, B, W and BW, or with forwards of the last stage out of order. Raises
    `ScheduleError` for a schedule that is not legal.

    Arguments:
        schedule: the schedule, such as `zb.make("zb-v", 4, 8)` or the `schedule` of a plan.
        stages: the stages of this rank, in any order.
        loss_fn: the loss of a microbatch, as PyTorch calls it with output and target.
        unsharded: for stages sharded by FSDP2, how many are gathered at a time (see `to_torch_comms_csv`).
        **options: further arguments of PyTorch's schedule, such as `scale_grads` and `output_merge_spec`.
    """
    if not stages:
        raise wrong("stages", "an empty list", "the stages of this rank")
    rank, num_stages = dist.get_rank(stages[0].group), stages[0].num_stages
    placed, numbers = sorted(stage for _, stage in schedule.placement.stages(rank)), sorted(stage.stage_index for stage in stages)
    faults = []
    if num_stages != schedule.num_stages:
        faults.append(f"stages has {num_stages} stages, and {schedule.name} {schedule.num_stages}")
    if numbers != placed:
        faults.append(f"rank {rank} gives stages {numbers}, and {schedule.name} places {placed} there")
    raise_faults(faults)
    make: Any = schedules._PipelineScheduleRuntime
    runtime = make(list(stages), schedule.num_microbatches, loss_fn, **options)
    rows = torch_rows(schedule, torch.__version__, unsharded)
    prepare = getattr(runtime, "_prepare_schedule_with_comms", None) or runtime._load_actions  # its name up to version 2.8
    prepare({rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}, format="compute_comms")
    return runtime
