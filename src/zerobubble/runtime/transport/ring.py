"""A ring of slots in shared memory that carries the messages of one channel.

A channel has one ring for the life of the pipeline. Each set of messages, of one program with one set of shapes, has a lane with its own
size of slots, and the lanes take turns. All messages of a step are received within it, so the sender can change the layout of the ring
between two steps. A lane that needs more memory than the ring has gets a larger segment, which replaces the previous one.

A lane has at least as many slots as its program ever has receives posted at once. So a send never waits longer than under the rendezvous
model, in which every program is proved free of deadlock. A message costs one copy in, one copy out, and a wake-up only if the receiver
sleeps.

There is one writer for each counter and no lock. The sender writes the payload and then its counter; the receiver reads them in the
opposite order. Only processors with total store order, such as x86-64, keep the two stores in order. If the receiver marks itself asleep
just after the sender has looked, no wake-up comes; so it also polls the counter while it sleeps.
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
"""Indices in the header, in words of 8 bytes and on separate cache lines: messages put, messages taken, receiver asleep."""
_ALIGN = 64
_SPIN_S = 100e-6
_PRESENT, _MISSING, _TRACKED = 0, 1, 2
"""The mark of a tensor in a message: present, missing, or present and requiring a gradient."""


class RingSegment:
    """Mapped shared memory: the `words` of the header, and the `memory` after it, which begins at `address`.

    It stays mapped while this object or one of its views is alive. `size` is the whole size in bytes.
    """

    __slots__ = ("address", "memory", "size", "words")

    def __init__(self, mapped: mmap.mmap | bytearray) -> None:
        self.size = len(mapped)
        self.words = memoryview(mapped)[:_HEADER].cast("q")
        self.memory = memoryview(mapped)[_HEADER:]
        self.address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() + _HEADER


def _without_memory() -> RingSegment:
    """Returns the segment of a ring that has no lane yet or is closed: no message arrives in it, and no slot is free."""
    segment = RingSegment(bytearray(_HEADER))
    segment.words[_PUT], segment.words[_TAKEN] = -1, -(1 << 62)
    return segment


class Ring:
    """One end of a channel's ring: the sender's if it `sends`. `owner` is its name in the listings of the operating system.

    `count` is the number of messages put, or taken, so far. `lane` is the current lane, the same at both ends in every step.
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
        """The bytes of its memory, counted once for both ends."""
        return self.segment.size if self.lane is not None else 0

    def turn_to(self, lane: RingLane) -> None:
        """Gives the ring to `lane`, once the messages of the previous lane have been received. Both ends do so in the same step.

        Raises `PeerGoneError`.
        """
        if lane.ring_bytes > self.segment.size:
            self.segment = RingSegment(self._larger(lane.ring_bytes))
        elif self._sends:
            words, count = self.segment.words, self.count
            self.connection.sleep_until(lambda: words[_TAKEN] == count, longest_ms=1)
        if self.lane is not None:
            self.lane.limit = 0
        self.lane = lane

    def _larger(self, size: int) -> mmap.mmap:
        """Returns a larger segment, which continues the counters of the previous one: the sender makes it and passes it to the receiver."""
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
        """Closes the connection and frees the memory. A message that another thread is copying keeps its segment until it is done."""
        self.connection.close()
        self.segment = _without_memory()
        if self.lane is not None:
            self.lane.limit = 0
            self.lane = None


class RingLane:
    """One end of a ring for messages of up to `slot_bytes`, `slots` of them at a time.

    Messages with numbers below `limit` can be put or taken without checking the current lane or the other end.
    """

    def __init__(self, ring: Ring, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.limit = 0
        self._ring = ring

    @property
    def ring_bytes(self) -> int:
        """The memory that a ring needs for this lane."""
        return _HEADER + self.slots * self.slot_bytes

    def sender(self, shapes: Shapes) -> Put:
        """Returns a function that waits for a slot and copies a message of these `shapes` into it. Tensors of the message may be None.

        The function raises `PeerGoneError`.
        """
        ring, places, slots, slot_bytes = self._ring, _places(shapes), self.slots, self.slot_bytes

        def put(tensors: Sequence[Tensor | None]) -> None:
            count = ring.count
            if count >= self.limit:
                self._wait_for_slot()
            segment = ring.segment
            memory, address, start = segment.memory, segment.address, count % slots * slot_bytes
            for tensor, (offset, size) in zip(tensors, places, strict=True):
                if tensor is None:
                    memory[start + offset + size] = _MISSING
                    continue
                whole = tensor if is_memory(tensor) else as_memory(tensor)
                memory[start + offset + size] = _TRACKED if tensor.requires_grad else _PRESENT
                ctypes.memmove(address + start + offset, whole.data_ptr(), size)
            words = segment.words
            ring.count = words[_PUT] = count + 1  # after the payload: this publishes it
            if words[_ASLEEP]:
                ring.connection.wake()

        return put

    def receiver(self, shapes: Shapes, *, differentiable: bool) -> Take:
        """Returns a function that waits for the next message, which has these `shapes`, and returns its tensors, None for missing ones.

        The function raises `PeerGoneError`. It allocates its result before it waits, to use the time. With `differentiable`, tensors
        require gradients where the message says so, which the shapes are expected to predict.
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
            for number, (tensor, (_, _, needs, offset, size)) in enumerate(zip(tensors, parts, strict=True)):
                assert tensor is not None
                mark = memory[start + offset + size]
                if mark == _MISSING:
                    tensors[number] = None
                    continue
                ctypes.memmove(tensor.data_ptr(), address + start + offset, size)
                if differentiable and (mark == _TRACKED) is not needs:
                    tensor.requires_grad_(mark == _TRACKED)
            ring.count = segment.words[_TAKEN] = count + 1  # after the copies: this frees the slot
            return tuple(tensors)

        return take

    def _wait_for_slot(self) -> None:
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
            words[_ASLEEP] = 1  # set before `sleep_until`, which looks at the counter once more before it sleeps
            try:
                ring.connection.sleep_until(lambda: words[_PUT] > count)
            finally:
                words[_ASLEEP] = 0
        self.limit = words[_PUT]


def _spun_until(ready: Callable[[], bool]) -> bool:
    """Polls for a moment and returns whether `ready()` came true."""
    end = time.perf_counter() + _SPIN_S
    while time.perf_counter() < end:
        if ready():
            return True
    return False


def _places(shapes: Shapes) -> list[tuple[int, int]]:
    """Returns the offset and bytes of each tensor of a message in a slot; the byte after them holds its mark.

    Messages are copied by address: a copy through PyTorch's dispatcher costs far more.
    """
    places, offset = [], 0
    for size, dtype, _ in shapes:
        places.append((offset, _num_bytes(size, dtype)))
        offset += _padded(places[-1][1] + 1)
    return places


def message_bytes(shapes: Shapes) -> int:
    """Returns the bytes that a message takes in a slot."""
    return sum(_padded(_num_bytes(size, dtype) + 1) for size, dtype, _ in shapes) or _ALIGN


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _num_bytes(size: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(size) * dtype.itemsize
