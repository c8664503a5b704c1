"""Copies to host memory and back beside the passes of a rank, one after another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zerobubble.offload import HostLink
from zerobubble.runtime.measure.clock import CudaClock, Instant
from zerobubble.timeline import Copying
from zerobubble.units import NS_PER_S

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Tensors to copy into, each with the one to copy from."""


class Copied(NamedTuple):
    """When a copy begins and ends, as the clock of the rank's device notes it."""

    begin: Instant
    end: Instant


class CopyLane(Protocol):
    """What a rank copies to the host and back while it computes. The passes go on beside a copy until they `wait` for it."""

    def host_memory(self, size: int) -> Tensor:
        """So many bytes of host memory."""

    def copy(self, copying: Copying, pairs: Pairs) -> Copied:
        """Begin to copy, once what the device was given before is done, and the copies before this one are."""

    def wait(self, copied: Copied) -> None:
        """What the device is given from here on comes after the end of the copy."""

    def discard(self) -> None:
        """Whatever is being copied, its memory may be used for something else from here on."""


class HostLane:
    """The lane where stages are in host memory: each copy is made at once, and counts as lasting as long as it would over `link`.

    Without a link it lasts as long as it takes.
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


class CudaLane:
    """The lane of a CUDA device: a stream of its own, and host memory in which the device can write by itself.

    The host waits for nothing: streams wait for each other. Memory of the device is taken and let go on the stream of the passes, to which
    the allocator gives it again; so copies begin behind what that stream has been given, and it goes on behind the end of a copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._mark = CudaClock(device).mark

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def copy(self, copying: Copying, pairs: Pairs) -> Copied:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            begin = self._mark()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return Copied(begin, self._mark())

    def wait(self, copied: Copied) -> None:
        torch.cuda.current_stream(self._device).wait_event(copied.end)

    def discard(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def lane_for(device: torch.device, link: HostLink | None) -> CopyLane:
    """The lane of the device that computes; `link` paces copies within host memory."""
    return CudaLane(device) if device.type == "cuda" else HostLane(link)
