"""Messages between CPU ranks of one machine, through shared memory.

Each channel has rings of slots for its messages (`ring`), and a wake-up line for a receiver that sleeps (`wake_up`).
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.runtime.transport.endpoint import Capabilities, Endpoint, Line, Work
from zerobubble.runtime.transport.gloo import GlooEndpoint
from zerobubble.runtime.transport.ring import Ring, message_bytes
from zerobubble.runtime.transport.wake_up import Connection
from zerobubble.runtime.values.shapes import Shapes

ROOMY_BYTES = 32 << 20
"""A ring takes this much room for messages beyond the slots it needs, so that senders run ahead."""


def is_supported() -> bool:
    """Whether this machine can pass messages through shared memory, and its processors keep the order of stores that a ring needs."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class SharedMemoryEndpoint(Endpoint):
    """Whole messages go through a ring of slots in shared memory; what has no known shapes goes over the lines of `gloo`."""

    name = "shared-memory"
    capabilities = Capabilities(completes_in_order=True, carries_whole_messages=True)

    def __init__(self, gloo: GlooEndpoint) -> None:
        self.group = gloo.group
        self._gloo = gloo
        self._spins = gloo.group.size <= (os.cpu_count() or 1)
        self._connections: dict[Channel, Connection] = {}
        self._end = weakref.finalize(self, _close_all, self._connections)

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:
        self._gloo.open(device, channels)
        rendezvous = Rendezvous(self.group.name, self.group.rank, self._gloo.timeout)
        rendezvous.listen(channels)
        self._barrier()
        self._connections.update(rendezvous.connect(channels))
        self._barrier()
        rendezvous.remove()

    def _barrier(self) -> None:
        self._gloo.gather(torch.zeros(1))

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        return self._gloo.sender(line)

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        return self._gloo.receiver(line)

    def message_lane(self, channel: Channel, messages: Sequence[Shapes], at_once: int) -> Ring:
        """A ring with room for the largest message in each slot, and no fewer slots than the receiver waits for at a time."""
        size = max(message_bytes(shapes) for shapes in messages)
        slots = min(len(messages), max(at_once, ROOMY_BYTES // size))
        sends = channel.source == self.group.rank
        return Ring(self._connections[channel], slots, size, sends=sends, spins=self._spins)

    def close(self) -> None:
        self._end()
        self._gloo.close()


def _close_all(connections: dict[Channel, Connection]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


class Rendezvous:
    """Opens the sockets of a pipeline's channels: receivers listen, all ranks wait for each other, senders connect."""

    def __init__(self, name: str, rank: int, timeout: float) -> None:
        self._folder = os.path.join(tempfile.gettempdir(), f"zerobubble-{name}")
        self._rank = rank
        self._timeout = timeout
        self._listening: dict[Channel, socket.socket] = {}

    def listen(self, channels: Sequence[Channel]) -> None:
        """Be ready for the senders of the channels that end here."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        for channel in channels:
            if channel.destination == self._rank:
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(self._path(channel))
                listener.listen(1)
                self._listening[channel] = listener

    def connect(self, channels: Sequence[Channel]) -> dict[Channel, Connection]:
        """The connections of the channels that start or end here; every rank must be listening."""
        ends: dict[Channel, Connection] = {}
        for channel in channels:
            if channel.source == self._rank:
                end = socket.socket(socket.AF_UNIX)
                end.connect(self._path(channel))
                wake_up = os.eventfd(0, os.EFD_CLOEXEC)
                socket.send_fds(end, [b"b"], [wake_up])
                ends[channel] = Connection(end, wake_up, self._timeout, wakes=False)
        for channel, listener in self._listening.items():
            listener.settimeout(self._timeout)
            end = listener.accept()[0]
            (wake_up,) = socket.recv_fds(end, 1, 1)[1]
            ends[channel] = Connection(end, wake_up, self._timeout, wakes=True)
            listener.close()
            os.unlink(self._path(channel))
        return ends

    def remove(self) -> None:
        """Remove the folder once nobody needs it; the last rank succeeds."""
        try:
            os.rmdir(self._folder)
        except OSError:
            return

    def _path(self, channel: Channel) -> str:
        return os.path.join(self._folder, f"{channel.source}-{channel.destination}-{channel.stuff}")
