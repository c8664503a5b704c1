"""Measures how long this process stalled, since the others may have given up on it meanwhile: they are then not to blame for their end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SHORTEST_S = 0.1


class StallMonitor:
    """Measures how long this process stalled: stopped by a signal, starved of CPU, or with the GIL held by foreign code.

    One thread at a time waits with a timeout, and any thread may ask how late it woke up. It begins its first wait at once.
    """

    def __init__(self) -> None:
        self._kept_since = math.inf
        self._due: float | None = time.monotonic()
        self._past: tuple[tuple[float, float], ...] = ()
        """Stalls that no later one has exceeded: the time when this process resumed, and the seconds of the stall. Replaced whole, so that
        other threads need no lock to read it."""

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """A context for a wait of at most `seconds`: any time beyond is a stall."""
        self._resume()
        self._due = time.monotonic() + seconds
        try:
            yield
        finally:
            self._resume()

    def _resume(self) -> None:
        """Ends the current wait, if any, and notes its stall."""
        now, due, self._due = time.monotonic(), self._due, None
        if due is not None and now - due > _SHORTEST_S:
            self._past = (*(stall for stall in self._past if stall[1] > now - due), (now, now - due))

    def keep(self, seconds: float) -> None:
        """Counts the stalls of the last `seconds` and all later ones until `forget`, however long ago they ended.

        The next wait begins at once, too.
        """
        self._due = time.monotonic()
        self._kept_since = self._due - seconds

    def forget(self) -> None:
        """Counts recent stalls only: none has made another rank give up."""
        self._kept_since = math.inf

    def longest(self, seconds: float) -> float:
        """Returns the seconds of the longest stall that is going on or has ended within the last `seconds`; 0 if there was none.

        A process that resumes after a long stop is often starved again at first. Such a short stall must not hide the long one.
        """
        due, now = self._due, time.monotonic()
        current = 0.0 if due is None else now - due  # the waiting thread has not resumed yet
        since = min(now - seconds, self._kept_since)
        return max(current if current > _SHORTEST_S else 0.0, *(late for resumed, late in self._past if resumed > since), 0.0)
