"""Admits one thread at a time to a pipeline. A second thread gets an error instead of waiting, and the first continues undisturbed."""

from __future__ import annotations

import threading

from zerobubble.errors import InputError
from zerobubble.runtime.failure.activity import Activity, words_of


class CallLock:
    """A lock that a thread holds during a call of a pipeline. It is reentrant: calls nest.

    `thread` is the identifier of the thread that acquired it last.
    """

    __slots__ = ("_activity", "_depth", "_lock", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._lock = threading.RLock()
        self._depth = 0
        self._activity: Activity = ""

    def acquire(self, activity: Activity) -> None:
        """Begins an activity. Raises `InputError` while another thread holds the lock."""
        # Never blocks: threads that wait here would make their calls in an order that differs between ranks.
        if not self._lock.acquire(blocking=False):
            raise InputError(
                f"another thread, {self._name()!r}, is using this pipeline ({words_of(self._activity)[0]}), which serves one thread "
                "at a time: make all calls from one thread, or guard them with a lock"
            )
        if self._depth == 0:
            self.thread = threading.get_ident()
            self._activity = activity
        self._depth += 1

    def release(self) -> None:
        """Ends the activity that began last."""
        self._depth -= 1
        self._lock.release()

    def _name(self) -> str:
        """Returns the name of the thread that holds the lock."""
        return next((thread.name for thread in threading.enumerate() if thread.ident == self.thread), str(self.thread))
