"""Waiting for other ranks: whom this rank waits for now, and one exception for every way in which a message can fail to come."""

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
"""The `peer` of a rank that does something together with all others, where nobody knows whose message is missing."""

ELSEWHERE = -3
"""The `peer` of a rank that waits for one in a call of another pipeline."""

IN_TIME = "no answer within `timeout`"
"""The reason of a rank that has waited for as long as it may."""

STARTING = "exchanging a message"
"""What a rank does that finds a connection closed when it comes to use it."""


NO_ANSWER = "frozen or has ended, or the network is cut"
"""What is known of the process of a rank that does not answer."""


def host_is_silent(rank: int) -> str:
    """Returns that the store in the process of `rank` does not answer. Every rank makes the same words: without a store they share none."""
    silent = "its process hosts the torch.distributed store, which does not answer"
    return f"rank {rank} does not answer: {silent}; the process is {NO_ANSWER}: see the log there"


def stalled(rank: int, seconds: float) -> str:
    """Returns that the process of `rank` did nothing for so long, in words."""
    return f"rank {rank} stalled for {seconds:.0f} s: its process was stopped or starved of CPU, or a thread held the GIL"


class LostContactError(Exception):
    """A message could not be exchanged with `peer`, for this `reason`, while this rank did `what`.

    Where that is EVERYBODY, they are the ranks `among` which it was done, all of them if there are none.
    """

    def __init__(self, peer: int, what: str, reason: str, among: tuple[int, ...] = ()) -> None:
        super().__init__(f"lost contact while {what}: {reason}")
        self.peer = peer
        self.among = among
        self.what = what
        self.reason = reason


Wait = tuple[int, str, tuple[int, ...]]
"""The rank waited for and what for; where that is EVERYBODY, among whom, which is all if there are none. Plain, for it is made often."""


class Waiting:
    """Whom one rank of one pipeline waits for, so that a thread which is asked can tell while the rank itself is blocked.

    `now` is what it waits for, None while it does not. A wait that failed stays until `forget`, so that the other ranks,
    which look for who keeps them waiting, can follow it.
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now: Wait | None = None

    def wait(self, work: Work, peer: int, doing: str) -> None:
        """Wait for an exchange with `peer`; raises `LostContactError` when the connection is gone or the timeout has passed."""
        self.now = peer, doing, ()
        try:
            work.wait()
        except RuntimeError as error:
            if is_own(error):
                raise
            raise LostContactError(peer, doing, reason_of(error)) from error
        self.now = None

    def exchange(self, peer: int, doing: str) -> Exchange:
        """A context for an exchange with `peer` that raises `PeerGoneError`; it can be entered again and again."""
        return Exchange(self, (peer, doing, ()))

    def collective(self, doing: str, among: Sequence[int] = ()) -> Exchange:
        """A context for what all ranks, or those `among` whom it is, do together: `exchanging` is told as `LostContactError` with them."""
        return Exchange(self, (EVERYBODY, doing, tuple(among)))

    def forget(self) -> None:
        """A wait that failed has been told of."""
        self.now = None


class Exchange:
    """What `Waiting.exchange` gives. A class, because it is entered for every message of a step."""

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
    """A context for calls of an endpoint: a `RuntimeError` that is not this rank's own becomes a `PeerGoneError`."""
    try:
        yield
    except RuntimeError as error:
        if is_own(error):
            raise
        raise PeerGoneError(str(error)) from error


_OWN_KINDS = (RecursionError, NotImplementedError, torch.OutOfMemoryError)
_OWN_TEXTS = ("allocate memory", "CUDA error", "start new thread", "Too many open files")
"""What stands in errors of Python, torch and the system that need no other rank. Backends raise `RuntimeError` for everything."""


def is_own(error: RuntimeError) -> bool:
    """Whether an error in an exchange comes from this rank alone, so that no contact is lost."""
    if isinstance(error, PeerGoneError):
        return False
    return isinstance(error, _OWN_KINDS) or any(text in str(error) for text in _OWN_TEXTS)


def reason_of(error: RuntimeError) -> str:
    """Why a message could not be exchanged, in a few words, without the backend's place in its sources and its general advice."""
    told = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "imed out" in told or "no answer within" in told:
        return IN_TIME
    return re.sub(r"^\[[^\]]*\] *", "", told).split(". This is typically")[0]
