"""The pipelines of this process, numbered as they were made: a rank that keeps one of them waiting may be in a call of another."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from zerobubble.runtime.failure.report import RankStatus
from zerobubble.runtime.failure.turn import Turn


class Inside(NamedTuple):
    """What a rank does in a call of a pipeline, its `status`, and when it gave up, on the clock of `time.monotonic`; inf if it did not."""

    until: float
    status: RankStatus


class UsesPipeline(Protocol):
    """A rank's part in a pipeline; `turn` knows the thread that made its last call."""

    turn: Turn

    def inside(self) -> Inside | None:
        """What the rank does in a call of this pipeline, or did when it gave up lately; None between two calls."""


_numbers = count(1)
_living: WeakValueDictionary[int, UsesPipeline] = WeakValueDictionary()


def enlist(user: UsesPipeline) -> int:
    """The number of a new pipeline in this process, from 1."""
    number = next(_numbers)
    _living[number] = user
    return number


def status_beside(user: UsesPipeline) -> RankStatus | None:
    """What the thread that made the last call of this pipeline does in a call of another one; None where it is in none.

    Of several that it has given up the last one counts: one that failed before says nothing of where it is now.
    """
    users = [reference() for reference in _living.valuerefs()]
    others = [other for other in users if other is not None and other is not user and other.turn.thread == user.turn.thread]
    found = [inside for other in others if (inside := other.inside()) is not None]
    return max(found, key=lambda inside: inside.until).status if found else None
