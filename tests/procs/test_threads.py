"""Two pipelines step at the same time, in two threads of each process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.device import cpu_only, use_device
from tests.procs.models import Block, InBackward, batch, loss_fn, one_device
from tests.procs.ranks import Ranks
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS

STEPS = 2


class Meeting(nn.Module):
    """Layers that wait for W, one in a checkpoint and a matrix of the module itself, around a point where two threads meet.

    There the passes of both wait for each other, on their way there and back.
    """

    def __init__(self, barrier: threading.Barrier | None) -> None:
        super().__init__()
        self.first, self.second = Block(6), Block(6)
        self.matrix = nn.Parameter(torch.randn(6, 6) / 3)
        self.barrier = barrier

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) @ self.matrix
        if self.barrier is not None and torch.is_grad_enabled():
            self.barrier.wait()
            y = InBackward.apply(y, self._meet)
        z: Tensor = checkpoint(self.second, y, use_reentrant=False)
        return z

    def _meet(self, dy: Tensor) -> Tensor:
        assert self.barrier is not None
        self.barrier.wait()
        return dy


def stage_of(pipeline: int, barrier: threading.Barrier | None, stage: int, num_stages: int) -> nn.Module:
    torch.manual_seed(10 * pipeline + stage)
    first: list[nn.Module] = [nn.Embedding(11, 6)] if stage == 0 else []
    last: list[nn.Module] = [nn.Linear(6, 11)] if stage == num_stages - 1 else []
    return nn.Sequential(*first, Meeting(barrier), *last).double()


def shares_of(pipe: zb.Pipeline, number: int) -> list[float | None]:
    """The shares of weight gradients that W computes, described before a few steps."""
    use_device()
    shares = [report.share for report in pipe.describe(*batch(4))]
    for step in range(STEPS):
        pipe.step(*batch(4, seed=10 * number + step))
    return shares


def side_by_side(group: Any, schedule: str) -> list[tuple[float, list[float | None]]]:
    barrier = threading.Barrier(2, timeout=60)
    groups = [dist.new_group(list(range(group.size()))) for _ in range(2)]
    pipes = [zb.Pipeline(partial(stage_of, i, barrier), schedule, 4, loss_fn, group=groups[i]) for i in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(shares_of, pipes, range(2)))
    seen = []
    for number, (pipe, shares) in enumerate(zip(pipes, found, strict=True)):
        stages = [stage_of(number, None, s, pipe.schedule.num_stages) for s in range(pipe.schedule.num_stages)]
        for step in range(STEPS):
            one_device(stages, 4, *batch(4, seed=10 * number + step))
        pairs = [pair for s, m in pipe.modules.items() for pair in zip(m.parameters(), stages[s].parameters(), strict=True)]
        seen.append((max(((mine.grad - theirs.grad).norm() / theirs.grad.norm()).item() for mine, theirs in pairs), shares))
        pipe.close()
    return seen


@cpu_only("one thread runs the backward passes of an accelerator, and the test waits in two of them")
def test_two_pipelines_step_in_two_threads(world: Ranks) -> None:
    for result in world.run(side_by_side, "zb-h1", ranks=4):
        for worst, shares in result:
            assert worst <= 1e-12
            assert shares == [1.0] * 4 or not CAN_SEE_HOOKS, "a module's own matrices wait from torch 2.8 on"
