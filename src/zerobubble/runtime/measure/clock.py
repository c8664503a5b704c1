"""When things happened on the device that did them: host clock for CPUs, events for CUDA."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import torch

Mark = Any


class HostClock:
    """Marks are `perf_counter_ns` readings."""

    def start(self) -> None:
        """Begin a step."""

    def mark(self) -> Mark:
        """A point in time."""
        return perf_counter_ns()

    def read(self, mark: Mark) -> int:
        """A mark in `perf_counter_ns` time."""
        return int(mark)


class CudaClock:
    """Marks are events on the current stream, so a pass is timed where it ran and the host never waits for it."""

    def start(self) -> None:
        """Begin a step: tie the first event to the host's clock."""
        torch.cuda.synchronize()
        self._origin = self.mark()
        self._begin = perf_counter_ns()

    def mark(self) -> Mark:
        """A point on the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def read(self, mark: Mark) -> int:
        """A mark in `perf_counter_ns` time; waits until the stream has passed it."""
        mark.synchronize()
        after_ms: float = self._origin.elapsed_time(mark)
        return self._begin + round(after_ms * 1e6)


def clock_for(device: torch.device) -> HostClock | CudaClock:
    """The clock of the device that computes."""
    return CudaClock() if device.type == "cuda" else HostClock()
