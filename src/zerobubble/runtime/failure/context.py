"""A context around each call that ranks make together: any error inside it is reported to all of them.

Contexts nest, and the innermost one that sees an error reports it. The connections are closed then, so the outer ones only pass it on.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import NoReturn, Protocol

from zerobubble.runtime.failure.call_lock import Activity, CallLock, words_of
from zerobubble.runtime.transport.contact import EVERYBODY, LostContactError


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
