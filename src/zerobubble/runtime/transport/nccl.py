"""Carries lines over NCCL, for tensors on CUDA devices.

The operations of one communicator run in order on one stream. So each direction between two ranks has a communicator of its own: else a
receive that waits would hold up a send that the other rank needs. All messages of a program in this direction share it, because both ends
have them in one order. `zerobubble.communicators` has NCCL's rules as a model, and the proof that nothing can deadlock under them.

If a rank fails, the others are left in kernels that wait for its messages, and their hosts wait for these kernels until NCCL's timeout. So
each rank, the failed one and those that receive its report, aborts its own communicators, which ends its kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.communicators import (
    MOST_QUEUES,
    SHARED_CHANNELS,
    SUMS_CHANNELS,
    Communicator,
    Purpose,
    channels_for,
    communicator_of,
    communicators_of,
    held_by,
    queues_for,
)
from zerobubble.errors import InputError
from zerobubble.program import Channel
from zerobubble.rules import ValueKind
from zerobubble.runtime.device import hardware_queues
from zerobubble.runtime.transport.abort import Abort
from zerobubble.runtime.transport.endpoint import Capabilities, Endpoint, Group, Line, PeerGoneError, Sums
from zerobubble.runtime.transport.work import Work


class NcclEndpoint(Endpoint):
    """NCCL backends of this pipeline: for each direction between two ranks, one for messages of stages and one for shared gradients.

    A backend makes a communicator for any two ranks that exchange messages over it. The endpoint carries only tensors of stages, and only
    lines of number 0. A wait makes the current stream wait, not the host.
    """

    name = "nccl"
    capabilities = Capabilities(device_types=frozenset({"cuda"}), can_be_captured=True)

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = group
        self._timeout = timedelta(seconds=timeout)
        self._device = torch.device("cuda")
        self._lanes: dict[tuple[Purpose, bool], Any] = {}
        self._used: set[Communicator] = set()
        self._abort = Abort()
        self._end = weakref.finalize(self, _drop, self._abort, self._lanes)

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:
        self._device = device
        self._used.update(communicators_of(channels))
        for purpose, most in ((Purpose.STAGES, channels_for(self._used)), (Purpose.SHARED, SHARED_CHANNELS)):
            for goes_up in (False, True):
                self._lanes[purpose, goes_up] = self._abortable(self.backend(f"{purpose}-{'up' if goes_up else 'down'}", most=most))

    def _abortable(self, backend: Any) -> Any:
        self._abort.add(backend)
        return backend

    def backend(self, name: str, members: Sequence[int] | None = None, most: int | None = None) -> Any:
        """Makes the communicators between any two ranks for one purpose and direction, or one among all these `members`.

        Their kernels have at most `most` thread blocks, or as many as NCCL chooses.
        """
        ranks, shared = members or self.group.ranks, self.group.store
        rank, size = ranks.index(self.group.rank), len(ranks)
        # Communicators wait in the store, which then serves no other call on the same connection. Torch before 2.8 cannot clone one.
        store = shared.clone() if hasattr(shared, "clone") else shared
        options = dist.distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        if most is not None and hasattr(options, "config"):  # a build with an old NCCL or RCCL has none
            options.config.max_ctas = most
        return dist.distributed_c10d.ProcessGroupNCCL(dist.distributed_c10d.PrefixStore(name, store), rank, size, options)

    def open_channels(self, channels: Iterable[Channel]) -> None:
        """Makes the communicators of these channels with a first message each, in the same order on all ranks.

        NCCL makes a communicator at the first message between two ranks, and blocks each rank until the other arrives. In the order of a
        schedule, ranks would wait for each other in a circle. Raises `InputError`, the same on all ranks, if kernels could block each other
        in the hardware queues of a device.
        """
        channels = list(channels)
        self._used.update(communicators_of(channels))
        self._refuse_few_queues()
        first = torch.zeros(1, dtype=torch.float32, device=self._device)
        for (source, destination), purpose in communicators_of(channels):
            carries = ValueKind.WEIGHT_WORK if purpose is Purpose.SHARED else ValueKind.ACTIVATION
            if source == self.group.rank:
                self.sender(Line(source, destination, carries))(first).wait()
            elif destination == self.group.rank:
                self.receiver(Line(source, destination, carries))(first).wait()

    def _refuse_few_queues(self) -> None:
        needed, available = queues_for(self._used), hardware_queues()
        if available is not None and available < needed:
            raise InputError(
                "this pipeline needs {needed} hardware queues on a GPU, or kernels that wait for messages can block each other forever; "
                "CUDA_DEVICE_MAX_CONNECTIONS allows {found}",
                needed=needed,
                found=available,
                remedy=f"set it to {needed} or more before the process uses the GPU"
                if needed <= MOST_QUEUES
                else f"use fewer ranks with a divided head: {MOST_QUEUES} is its maximum",
            )

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        lanes, lane, peer = self._lanes, self._lane_of(line), self.group.place(line.destination)
        return lambda tensor: _backend_of(lanes, lane).send([tensor], peer, 0)

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        lanes, lane, peer = self._lanes, self._lane_of(line), self.group.place(line.source)
        return lambda tensor: _backend_of(lanes, lane).recv([tensor], peer, 0)

    def _lane_of(self, line: Line) -> tuple[Purpose, bool]:
        """Returns the key of the line's backend. A backend serves one direction: in its communicators, one rank only sends."""
        assert isinstance(line.carries, ValueKind)
        communicator = communicator_of(Channel(line.source, line.destination, line.carries))
        self._used.add(communicator)
        return communicator.purpose, line.source < line.destination

    def held_bytes(self) -> int:
        """Returns the GPU memory that communicators hold, at most: as on GPUs with NVLink. NCCL does not report it."""
        return held_by(self.group.rank, list(self._used)).bytes

    def sums(self, members: Sequence[int], number: int = 0) -> Sums:
        self._used.add(Communicator(tuple(members), Purpose.SUMS))
        return _NcclSums(self._abortable(self.backend("sums-" + "-".join(map(str, members)), members, SUMS_CHANNELS)))

    def abort(self) -> bool:
        self._lanes.clear()  # first: a call that starts during the abort must raise instead of using an aborted communicator
        self._abort.start()
        return True

    def detach(self) -> None:
        self._end.detach()

    def close(self) -> None:
        self._end()


def _backend_of(lanes: dict[tuple[Purpose, bool], Any], lane: tuple[Purpose, bool]) -> Any:
    """Returns the backend of a lane. Raises `PeerGoneError` after an abort or close."""
    if not lanes:
        raise PeerGoneError("its communicators were aborted")
    return lanes[lane]


def _drop(abort: Abort, lanes: dict[tuple[Purpose, bool], Any]) -> None:
    lanes.clear()
    abort.close()


class _NcclSum:
    """An enqueued sum. `wait` makes the current stream wait for it and then scatter the result."""

    times = None

    def __init__(self, work: Work, tensor: Tensor, scatter: Callable[[Tensor], None]) -> None:
        self._work, self._tensor, self._scatter = work, tensor, scatter

    def wait(self) -> None:
        self._work.wait()
        self._scatter(self._tensor)


class _NcclSums:
    """Sums on a communicator of their own. The current stream waits for them, not the host."""

    def __init__(self, backend: Any) -> None:
        self._backend: Any = backend

    def start(self, gather: Callable[[], Tensor], scatter: Callable[[Tensor], None]) -> _NcclSum:
        tensor = gather()
        return _NcclSum(self._backend.allreduce([tensor]), tensor, scatter)

    def close(self) -> None:
        self._backend = None
