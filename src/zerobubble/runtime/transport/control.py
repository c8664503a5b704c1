"""The small host-side messages of a pipeline: numbers under a topic, each topic with the type of its payload.

A payload is a value that can be written as float64 numbers and read back. Its class says under which topic it travels; the class is
defined where the message is understood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from torch import Tensor


class Topic(Enum):
    """What a control message is about. Messages under different topics never wait for each other."""

    GATHER = 0
    CLOCK = 1
    STEP = 2
    LOSS = 3
    SHARED_GRADIENTS = 4
    NORMS_SO_FAR = 5
    NORMS_OF_ALL = 6
    ADDED_LOSSES = 7
    BATCH = 8
    ORDER = 9


class ControlPayload(Protocol):
    """What is said under one `topic`."""

    topic: ClassVar[Topic]

    def numbers(self) -> Sequence[float]:
        """The payload as numbers."""

    @classmethod
    def read(cls, numbers: Tensor) -> Self:
        """The payload that was written as these `numbers`, a float64 tensor."""


P = TypeVar("P", bound=ControlPayload)
Wait = Callable[[Any, int, str], None]
"""Waits for the work of an exchange with a rank, while doing something."""


class Sending:
    """A control message on its way to `peer`. Keep it until it has been waited for, or until the step is over."""

    __slots__ = ("_numbers", "_wait", "_work", "peer")

    def __init__(self, work: Any, numbers: Tensor, peer: int, wait: Wait) -> None:
        self.peer = peer
        self._work = work
        self._numbers = numbers
        self._wait = wait

    def wait(self, doing: str | None = None) -> None:
        """Wait until the message has left; raises `LostContactError`, or `RuntimeError` without `doing`, which is for collectives."""
        if doing is None:
            self._work.wait()
        else:
            self._wait(self._work, self.peer, doing)


class Expected(Generic[P]):
    """A control message that is to come from `peer`. Whoever keeps it after an error keeps its connection open."""

    __slots__ = ("_kind", "_numbers", "_wait", "_work", "peer")

    def __init__(self, kind: type[P], work: Any, numbers: Tensor, peer: int, wait: Wait) -> None:
        self.peer = peer
        self._kind = kind
        self._work = work
        self._numbers = numbers
        self._wait = wait

    def wait(self, doing: str | None = None) -> P:
        """The payload, once it is there; raises `LostContactError`, or `RuntimeError` without `doing`, which is for collectives."""
        if doing is None:
            self._work.wait()
        else:
            self._wait(self._work, self.peer, doing)
        return self._kind.read(self._numbers)
