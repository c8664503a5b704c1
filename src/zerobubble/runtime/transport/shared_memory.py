"""Messages between CPU ranks of one machine: through shared memory, with an eventfd for each channel to wake a receiver that sleeps.

A channel has a ring of slots. It holds at least as many messages as the program ever has receives posted at once, so a send never
waits longer than under the rendezvous model in which every program is proved not to stop. What a message costs is one copy in, one
copy out, and a wake-up only if the receiver sleeps. A closed socket tells that the other end is gone.

The order "payload, then counter" is kept by processors with total store order only, hence `is_supported`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import select
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.runtime.transport.endpoint import Capabilities, Endpoint, Line, PeerGoneError, Put, Take, Work
from zerobubble.runtime.transport.gloo import GlooEndpoint
from zerobubble.runtime.values.memory import as_memory, is_memory
from zerobubble.runtime.values.shapes import Shapes

_HEADER = 192
_PUT, _TAKEN, _ASLEEP = 0, 8, 16
"""Places in the header, in words of 8 bytes and on cache lines of their own: messages put, messages taken, receiver asleep."""
_ALIGN = 64
_SPIN_S = 100e-6
_THERE, _MISSING, _TRACKED = 0, 1, 2
"""What is told of a tensor in a message: it is there, it is missing, or it is there and a gradient for it flows back."""
ROOMY_BYTES = 32 << 20
"""A ring takes this much room for messages beyond the slots it needs, so that senders run ahead."""


def is_supported() -> bool:
    """Whether this machine can pass messages through shared memory."""
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


class Connection:
    """One end of a channel's wake-up line: an eventfd that wakes the receiver, and a socket that hands over segments and tells of the end.

    Only the receiver is woken by the eventfd (`wakes`): a sender that waits for a slot would consume a wake-up that was meant for it.
    """

    def __init__(self, end: socket.socket, wake_up: int, timeout: float, *, wakes: bool) -> None:
        self._socket = end
        self._wake_up = wake_up
        self._timeout = timeout
        self._segments: list[int] = []
        self._gone = ""
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        if wakes:
            self._poll.register(wake_up, select.POLLIN)
        end.setblocking(False)

    def wake(self) -> None:
        """Wake the receiver."""
        os.eventfd_write(self._wake_up, 1)

    def hand_over(self, segment: int) -> None:
        """Give the file descriptor of a segment to the other end."""
        try:
            socket.send_fds(self._socket, [b"s"], [segment])
        except OSError as error:
            raise PeerGoneError(str(error)) from error

    def take_over(self) -> int:
        """The file descriptor the other end hands over, waiting for it."""
        self.sleep_until(lambda: bool(self._segments))
        return self._segments.pop(0)

    def sleep_until(self, ready: Callable[[], bool], longest_ms: int = 100) -> None:
        """Sleep until `ready()`. Looks by itself at least every `longest_ms`, for the wake-up may come just before it sleeps."""
        end = time.monotonic() + self._timeout
        pause_ms = min(10, longest_ms)
        while not ready():
            if self._gone:
                raise PeerGoneError(self._gone)
            if time.monotonic() > end:
                raise PeerGoneError(f"no answer within {self._timeout:g} s")
            for descriptor, _ in self._poll.poll(pause_ms):
                if descriptor == self._wake_up:
                    os.eventfd_read(self._wake_up)
                else:
                    self._read()
            pause_ms = min(2 * pause_ms, longest_ms)

    def _read(self) -> None:
        """Take a segment from the socket, or note that the other end is gone: what it put before that still counts."""
        try:
            data, segments, _, _ = socket.recv_fds(self._socket, 1, 1)
            self._segments += segments
            self._gone = "" if data else "the connection was closed"
        except OSError as error:
            self._gone = str(error)

    def close(self) -> None:
        """Close both."""
        self._socket.close()
        os.close(self._wake_up)


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


class Ring:
    """One end of a channel's ring for messages of up to `slot_bytes`, `slots` of them."""

    def __init__(self, connection: Connection, slots: int, slot_bytes: int, *, sends: bool, spins: bool) -> None:
        self._connection = connection
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._spins = spins
        self._count = 0
        size = _HEADER + slots * slot_bytes
        segment = self._create(size) if sends else connection.take_over()
        self._map = mmap.mmap(segment, size)
        os.close(segment)
        self._words = memoryview(self._map)[:_HEADER].cast("q")
        self._bytes = memoryview(self._map)[_HEADER:]
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr() + _HEADER

    def _create(self, size: int) -> int:
        segment = os.memfd_create("zerobubble")
        os.ftruncate(segment, size)
        self._connection.hand_over(segment)
        return segment

    def sender(self, shapes: Shapes) -> Put:
        """A call that copies a message of these `shapes` into the ring, where a tensor may be missing.

        It waits for a slot, and raises `PeerGoneError`.
        """
        words, places = self._words, _places(shapes)

        def put(tensors: Sequence[Tensor | None]) -> None:
            count = self._count
            if count - words[_TAKEN] >= self._slots:
                self._connection.sleep_until(lambda: count - words[_TAKEN] < self._slots, longest_ms=1)
            start = count % self._slots * self._slot_bytes
            for tensor, (offset, room) in zip(tensors, places, strict=True):
                if tensor is None:
                    self._bytes[start + offset + room] = _MISSING
                    continue
                whole = tensor if is_memory(tensor) else as_memory(tensor)
                self._bytes[start + offset + room] = _TRACKED if tensor.requires_grad else _THERE
                ctypes.memmove(self._address + start + offset, whole.data_ptr(), room)
            self._count = words[_PUT] = count + 1
            if words[_ASLEEP]:
                self._connection.wake()

        return put

    def receiver(self, shapes: Shapes, *, differentiable: bool) -> Take:
        """A call that gives the next message, which has these `shapes`, None for what is missing in it.

        It waits for the message, and raises `PeerGoneError`. What it copies to is made before it waits. With `differentiable` it asks for
        gradients where the message says so, which is expected to be where the shapes do.
        """
        words = self._words
        parts = [
            (size, dtype, differentiable and needs_gradient, *place)
            for (size, dtype, needs_gradient), place in zip(shapes, _places(shapes), strict=True)
        ]

        def take() -> tuple[Tensor | None, ...]:
            count = self._count
            tensors: list[Tensor | None] = [torch.empty(size, dtype=dtype, requires_grad=needs) for size, dtype, needs, _, _ in parts]
            if words[_PUT] <= count:
                self._wait(lambda: words[_PUT] > count)
            start = count % self._slots * self._slot_bytes
            for number, (tensor, (_, _, needs, offset, room)) in enumerate(zip(tensors, parts, strict=True)):
                assert tensor is not None
                told = self._bytes[start + offset + room]
                if told == _MISSING:
                    tensors[number] = None
                    continue
                ctypes.memmove(tensor.data_ptr(), self._address + start + offset, room)
                if differentiable and (told == _TRACKED) is not needs:
                    tensor.requires_grad_(told == _TRACKED)
            self._count = words[_TAKEN] = count + 1
            return tuple(tensors)

        return take

    def _wait(self, ready: Callable[[], bool]) -> None:
        if self._spins:
            end = time.perf_counter() + _SPIN_S
            while time.perf_counter() < end:
                if ready():
                    return
        self._words[_ASLEEP] = 1
        try:
            self._connection.sleep_until(ready)
        finally:
            self._words[_ASLEEP] = 0


def _places(shapes: Shapes) -> list[tuple[int, int]]:
    """Where in a slot each tensor of a message lies: (offset, bytes); the byte behind it tells whether it is there.

    Copies go by address: a dispatched copy costs far more.
    """
    places, offset = [], 0
    for size, dtype, _ in shapes:
        places.append((offset, _num_bytes(size, dtype)))
        offset += _padded(places[-1][1] + 1)
    return places


def message_bytes(shapes: Shapes) -> int:
    """The room a message takes in a slot."""
    return sum(_padded(_num_bytes(size, dtype) + 1) for size, dtype, _ in shapes) or _ALIGN


def _padded(room: int) -> int:
    return -(-room // _ALIGN) * _ALIGN


def _num_bytes(size: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(size) * dtype.itemsize
