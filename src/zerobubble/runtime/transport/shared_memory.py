"""Carries messages between CPU ranks of one machine through shared memory.

`same_machine` connects the ranks. Each channel then has a ring of slots for its messages (`ring`), and a wake-up for a sleeping receiver
(`wake_up`).
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.runtime.transport.endpoint import Capabilities, Endpoint, Line, MessageLane, Traffic
from zerobubble.runtime.transport.gloo import GlooEndpoint
from zerobubble.runtime.transport.ring import Ring, RingLane, message_bytes
from zerobubble.runtime.transport.same_machine import connect_all
from zerobubble.runtime.transport.sockets import PeerSockets
from zerobubble.runtime.transport.work import Work
from zerobubble.runtime.values.shapes import Shapes

SPARE_BYTES = 8 << 20
"""The memory for slots beyond those that the rings of a sender need. Senders may run ahead in them. Steps are as fast without them, and no
faster with four times as many."""


class SharedMemoryEndpoint(Endpoint):
    """Carries whole messages through rings of slots in shared memory; messages of unknown shapes go over the lines of `gloo`.

    Call `connect_rings` before `open`, to find out whether the ranks share memory.
    """

    name = "shared-memory"
    capabilities = Capabilities(completes_in_order=True, carries_whole_messages=True)

    def __init__(self, gloo: GlooEndpoint) -> None:
        self.group = gloo.group
        self._gloo = gloo
        self._spare_bytes = SPARE_BYTES
        self._rings: dict[Channel, Ring] = {}
        self._sockets = PeerSockets()
        self._end = weakref.finalize(self, _close_all, self._sockets, self._rings)

    def connect_rings(self, channels: Sequence[Channel]) -> None:
        """Connects the ranks at the ends of `channels`; every rank calls it with the same channels.

        Raises `NoSharedMemoryError` on every rank if any two of them share no memory, and `RuntimeError` if a rank is missing.
        """
        rank, size, *_ = self.group
        spins = size <= (os.cpu_count() or 1)
        for channel, connection in connect_all(self._gloo, channels, self._gloo.timeout).items():
            self._rings[channel] = Ring(connection, f"{os.getpid()} rank {rank}", sends=channel.source == rank, spins=spins)
            self._sockets.add(channel.destination if channel.source == rank else channel.source, connection.fileno())
        channels_by_rank = Counter(channel.source for channel in channels)
        self._spare_bytes = SPARE_BYTES // max(channels_by_rank.values(), default=1)

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:
        self._gloo.open(device, channels)

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        return self._gloo.sender(line)

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        return self._gloo.receiver(line)

    def message_lane(self, channel: Channel, messages: Sequence[Shapes], at_once: int) -> MessageLane:
        """Returns a lane with slots for the largest message, at least as many slots as the receiver waits for at a time."""
        size = max(message_bytes(shapes) for shapes in messages)
        return self._lane(self._rings[channel], Traffic(len(messages), at_once), size)

    def _lane(self, ring: Ring, traffic: Traffic, slot_bytes: int) -> RingLane:
        slots = min(traffic.messages, max(traffic.at_once, self._spare_bytes // slot_bytes))
        return RingLane(ring, slots, slot_bytes)

    def held_bytes(self) -> int:
        """Returns the bytes of the rings into which this rank sends."""
        return sum(ring.size for _, ring in self._own_rings())

    def bytes_for(self, traffic: Mapping[Channel, Traffic]) -> int:
        return sum(self._ring_bytes(ring, traffic.get(channel)) for channel, ring in self._own_rings())

    def _ring_bytes(self, ring: Ring, traffic: Traffic | None) -> int:
        """Returns the bytes of a ring with this traffic; a ring grows as needed and never shrinks."""
        if ring.lane is None or traffic is None:
            return ring.size
        return max(ring.size, self._lane(ring, traffic, ring.lane.slot_bytes).ring_bytes)

    def _own_rings(self) -> Iterator[tuple[Channel, Ring]]:
        """Returns the rings into which this rank sends."""
        return ((channel, ring) for channel, ring in self._rings.items() if channel.source == self.group.rank)

    def disconnect(self, rank: int) -> None:
        self._gloo.disconnect(rank)
        self._sockets.disconnect(rank)

    def detach(self) -> None:
        self._end.detach()
        self._sockets.clear()
        _close_all(self._sockets, self._rings)
        self._gloo.detach()

    def close(self) -> None:
        self._end()
        self._gloo.close()


def _close_all(sockets: PeerSockets, rings: dict[Channel, Ring]) -> None:
    """Disconnects first, because forked children may hold the sockets, and closes this process's ends."""
    sockets.disconnect()
    sockets.clear()
    for ring in rings.values():
        ring.close()
    rings.clear()
