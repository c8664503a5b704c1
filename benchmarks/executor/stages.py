"""Stages that cost what the benchmark says and nothing else: passes that sleep, and a Linear too small to matter."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.split.work import pending_work


def _overshoot() -> float:
    """How much longer this machine sleeps than asked, in seconds."""
    took = []
    for _ in range(50):
        begin = time.perf_counter()
        time.sleep(0.01)
        took.append(time.perf_counter() - begin - 0.01)
    return statistics.median(took)


_LATE = _overshoot()


def sleep_until(end: float) -> None:
    """Sleep until the `perf_counter` reads `end`, on average: the machine's overshoot is taken off."""
    left = end - time.perf_counter() - _LATE
    if left > 0:
        time.sleep(left)


class _SleepInB(torch.autograd.Function):
    """Identity whose backward takes `seconds`: the input-gradient pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        sleep_until(time.perf_counter() + ctx.seconds)
        return dy, None


class _SleepInW(torch.autograd.Function):
    """Identity on a weight whose gradient takes `seconds`, at once or, in a pass that splits, later."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.weight = weight
        ctx.work = pending_work()
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        def gradient() -> Tensor:
            sleep_until(time.perf_counter() + ctx.seconds)
            return dy

        if ctx.work is None:
            return gradient(), None
        ctx.work.defer(ctx.weight, gradient, dy)
        return None, None


class SleepingStage(nn.Module):
    """F, B and W take the given seconds, asleep; the numbers are real (y = x + w) and tiny."""

    def __init__(self, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        forward, backward, weight = self.seconds
        end = time.perf_counter() + forward
        y: Tensor = _SleepInB.apply(x, backward) + _SleepInW.apply(self.weight, weight)
        sleep_until(end)
        return y


def tiny_stage() -> nn.Module:
    """A 16 x 16 Linear: all overhead, no compute."""
    torch.manual_seed(0)
    return nn.Linear(16, 16)
