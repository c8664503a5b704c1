"""Defines the small host-side messages of a pipeline: numbers sent under a topic. Each topic has one type of payload.

A payload is a value that can be written as float64 numbers and read back. Its class declares its topic, and is defined in the module that
interprets the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from torch import Tensor


class Topic(Enum):
    """The subject of a control message. Messages of different topics never wait for each other."""

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
    OPTIMIZERS = 10
    COPIES = 11


class ControlPayload(Protocol):
    """The payload of the messages of one `topic`."""

    topic: ClassVar[Topic]

    def numbers(self) -> Sequence[float]:
        """Returns the payload as numbers."""

    @classmethod
    def read(cls, numbers: Tensor) -> Self:
        """Returns the payload that was written as these `numbers`, a float64 tensor."""


P = TypeVar("P", bound=ControlPayload)
Wait = Callable[[Any, int, str], None]
"""Waits for the work of an exchange with a rank. The last argument describes, for errors, what this rank is doing."""


class Sending:
    """A control message that is being sent to `peer`. Keep it until `wait` returns or the step ends: it owns the memory of the message."""

    __slots__ = ("_numbers", "_wait", "_work", "peer")

    def __init__(self, work: Any, numbers: Tensor, peer: int, wait: Wait) -> None:
        self.peer = peer
        self._work = work
        self._numbers = numbers
        self._wait = wait

    def wait(self, doing: str | None = None) -> None:
        """Waits until the message is sent. Raises `LostContactError` on failure; without `doing`, as in collectives, `RuntimeError`."""
        if doing is None:
            self._work.wait()
        else:
            self._wait(self._work, self.peer, doing)


class Expected(Generic[P]):
    """A control message that is expected from `peer`. Drop it after an error, because it keeps its connection open."""

    __slots__ = ("_kind", "_numbers", "_wait", "_work", "peer")

    def __init__(self, kind: type[P], work: Any, numbers: Tensor, peer: int, wait: Wait) -> None:
        self.peer = peer
        self._kind = kind
        self._work = work
        self._numbers = numbers
        self._wait = wait

    def wait(self, doing: str | None = None) -> P:
        """Waits for the message and returns its payload. Raises like `Sending.wait`."""
        if doing is None:
            self._work.wait()
        else:
            self._wait(self._work, self.peer, doing)
        return self._kind.read(self._numbers)
