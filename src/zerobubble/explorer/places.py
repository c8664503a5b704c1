"""Places for work that may run at once. Checking and counting are one step, so that requests of one moment cannot pass the limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from zerobubble.errors import ZeroBubbleError


class BusyError(ZeroBubbleError):
    """All places are taken."""


@dataclass
class Places:
    """At most `most` places, each with a number; `refusal` and `remedy` are the sentence for requests beyond them.

    Used from one event loop. `take` has no await between its check and its count: with one, every request of a moment passes the check.
    """

    most: int
    refusal: str
    remedy: str
    taken: set[int] = field(default_factory=set)
    numbers: count[int] = field(default_factory=lambda: count(1))

    def take(self) -> int:
        """The number of a place, which is taken until `leave`. Raises `BusyError` if none is free."""
        if len(self.taken) >= self.most:
            raise BusyError(self.refusal + ": {remedy}", remedy=self.remedy)
        number = next(self.numbers)
        self.taken.add(number)
        return number

    def leave(self, number: int) -> None:
        """Free a place."""
        self.taken.remove(number)

    @contextmanager
    def one(self) -> Iterator[None]:
        """A place for the length of a block."""
        number = self.take()
        try:
            yield
        finally:
            self.leave(number)
