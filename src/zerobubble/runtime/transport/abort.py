"""Aborting the communicators of a device's library, such as NCCL, from a thread that is there before anything fails.

An abort ends the kernels that wait for a rank which has failed. It may itself wait, for the device or for other ranks of the machine that
have not come to abort yet, so nobody waits for it for longer than a few seconds. Whoever drops a communicator that was not aborted waits
for all that was started on it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

LONGEST_S = 3.0
"""How long closing waits for an abort under way."""


class Abort:
    """Aborts the backends that were added, all at once, when `start` is called, from any thread."""

    def __init__(self) -> None:
        self._backends: list[Any] = []
        self._wanted = threading.Event()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, backend: Any) -> None:
        """Abort this one, too. The first starts the thread, for none may be had when something has failed."""
        self._backends.append(backend)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zerobubble-abort", daemon=True)
            self._thread.start()

    def start(self) -> None:
        """Have all backends aborted, and do not wait for it."""
        self._wanted.set()

    def close(self) -> None:
        """Let go of the backends: with an abort under way, wait for it, but not for long; else for what was started on them."""
        if self._wanted.is_set():
            if self._thread is not None:
                self._is_over.wait(LONGEST_S)
            return
        self._backends.clear()
        self._wanted.set()

    def _run(self) -> None:
        self._wanted.wait()
        try:
            if self._backends:
                _abort_all(self._backends)
            self._backends.clear()
        finally:
            self._is_over.set()


def _abort_all(backends: list[Any]) -> None:
    """Abort them as one group of calls, in which NCCL does not let one wait for the kernels of another."""
    first = backends[0]
    first._group_start()
    try:
        for backend in backends:
            with suppress(RuntimeError):  # it may have failed by itself
                backend.abort()
    finally:
        first._group_end()
