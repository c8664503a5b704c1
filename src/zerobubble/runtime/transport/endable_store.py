"""A store whose waits can be interrupted. Constructors of backends wait in it for the addresses of the other ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerobubble.runtime.transport.endpoint import PeerGoneError

_SHORTEST_S, _LONGEST_S = 0.001, 0.05


class EndableStore(dist.Store):  # type: ignore[name-defined, misc]
    """Wraps `store` for a backend under construction. Its waits raise `PeerGoneError` once `over` is set, and after `timeout` seconds.

    A torch.distributed store serves one call of a process at a time, so a wait inside it would block the reports of failures. Here a wait
    polls instead. Keep this object as long as the backend: torch holds no reference to it.
    """

    def __init__(self, store: Any, over: threading.Event, timeout: float) -> None:
        super().__init__()
        self._store = store
        self._over = over
        self._timeout = timedelta(seconds=timeout)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    def add(self, key: str, value: int) -> int:
        total: int = self._store.add(key, value)
        return total

    def check(self, keys: Sequence[str]) -> bool:
        found: bool = self._store.check(keys)
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause_s = _SHORTEST_S
        while not self._store.check(keys):
            if self._over.wait(pause_s):
                raise PeerGoneError("this rank has given up")
            if time.monotonic() > end:
                raise PeerGoneError(f"timed out waiting for {', '.join(keys)}")
            pause_s = min(2 * pause_s, _LONGEST_S)
