"""Measures how long a store has been silent, since it may be gone or frozen with the process that hosts it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any


class MeasuredStore:
    """Wraps a store and measures its silence in seconds: each answer resets it, and each thread that waits for one adds to it.

    Time in which several threads wait counts once.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.silence_s = 0.0
        self._counted = -math.inf
        self._lock = threading.Lock()

    def count(self, seconds: float) -> None:
        """Adds `seconds` that the caller has waited until now.

        The caller counts them, not the clock: the clock also runs while this process is stopped, which is not the store's silence.
        """
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
