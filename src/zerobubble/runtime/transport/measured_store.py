"""A store that may be gone or frozen with the process that hosts it: for how long it has been silent."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any


class MeasuredStore:
    """A store whose silence is known, in seconds: it ends with every answer, and whoever waits for one counts it up.

    Time is counted once, however many threads wait through it.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.silence_s = 0.0
        self._counted = -math.inf
        self._lock = threading.Lock()

    def count(self, seconds: float) -> None:
        """The caller has waited for `seconds` until now. They are no time by the clock, which goes on while this process stands still."""
        with self._lock:
            now = time.monotonic()
            self.silence_s += min(seconds, now - self._counted)
            self._counted = now

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            answer = getattr(self._store, name)(*args)
            self.silence_s = 0.0
            return answer

        return ask
