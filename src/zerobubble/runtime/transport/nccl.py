"""Lines over NCCL, for tensors on CUDA devices. Operations of one communicator run in order, so each line has a communicator of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.runtime.transport.endpoint import Capabilities, Endpoint, Group, Line, Work
from zerobubble.runtime.transport.gloo import STUFF, lane_of


class NcclEndpoint(Endpoint):
    """Six NCCL backends of the pipeline's own, one for each kind of tensors and direction between two ranks.

    It carries tensors of stages only, no topics and no further numbers. A wait makes the current stream wait, not the host.
    """

    name = "nccl"
    capabilities = Capabilities(device_types=frozenset({"cuda"}))

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = group
        self._timeout = timedelta(seconds=timeout)
        self._device = torch.device("cuda")
        self._lanes: list[Any] = []
        self._end = weakref.finalize(self, self._lanes.clear)

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:
        self._device = device
        self._lanes += [self.backend(f"lane{lane}") for lane in range(2 * len(STUFF))]

    def backend(self, name: str) -> Any:
        """The communicators between any two ranks for one kind of tensors and direction."""
        rank, size, shared, *_ = self.group
        # Communicators wait in the store, which meanwhile serves nobody else on the same connection. Before torch 2.8 there is but one.
        store = shared.clone() if hasattr(shared, "clone") else shared
        options = dist.distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.distributed_c10d.ProcessGroupNCCL(dist.distributed_c10d.PrefixStore(name, store), rank, size, options)

    def open_channels(self, channels: Iterable[Channel]) -> None:
        """Make the communicators of these channels with a first message each, in one order on all ranks.

        NCCL makes a communicator with the first message between two ranks, and holds each until the other is there: in the order of a
        schedule, ranks would wait for each other in a circle.
        """
        first = torch.zeros(1, device=self._device)
        for channel in sorted(channels):
            if channel.source == self.group.rank:
                self.sender(Line(*channel))(first).wait()
            elif channel.destination == self.group.rank:
                self.receiver(Line(*channel))(first).wait()

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        lanes, lane, peer = self._lanes, lane_of(line), line.destination
        return lambda tensor: lanes[lane].send([tensor], peer, 0)

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        lanes, lane, peer = self._lanes, lane_of(line), line.source
        return lambda tensor: lanes[lane].recv([tensor], peer, 0)

    def abandon(self) -> None:
        self._end.detach()

    def close(self) -> None:
        self._end()
