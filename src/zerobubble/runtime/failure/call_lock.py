"""Admits one thread at a time to a pipeline. A second thread gets an error instead of waiting, and the first continues undisturbed."""

from __future__ import annotations

import threading
from typing import Protocol

from zerobubble.errors import InputError


class PlaysActions(Protocol):
    """Plays a step action by action; `at` is the position of the current one in its row, -1 before the first."""

    at: int

    @property
    def place(self) -> tuple[str, str]:
        """A description of its place in its row, and the current action."""


Activity = str | PlaysActions
"""A description such as "while clipping gradients", or the object that plays a step. The description of a step is made only on a failure,
because a step has many actions."""


def words_of(activity: Activity) -> tuple[str, str]:
    """Returns the description of an activity, and the current action (empty if there is none)."""
    return (activity, "") if isinstance(activity, str) else activity.place


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
                "another thread, {thread!r}, is using this pipeline ({activity}), which serves one thread at a time",
                thread=self._name(),
                activity=words_of(self._activity)[0],
                remedy="make all calls from one thread, or guard them with a lock",
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
