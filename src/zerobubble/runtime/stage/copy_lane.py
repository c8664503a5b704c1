"""Copies to and from host memory, one after another, overlapped with the passes of a rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zerobubble.offload import HostLink
from zerobubble.runtime.device import interface, is_host
from zerobubble.runtime.measure.clock import Instant
from zerobubble.timeline import Copying
from zerobubble.units import NS_PER_S

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Pairs of a target and a source tensor."""


class Copied(NamedTuple):
    """The begin and end of a copy, on the clock of the rank's device."""

    begin: Instant
    end: Instant


class CopyLane(Protocol):
    """Copies to the host and back while a rank computes. Passes overlap with a copy until they `wait` for it."""

    def host_memory(self, size: int) -> Tensor:
        """Allocates `size` bytes of host memory."""

    def copy(self, copying: Copying, pairs: Pairs) -> Copied:
        """Starts a copy, after the work enqueued on the device before and after earlier copies."""

    def wait(self, copied: Copied) -> None:
        """Orders all work enqueued from here on after the end of the copy."""

    def discard(self) -> None:
        """Makes the memory of unfinished copies safe to reuse."""


class HostLane:
    """The lane for stages in host memory. Copies are synchronous, and their duration is simulated from `link`.

    Without a link, the real duration counts.
    """

    def __init__(self, link: HostLink | None) -> None:
        self._link = link
        self._over = 0

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def copy(self, copying: Copying, pairs: Pairs) -> Copied:
        begin = max(time.perf_counter_ns(), self._over)
        for target, source in pairs:
            target.copy_(source)
        takes = 0 if self._link is None else self._link.time(sum(source.nbytes for _, source in pairs), copying)
        self._over = max(begin + takes, time.perf_counter_ns())
        return Copied(begin, self._over)

    def wait(self, copied: Copied) -> None:
        left = copied.end - time.perf_counter_ns()
        if left > 0:
            time.sleep(left / NS_PER_S)

    def discard(self) -> None:
        self._over = 0


class DeviceLane:
    """The lane of an accelerator: a separate stream, and pinned host memory for asynchronous copies.

    The host never waits; streams wait for each other. Device memory is allocated and freed on the compute stream, and the caching allocator
    reuses it in that stream's order. So a copy must start after the work enqueued on the compute stream, and the compute stream must wait
    for the copy before the memory is freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = interface(device)
        self._stream = self._device.new_stream()

    def host_memory(self, size: int) -> Tensor:
        return self._device.host_memory((size,), torch.uint8)

    def copy(self, copying: Copying, pairs: Pairs) -> Copied:
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on_stream(self._stream):
            begin = self._mark()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return Copied(begin, self._mark())

    def _mark(self) -> Instant:
        event = self._device.new_event(timed=True)
        event.record(self._stream)
        return event

    def wait(self, copied: Copied) -> None:
        self._device.current_stream().wait_event(copied.end)

    def discard(self) -> None:
        self._device.current_stream().wait_stream(self._stream)


def lane_for(device: torch.device, link: HostLink | None) -> CopyLane:
    """Returns the lane for a device; `link` sets the simulated speed of copies within host memory."""
    return HostLane(link) if is_host(device) else DeviceLane(device)
