"""Records which rank this one waits for, and turns every failure of a message into one exception.

Backends raise `RuntimeError` for everything: a closed connection, a timeout, and errors of this rank alone such as running out of memory.
They differ only in type and text, so this module is the one place that distinguishes them (`is_own`). A lost connection starts a search for
the culprit; an own error is already known to be this rank's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from zerobubble.runtime.transport.endpoint import PeerGoneError
from zerobubble.runtime.transport.work import Work

NOBODY = -2
"""The `peer` of a rank that waits for none."""

EVERYBODY = -1
"""The `peer` of a rank in a collective, where the rank whose message is missing is unknown."""

ELSEWHERE = -3
"""The `peer` of a rank that waits in a call of another pipeline."""

TIMED_OUT = "no answer within `timeout`"
"""The reason of a rank whose wait has timed out."""

STARTING = "exchanging a message"
"""The activity of a rank that finds a connection closed at its first use in a call."""


NO_ANSWER = "frozen or has ended, or the network is cut"
"""The possible causes if a rank does not answer."""


def host_is_silent(rank: int) -> str:
    """Returns the message that the store in the process of `rank` does not answer. It is the same on every rank."""
    silent = "its process hosts the torch.distributed store, which does not answer"
    return f"rank {rank} does not answer: {silent}; the process is {NO_ANSWER}: see the log there"


def stalled(rank: int, seconds: float) -> str:
    """Returns the message that the process of `rank` did nothing for `seconds`."""
    return f"rank {rank} stalled for {seconds:.0f} s: its process was stopped or starved of CPU, or a thread held the GIL"


class LostContactError(Exception):
    """A message could not be exchanged with `peer`, for this `reason`, while this rank did `what`.

    For EVERYBODY, `among` are the ranks of the collective, empty for all.
    """

    def __init__(self, peer: int, what: str, reason: str, among: tuple[int, ...] = ()) -> None:
        super().__init__(f"lost contact while {what}: {reason}")
        self.peer = peer
        self.among = among
        self.what = what
        self.reason = reason


Wait = tuple[int, str, tuple[int, ...]]
"""The rank waited for, the purpose, and for EVERYBODY the ranks of the collective, empty for all. A plain tuple: it is created often."""


class Waiting:
    """The rank that this one waits for in a pipeline, so that another thread can report it while this rank is blocked.

    `now` is the current wait, None if there is none. A failed wait stays until `forget`: the other ranks follow it when they search for the
    culprit.
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now: Wait | None = None

    def wait(self, work: Work, peer: int, doing: str) -> None:
        """Waits for an exchange with `peer`. Raises `LostContactError` if the connection is lost or the wait times out."""
        self.now = peer, doing, ()
        try:
            work.wait()
        except RuntimeError as error:
            if is_own(error):
                raise
            raise LostContactError(peer, doing, reason_of(error)) from error
        self.now = None

    def exchange(self, peer: int, doing: str) -> Exchange:
        """Returns a reusable context for an exchange with `peer`: a `PeerGoneError` in it becomes a `LostContactError`."""
        return Exchange(self, (peer, doing, ()))

    def collective(self, doing: str, among: Sequence[int] = ()) -> Exchange:
        """Returns a context for a collective of all ranks, or of the ranks in `among`: a `PeerGoneError` becomes `LostContactError`."""
        return Exchange(self, (EVERYBODY, doing, tuple(among)))

    def forget(self) -> None:
        """Forgets a failed wait, once it has been reported."""
        self.now = None


class Exchange:
    """The context of `Waiting.exchange`. A class and not a generator, because it is entered for every message of a step."""

    __slots__ = ("_wait", "_waiting")

    def __init__(self, waiting: Waiting, wait: Wait) -> None:
        self._waiting = waiting
        self._wait = wait

    def __enter__(self) -> None:
        self._waiting.now = self._wait

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._waiting.now = None
        elif isinstance(error, PeerGoneError):
            peer, doing, among = self._wait
            raise LostContactError(peer, doing, reason_of(error), among) from error


@contextmanager
def exchanging() -> Iterator[None]:
    """A context for calls of an endpoint that turns a `RuntimeError`, unless it is this rank's own, into `PeerGoneError`."""
    try:
        yield
    except RuntimeError as error:
        if is_own(error):
            raise
        raise PeerGoneError(str(error)) from error


_OWN_KINDS = (RecursionError, NotImplementedError, torch.OutOfMemoryError)
_OWN_TEXTS = ("allocate memory", "CUDA error", "start new thread", "Too many open files")
"""Parts of the errors of Python, torch and the system that involve no other rank."""


def is_own(error: RuntimeError) -> bool:
    """Returns whether an error in an exchange comes from this rank alone, so that no contact is lost."""
    if isinstance(error, PeerGoneError):
        return False
    return isinstance(error, _OWN_KINDS) or any(text in str(error) for text in _OWN_TEXTS)


def reason_of(error: RuntimeError) -> str:
    """Returns why a message could not be exchanged, in a few words, without the backend's source location and general advice."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "imed out" in text or "no answer within" in text:
        return TIMED_OUT
    return re.sub(r"^\[[^\]]*\] *", "", text).split(". This is typically")[0]
