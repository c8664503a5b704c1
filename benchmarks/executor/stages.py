"""Stages of exact cost: passes that sleep, and a negligible Linear."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.split.layers.weight_work import pass_in_progress

_AWAKE_S = 0.0004
"""A sleeper wakes this long before its time, and computes next to nothing until then.

A virtual machine wakes a sleeper 0.1 ms late and with cold caches, so that the first operation after it takes 70 us instead of 2. The
host of a device that computes for 10 ms has neither.
"""
_SPECK = torch.zeros(4)


def sleep_until(end: float) -> None:
    """Sleep until the `perf_counter` reads `end`."""
    left = end - time.perf_counter() - _AWAKE_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < end:
        _SPECK.detach().requires_grad_().sum()


class _Times:
    """The seconds of F, B and W of a stage, when the backward pass of a microbatch is to end, and whether it has."""

    def __init__(self, seconds: tuple[float, float, float]) -> None:
        self.forward, self.backward, self.weight = seconds
        self.end = 0.0
        self.has_ended = False


class _BackwardBegins(torch.autograd.Function):
    """A copy at the output, for PyTorch's runtime splits no view: the first thing a backward pass meets."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, times: _Times) -> Tensor:
        ctx.times = times
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.times.end = time.perf_counter() + ctx.times.backward
        return dy, None


class _BackwardEnds(torch.autograd.Function):
    """Identity at the input: the last thing a backward pass meets, where it sleeps for the rest of its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: _Times) -> Tensor:
        ctx.times = times
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        sleep_until(ctx.times.end)
        ctx.times.has_ended = True
        return dx, None


class _SleepInW(torch.autograd.Function):
    """Identity on a weight whose gradient takes its time, at the end of the backward pass or, in a pass that splits, later."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, times: _Times) -> Tensor:
        ctx.times = times
        ctx.weight = weight
        ctx.work = pass_in_progress()
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        times = ctx.times
        if ctx.work is None and times.has_ended:  # a pass of its own, as PyTorch's runtime splits them
            sleep_until(time.perf_counter() + times.weight)
            return dy, None
        if ctx.work is None:
            times.end += times.weight
            return dy, None

        def gradient(dy: Tensor) -> Tensor:
            sleep_until(time.perf_counter() + times.weight)
            return dy

        ctx.work.defer(ctx.weight, gradient, dy)
        return None, None


class SleepingStage(nn.Module):
    """F, B and W take the given seconds, asleep; the numbers are real (y = x + w) and tiny."""

    def __init__(self, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        end = time.perf_counter() + self.seconds[0]
        times = _Times(self.seconds)
        x = x if x.requires_grad else x.detach().requires_grad_()
        y: Tensor = _BackwardBegins.apply(_BackwardEnds.apply(x, times) + _SleepInW.apply(self.weight, times), times)
        sleep_until(end)
        return y


def tiny_stage() -> nn.Module:
    """A 16 x 16 Linear: all overhead, no compute."""
    torch.manual_seed(0)
    return nn.Linear(16, 16)
