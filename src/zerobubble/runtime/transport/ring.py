"""A ring of slots in shared memory, through which the messages of one channel go.

It holds at least as many messages as the program ever has receives posted at once, so a send never waits longer than under the rendezvous
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
