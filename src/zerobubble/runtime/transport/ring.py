"""A ring of slots in shared memory, through which the messages of one channel go.

A channel has one ring for as long as the pipeline lives. Each set of messages that it comes to carry, of one program with one set of
shapes, has a lane with slots of its own size, and the lanes take turns: all messages of a step are taken in it, so that between two steps
the sender can lay out the ring anew. A lane that needs more room than there is gets a larger segment of memory, which replaces the one
before.

A lane has at least as many slots as its program ever has receives posted at once, so a send never waits longer than under the rendezvous
model in which every program is proved not to stop. What a message costs is one copy in, one copy out, and a wake-up only if the receiver
sleeps.

The order "payload, then counter" is kept by processors with total store order only, such as x86-64.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zerobubble.runtime.transport.endpoint import Put, Take
from zerobubble.runtime.transport.wake_up import Connection
from zerobubble.runtime.values.memory import as_memory, is_memory
from zerobubble.runtime.values.shapes import Shapes

_HEADER = 192
_PUT, _TAKEN, _ASLEEP = 0, 8, 16
"""Places in the header, in words of 8 bytes and on cache lines of their own: messages put, messages taken, receiver asleep."""
_ALIGN = 64
_SPIN_S = 100e-6
_THERE, _MISSING, _TRACKED = 0, 1, 2
"""What is told of a tensor in a message: it is there, it is missing, or it is there and a gradient for it flows back."""


class Segment:
    """Shared memory, mapped for as long as someone holds this object or one of its views: the words of the header, and what follows it.

    `address` is where the latter begins. `size` is that of both, in bytes.
    """

    __slots__ = ("address", "memory", "size", "words")

    def __init__(self, mapped: mmap.mmap | bytearray) -> None:
        self.size = len(mapped)
        self.words = memoryview(mapped)[:_HEADER].cast("q")
        self.memory = memoryview(mapped)[_HEADER:]
        self.address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() + _HEADER


def _without_memory() -> Segment:
    """What a ring has before its first lane and when it is closed: no message comes, and there is never room for one."""
    segment = Segment(bytearray(_HEADER))
    segment.words[_PUT], segment.words[_TAKEN] = -1, -(1 << 62)
    return segment


class Ring:
    """One end of a channel's ring: the sender's if it `sends`. `owner` names it in the lists of the operating system.

    `count` is the number of messages put, or taken, so far. `lane` is the one whose turn it is, the same at both ends in every step.
    """

    def __init__(self, connection: Connection, owner: str, *, sends: bool, spins: bool) -> None:
        self.connection = connection
        self.count = 0
        self.lane: RingLane | None = None
        self.segment = _without_memory()
        self.spins = spins
        self._owner = owner
        self._sends = sends

    @property
    def size(self) -> int:
        """The bytes of memory that it takes, once for both ends."""
        return self.segment.size if self.lane is not None else 0

    def turn_to(self, lane: RingLane) -> None:
        """Let `lane` have the ring, once the messages of the lane before have been taken; both ends do so in the same step.

        Raises `PeerGoneError`.
        """
        if lane.ring_bytes > self.segment.size:
            self.segment = Segment(self._larger(lane.ring_bytes))
        elif self._sends:
            words, count = self.segment.words, self.count
            self.connection.sleep_until(lambda: words[_TAKEN] == count, longest_ms=1)
        if self.lane is not None:
            self.lane.limit = 0
        self.lane = lane

    def _larger(self, size: int) -> mmap.mmap:
        """A segment that goes on counting where the one before is: the sender makes it and hands it over."""
        descriptor = os.memfd_create(f"zerobubble {self._owner}") if self._sends else self.connection.take_over()
        try:
            if self._sends:
                os.ftruncate(descriptor, size)
            mapped = mmap.mmap(descriptor, size)
            if self._sends:
                words = memoryview(mapped)[:_HEADER].cast("q")
                words[_PUT] = words[_TAKEN] = self.count
                self.connection.hand_over(descriptor)
            return mapped
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the line and give back the memory; whoever is at work on a message keeps it until then, and meets a closed line after."""
        self.connection.close()
        self.segment = _without_memory()
        if self.lane is not None:
            self.lane.limit = 0
            self.lane = None


class RingLane:
    """One end of a ring for messages of up to `slot_bytes`, `slots` of them at a time.

    Below `limit`, the number of a message, neither the turn nor the other end need be looked at before it is put or taken.
    """

    def __init__(self, ring: Ring, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.limit = 0
        self._ring = ring

    @property
    def ring_bytes(self) -> int:
        """The memory that a ring needs for it."""
        return _HEADER + self.slots * self.slot_bytes

    def sender(self, shapes: Shapes) -> Put:
        """A call that copies a message of these `shapes` into the ring, where a tensor may be missing.

        It waits for a slot, and raises `PeerGoneError`.
        """
        ring, places, slots, slot_bytes = self._ring, _places(shapes), self.slots, self.slot_bytes

        def put(tensors: Sequence[Tensor | None]) -> None:
            count = ring.count
            if count >= self.limit:
                self._wait_for_room()
            segment = ring.segment
            memory, address, start = segment.memory, segment.address, count % slots * slot_bytes
            for tensor, (offset, room) in zip(tensors, places, strict=True):
                if tensor is None:
                    memory[start + offset + room] = _MISSING
                    continue
                whole = tensor if is_memory(tensor) else as_memory(tensor)
                memory[start + offset + room] = _TRACKED if tensor.requires_grad else _THERE
                ctypes.memmove(address + start + offset, whole.data_ptr(), room)
            words = segment.words
            ring.count = words[_PUT] = count + 1
            if words[_ASLEEP]:
                ring.connection.wake()

        return put

    def receiver(self, shapes: Shapes, *, differentiable: bool) -> Take:
        """A call that gives the next message, which has these `shapes`, None for what is missing in it.

        It waits for the message, and raises `PeerGoneError`. What it copies to is made before it waits. With `differentiable` it asks for
        gradients where the message says so, which is expected to be where the shapes do.
        """
        ring, slots, slot_bytes = self._ring, self.slots, self.slot_bytes
        parts = [
            (size, dtype, differentiable and needs_gradient, *place)
            for (size, dtype, needs_gradient), place in zip(shapes, _places(shapes), strict=True)
        ]

        def take() -> tuple[Tensor | None, ...]:
            count = ring.count
            tensors: list[Tensor | None] = [
                torch.empty(size, dtype=dtype, requires_grad=needs, device="cpu") for size, dtype, needs, _, _ in parts
            ]
            if count >= self.limit:
                self._wait_for_message()
            segment = ring.segment
            memory, address, start = segment.memory, segment.address, count % slots * slot_bytes
            for number, (tensor, (_, _, needs, offset, room)) in enumerate(zip(tensors, parts, strict=True)):
                assert tensor is not None
                told = memory[start + offset + room]
                if told == _MISSING:
                    tensors[number] = None
                    continue
                ctypes.memmove(tensor.data_ptr(), address + start + offset, room)
                if differentiable and (told == _TRACKED) is not needs:
                    tensor.requires_grad_(told == _TRACKED)
            ring.count = segment.words[_TAKEN] = count + 1
            return tuple(tensors)

        return take

    def _wait_for_room(self) -> None:
        ring, slots = self._ring, self.slots
        if ring.lane is not self:
            ring.turn_to(self)
        words, count = ring.segment.words, ring.count
        if count - words[_TAKEN] >= slots:
            ring.connection.sleep_until(lambda: count - words[_TAKEN] < slots, longest_ms=1)
        self.limit = words[_TAKEN] + slots

    def _wait_for_message(self) -> None:
        ring = self._ring
        if ring.lane is not self:
            ring.turn_to(self)
        words, count = ring.segment.words, ring.count
        if words[_PUT] <= count and not (ring.spins and _spun_until(lambda: words[_PUT] > count)):
            words[_ASLEEP] = 1
            try:
                ring.connection.sleep_until(lambda: words[_PUT] > count)
            finally:
                words[_ASLEEP] = 0
        self.limit = words[_PUT]


def _spun_until(ready: Callable[[], bool]) -> bool:
    """Look again and again for a moment; whether it came true."""
    end = time.perf_counter() + _SPIN_S
    while time.perf_counter() < end:
        if ready():
            return True
    return False


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
