"""One step of each runtime, ours and PyTorch's, behind the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerobubble as zb
from zerobubble.export.torch_csv import to_torch_csv

Step = Callable[[Tensor, Tensor], None]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def ours(build: Callable[[], nn.Module], name: str, microbatches: int) -> tuple[Step, Callable[[], None]]:
    """zerobubble: (step, close)."""
    pipe = zb.Pipeline(lambda stage, num_stages: build(), name, microbatches, mean_square)

    def step(inputs: Tensor, targets: Tensor) -> None:
        pipe.step(inputs, targets)

    return step, pipe.close


def pytorch(build: Callable[[], nn.Module], name: str, microbatches: int) -> tuple[Step, Callable[[], None]]:
    """torch.distributed.pipelining running the same order, from its own class where it has one, else from our CSV."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = zb.make(name, ranks, microbatches)
    stages = [PipelineStage(build(), s, schedule.num_stages, torch.device("cpu")) for _, s in schedule.placement.stages(rank)]
    engine: Any
    if name == "1f1b":
        engine = Schedule1F1B(stages[0], microbatches, loss_fn=mean_square)
    else:
        engine = _PipelineScheduleRuntime(stages, microbatches, loss_fn=mean_square)
        engine._prepare_schedule_with_comms(_actions(schedule))
    first, last = rank == schedule.placement.routes[0][0], rank == schedule.placement.routes[0][-1]

    def step(inputs: Tensor, targets: Tensor) -> None:
        losses: list[Tensor] | None = [] if last else None
        engine.step(*([inputs] if first else []), target=targets if last else None, losses=losses)

    return step, lambda: None


def _actions(schedule: zb.Schedule) -> dict[int, list[Any]]:
    from torch.distributed.pipelining.schedules import _Action

    rows = to_torch_csv(schedule).splitlines()
    return {rank: [_Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}


def messages(name: str, microbatches: int) -> tuple[Step, Callable[[], None]]:
    """The floor: the same program with its messages and no passes at all."""
    from zerobubble.program import Compute, Recv, Send
    from zerobubble.rules import uses
    from zerobubble.runtime.messages.transport import Transport

    rank = dist.get_rank()
    program = zb.lower(zb.make(name, dist.get_world_size(), microbatches))
    transport = Transport(None, 60.0)
    transport.open(torch.device("cpu"), [])

    def step(inputs: Tensor, targets: Tensor) -> None:
        arriving: dict[Any, Any] = {}
        leaving = []
        payload = torch.zeros(1, 16)
        for action in program.rows[rank]:
            if isinstance(action, Recv):
                buffer = torch.empty(1, 16)
                arriving[action.value] = (transport.receiver(action.value.stuff, action.peer)(buffer), buffer)
            elif isinstance(action, Send):
                leaving.append(transport.sender(action.value.stuff, action.peer)(payload))
            elif isinstance(action, Compute):
                for value in uses(action.step[0], program.num_stages):
                    if value in arriving:
                        arriving.pop(value)[0].wait()
        for work in leaving:
            work.wait()

    return step, transport.close
