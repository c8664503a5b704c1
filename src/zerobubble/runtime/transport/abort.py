"""Aborts the communicators of a device's library, such as NCCL, from a thread that starts before anything fails.

An abort ends the kernels that wait for a failed rank. It may itself block, on the device or on other ranks of the machine that have not
aborted yet, so closing waits only a few seconds for it. Freeing a communicator without an abort blocks until everything started on it has
finished.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

LONGEST_S = 3.0
"""How long closing waits for a running abort."""


class Abort:
    """Aborts the backends that were added, all at once, when `start` is called, from any thread."""

    def __init__(self) -> None:
        self._backends: list[Any] = []
        self._wanted = threading.Event()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, backend: Any) -> None:
        """Adds a backend to abort. The first one starts the thread: after a failure, starting one may no longer be possible."""
        self._backends.append(backend)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zerobubble-abort", daemon=True)
            self._thread.start()

    def start(self) -> None:
        """Starts aborting all backends, without waiting."""
        self._wanted.set()

    def close(self) -> None:
        """Releases the backends. Waits a few seconds for a running abort; without one, until everything started on them has finished."""
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
    """Aborts them as one NCCL group: one by one, an abort could wait for the kernels of the next communicator."""
    first = backends[0]
    first._group_start()
    try:
        for backend in backends:
            with suppress(RuntimeError):  # it may have failed by itself
                backend.abort()
    finally:
        first._group_end()
