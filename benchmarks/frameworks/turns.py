"""Times steps of a plain loop and of a framework in turns, so that both see the same load, and pauses in place of long passes."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

PASS_S, MICROBATCHES, STEPS = 0.01, 8, 150
SCHEDULE = "1f1b"
WARMUP = 5
"""The first steps, which are not measured."""


class Pause(torch.autograd.Function):
    """Identity that sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(PASS_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        time.sleep(PASS_S)
        return dx


class Turns:
    """Runs and times a step of a plain loop after each step of a framework, so that both see the same load.

    Args:
        plain: Runs a step each time that it is advanced.
    """

    def __init__(self, plain: Iterator[None]) -> None:
        self._plain = plain
        self._ends: list[tuple[float, float]] = []

    def end_step(self) -> None:
        """The framework calls it at the end of its step. The time until the next call is that of its next step."""
        self._ends.append(_now())
        next(self._plain)
        self._ends.append(_now())

    def figures(self) -> dict[str, float]:
        """The median milliseconds of a plain step, and of what the framework adds to one, with an interval of 95 % and in CPU time."""
        wall, cpu = ([1e3 * (after - before) for before, after in itertools.pairwise(ends)] for ends in zip(*self._ends, strict=True))
        alone = wall[2 * WARMUP :: 2]
        added, busy = (sorted(map(operator.sub, each[2 * WARMUP + 1 :: 2], each[2 * WARMUP :: 2])) for each in (wall, cpu))
        middle, half = len(added) // 2, round(0.98 * math.sqrt(len(added)))  # 1.96 standard deviations of the median's place
        return {
            "alone_ms": statistics.median(alone),
            "added_ms": added[middle],
            "low_ms": added[middle - half],
            "high_ms": added[middle + half],
            "added_cpu_ms": busy[middle],
        }


def _now() -> tuple[float, float]:
    """The time, and the CPU time of this process, which the load of the machine hardly changes, in seconds."""
    return time.perf_counter(), time.process_time()


Job = Callable[[], Turns]
"""Trains with a framework."""
