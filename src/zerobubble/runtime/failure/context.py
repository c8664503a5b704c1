"""A context around each call that ranks make together: any error inside it is reported to all of them.

It admits one thread at a time. A second thread gets an error instead of waiting, and the first continues undisturbed. Contexts nest,
and the innermost one that sees an error reports it. The connections are closed then, so the outer ones only pass it on.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import NoReturn, Protocol

from zerobubble.errors import InputError
from zerobubble.runtime.transport.contact import EVERYBODY, LostContactError


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


class AgreedError(Exception):
    """An error that every rank raises alike, so no rank falls behind the others and the pipeline stays open.

    The outermost context raises the `error` that it carries.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class ContextOwner(Protocol):
    """A rank's part in a pipeline, as far as its contexts use it.

    `num_calls` counts the calls that run steps. `entered` is when the `outermost` context was entered, in seconds of `time.monotonic`.
    """

    activity: Activity | None
    call_lock: CallLock
    closed: str | None
    entered: float
    num_calls: int
    outermost: Activity | None

    @property
    def is_aborted(self) -> bool:
        """Whether the work of the device was aborted because a rank has failed."""

    def refuse_if_closed(self) -> None:
        """Raises `PipelineError` once the connections are closed."""

    def fail(self, error: BaseException, when: str, action: str = "") -> NoReturn:
        """Reports `error` to all ranks, closes the pipeline, and raises what all of them raise."""


class FailureContext:
    """One activity of a rank. A class, because entering a generator takes longer and every step enters several.

    `counts` is 1 for a call that runs steps, else 0. `num_calls` grows before anything can stop the call. If an interrupt stops it before
    it reports anything, this number shows that the rank is out of step with the others.
    """

    __slots__ = ("_activity", "_counts", "_outer", "_owner")

    def __init__(self, owner: ContextOwner, activity: Activity, counts: int = 0) -> None:
        self._owner = owner
        self._activity = activity
        self._counts = counts
        self._outer: Activity | None = None

    def __enter__(self) -> None:
        owner, activity = self._owner, self._activity
        owner.call_lock.acquire(activity)
        owner.num_calls += self._counts
        try:
            owner.refuse_if_closed()
        except BaseException:
            owner.call_lock.release()
            raise
        if owner.activity is None:
            owner.entered = time.monotonic()
            owner.outermost = activity
        self._outer, owner.activity = owner.activity, activity

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        owner = self._owner
        try:
            if owner.closed is None:
                # After an abort, kernels may have finished on data that never arrived: success cannot be trusted.
                if error is None and owner.is_aborted:
                    error = LostContactError(EVERYBODY, "working on its device", "another rank has failed")
                if error is not None and not isinstance(error, AgreedError):
                    owner.fail(error, *words_of(self._activity))
            elif isinstance(error, LostContactError):  # another thread has closed it
                owner.refuse_if_closed()
        finally:
            # The activity stays until `fail` has returned: meanwhile other ranks may ask what this one does.
            owner.activity = self._outer
            owner.call_lock.release()
        if isinstance(error, AgreedError) and self._outer is None:
            raise error.error from error.error.__cause__
