"""Runs of PyTorch's own pipeline schedules under its profiler: what the tests of traces read. A pass takes as long as it sleeps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerobubble as zb

WIDTH = 32
FORWARD, BACKWARD = 0.004, 0.006
"""Seconds that a forward and a backward pass sleep; twice as long on stage 1."""
VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Slow(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        ctx.times = times
        time.sleep(FORWARD * times)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD * ctx.times)
        return gradients[0].clone(), None


class Stage(nn.Module):
    """A linear layer that is slow."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.times = 2 if stage == 1 else 1
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        slow: Tensor = Slow.apply(torch.relu(self.layer(x)), self.times)
        return slow


def stages_of(name: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """The stages of a rank in PyTorch's schedule `name`."""
    return [rank, 2 * ranks - 1 - rank] if name in VEE else [rank + ranks * turn for turn in range(per_rank)]


def record(group: Any, name: str, per_rank: int, microbatches: int, steps: int, folder: str, named: bool) -> str:
    """Train `steps` steps after one that warms up, and write this rank's trace into `folder`; `named` has its passes named by us."""
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, ranks = group.rank(), group.size()
    mine, last = stages_of(name, rank, ranks, per_rank), ranks * per_rank - 1
    stages = [PipelineStage(Stage(stage), stage, last + 1, torch.device("cpu"), group=group) for stage in mine]
    for stage in stages if named else ():
        zb.io.name_passes(stage)
    kind = getattr(schedules, name)
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if is_single else stages, microbatches, loss_fn=nn.functional.mse_loss)
    x = torch.rand(2 * microbatches, WIDTH)

    def step() -> None:
        schedule.step(*([x] if 0 in mine else []), **({"target": x} if last in mine else {}))

    file = str(Path(folder, f"rank{rank}.json"))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(file),
    ) as profiler:
        for _ in range(steps + 1):
            step()
            profiler.step()
    return file
