"""One thread at a time uses a pipeline: a second one is refused, and the first goes on undisturbed."""

from __future__ import annotations

import threading

from zerobubble.errors import InputError
from zerobubble.runtime.failure.activity import Activity, words_of


class Turn:
    """Taken for what a rank does with its pipeline, and given back after it. The thread that has it may take it again meanwhile.

    `thread` is the identifier of the one that took it last.
    """

    __slots__ = ("_activity", "_depth", "_lock", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._lock = threading.RLock()
        self._depth = 0
        self._activity: Activity = ""

    def take(self, activity: Activity) -> None:
        """Begin an activity. Raises `InputError` while another thread has the turn."""
        if not self._lock.acquire(blocking=False):
            raise InputError(
                f"another thread, {self._name()!r}, uses this pipeline now ({words_of(self._activity)[0]}), and one at a time may: "
                "make all calls from one thread, or put a lock around them"
            )
        if self._depth == 0:
            self.thread = threading.get_ident()
            self._activity = activity
        self._depth += 1

    def give(self) -> None:
        """End what was begun last."""
        self._depth -= 1
        self._lock.release()

    def _name(self) -> str:
        """The name of the thread that has the turn."""
        return next((thread.name for thread in threading.enumerate() if thread.ident == self.thread), str(self.thread))
