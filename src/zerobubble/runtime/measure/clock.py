"""Times of passes and messages on the device that runs them: the host clock for CPUs, events for accelerators."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import torch

from zerobubble.runtime.device import interface, is_host

Instant = Any
"""A point in time, in the form of its clock, or a reading of `perf_counter_ns`; `read` converts it to ns."""


class HostClock:
    """An instant is a reading of `perf_counter_ns`."""

    instants_last = True
    """Whether instants are valid during later steps."""

    def start(self) -> None:
        """Begins a step."""

    def follow(self) -> None:
        """Does nothing: there is one clock."""

    def settle(self) -> None:
        """Waits until the device has finished its work."""

    mark = staticmethod(perf_counter_ns)
    """Returns the current instant. Not a Python method, because every pass and message calls it."""

    def read(self, instant: Instant) -> int:
        """Returns an instant in `perf_counter_ns` time."""
        return int(instant)


class DeviceClock:
    """An instant is an event on the stream that is current when `follow` is called, so the host waits for no pass.

    The host's clock is read once, after the step, when its times are first needed. `start` makes the events of earlier steps available for
    reuse: creating an event and looking up the current stream take several times as long as recording the event.
    """

    instants_last = False

    def __init__(self, device: torch.device) -> None:
        self._device = interface(device)
        self._origin: Instant = None
        self._time = 0
        self._events: list[Instant] = []
        self._num_used = 0
        self._stream: Any = None

    def start(self) -> None:
        """Begins a step. Instants of earlier steps become invalid."""
        self._origin = None
        self._num_used = 0
        self.follow()

    def follow(self) -> None:
        """Takes the calling thread's current stream for the instants from here on."""
        self._stream = self._device.current_stream()

    def settle(self) -> None:
        """Waits until the device has finished its work."""
        if self._origin is None:
            self._origin = self.mark()
            self._origin.synchronize()
            self._time = perf_counter_ns()

    def mark(self) -> Instant:
        """Marks a point on the stream."""
        if self._num_used == len(self._events):
            self._events.append(self._device.new_event(timed=True))
        event = self._events[self._num_used]
        self._num_used += 1
        event.record(self._stream)
        return event

    def read(self, instant: Instant) -> int:
        """Returns an instant in `perf_counter_ns` time; waits until its stream has passed it. The host's own instants are in that time."""
        if isinstance(instant, int):
            return instant
        self.settle()
        instant.synchronize()
        before_ms: float = instant.elapsed_time(self._origin)
        return self._time - round(before_ms * 1e6)


def clock_for(device: torch.device) -> HostClock | DeviceClock:
    """Returns the clock of a device."""
    return HostClock() if is_host(device) else DeviceClock(device)
