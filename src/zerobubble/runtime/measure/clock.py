"""When things happened on the device that did them: host clock for CPUs, events for CUDA."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import torch

Instant = Any
"""A point in time as a clock notes it: `read` turns it into ns."""


class HostClock:
    """An instant is a reading of `perf_counter_ns`."""

    def start(self) -> None:
        """Begin a step."""

    def settle(self) -> None:
        """Wait until the device has done what it was given."""

    mark = staticmethod(perf_counter_ns)
    """A point in time; no method of ours, because every pass and message calls it."""

    def read(self, instant: Instant) -> int:
        """An instant in `perf_counter_ns` time."""
        return int(instant)


class CudaClock:
    """An instant is an event on the stream that the device is at, so a pass is timed where it ran and the host waits for none of them.

    The host's clock is read once the step is over, when somebody asks for its times.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin: Instant = None
        self._time = 0

    def start(self) -> None:
        """Begin a step, whose times are not read yet."""
        self._origin = None

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if self._origin is None:
            self._origin = self.mark()
            self._origin.synchronize()
            self._time = perf_counter_ns()

    def mark(self) -> Instant:
        """A point on the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, instant: Instant) -> int:
        """An instant in `perf_counter_ns` time; waits until the stream has passed it."""
        self.settle()
        instant.synchronize()
        before_ms: float = instant.elapsed_time(self._origin)
        return self._time - round(before_ms * 1e6)


def clock_for(device: torch.device) -> HostClock | CudaClock:
    """The clock of the device that computes."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
