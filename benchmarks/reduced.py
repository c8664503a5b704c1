"""Helpers of benchmarks with gradient sums and reductions: their schedules with costs, and weights whose gradients take time."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import zerobubble as zb
from zerobubble.planning import Objective, Plan, Problem
from zerobubble.planning.weight_order import with_weights_ordered


def scheduled(
    name: str, ranks: int, microbatches: int, pass_ms: float, stages_per_rank: int, reduce_ms: float, buckets: int
) -> tuple[zb.Schedule, zb.Costs]:
    """The schedule of a case, with its W ordered by a plan where the name ends so, and its costs with sums."""
    published, *ordered = name.split(", ")
    schedule = zb.make(published, ranks, microbatches, *([stages_per_rank] if published == "interleaved-zb" else []))
    times = (pass_ms,) * 3
    costs = zb.Costs.uniform(schedule.num_stages, times, stages_per_rank=stages_per_rank, reduce=reduce_ms, buckets=buckets)
    if not ordered:
        return schedule, costs
    problem = Problem(schedule.placement, microbatches, costs, zb.Limits((99_000_000,) * ranks), Objective.MAKESPAN)
    found = with_weights_ordered(Plan.from_schedule(problem, problem.bound(), schedule, 0.0, name)).schedule
    assert found is not None
    return found, costs


class SleepingSum(torch.autograd.Function):
    """`x + weight`, whose weight gradient takes its time, asleep."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, seconds: float) -> Tensor:
        ctx.deferral = zb.nn.deferral(weight)
        ctx.seconds = seconds
        return x + weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None]:
        def gradient(dy: Tensor) -> Tensor:
            time.sleep(ctx.seconds)
            return dy.sum(0)

        return ctx.deferral(ctx, gradient, dy), dy, None
