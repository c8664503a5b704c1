"""A frame around what a rank does together with others: whatever stops the rank inside is told to all of them."""

from __future__ import annotations

import time
from types import TracebackType
from typing import NoReturn, Protocol

from zerobubble.runtime.failure.activity import Activity, words_of
from zerobubble.runtime.failure.turn import Turn
from zerobubble.runtime.transport.contact import EVERYBODY, LostContactError


class AgreedError(Exception):
    """An error that every rank raises alike, so that none is left behind the others and the pipeline stays open.

    The outermost frame raises the `error` that it carries.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Framed(Protocol):
    """What frames are made for: a rank's part in a pipeline.

    `num_calls` counts the calls that play steps, and `entered` is when the outermost frame was, in seconds of `time.monotonic`.
    """

    activity: Activity | None
    closed: str | None
    entered: float
    num_calls: int
    turn: Turn

    @property
    def is_aborted(self) -> bool:
        """Whether what the device does was ended because a rank has failed."""

    def refuse_if_closed(self) -> None:
        """Raise `PipelineError` once the connections are closed."""

    def fail(self, error: BaseException, when: str, action: str = "") -> NoReturn:
        """Tell all ranks of `error`, close, and raise what all of them raise."""


class Frame:
    """One activity of a rank; frames stand inside each other. A class, because every step enters several.

    `counts` is 1 for a call that plays steps. It is counted before anything can stop it: a rank that an interrupt stops here, where nothing
    is told yet, is then known by its number to be out of step with the others.
    """

    __slots__ = ("_activity", "_counts", "_outer", "_owner")

    def __init__(self, owner: Framed, activity: Activity, counts: int = 0) -> None:
        self._owner = owner
        self._activity = activity
        self._counts = counts
        self._outer: Activity | None = None

    def __enter__(self) -> None:
        owner, activity = self._owner, self._activity
        owner.turn.take(activity)
        owner.num_calls += self._counts
        try:
            owner.refuse_if_closed()
        except BaseException:
            owner.turn.give()
            raise
        if owner.activity is None:
            owner.entered = time.monotonic()
        self._outer, owner.activity = owner.activity, activity

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        owner = self._owner
        try:
            if owner.closed is None:
                if error is None and owner.is_aborted:
                    error = LostContactError(EVERYBODY, "working on its device", "another rank has failed")
                if error is not None and not isinstance(error, AgreedError):
                    owner.fail(error, *words_of(self._activity))
            elif isinstance(error, LostContactError):  # another thread has closed it
                owner.refuse_if_closed()
        finally:
            owner.activity = self._outer
            owner.turn.give()
        if isinstance(error, AgreedError) and self._outer is None:
            raise error.error from error.error.__cause__
