"""Registers the pipelines of this process: a rank that keeps one of them waiting may be in a call of another."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from zerobubble.runtime.failure.call_lock import CallLock
from zerobubble.runtime.failure.report import RankStatus


class CallStatus(NamedTuple):
    """The `status` of a rank in a call of a pipeline, and when it timed out there.

    `until` is a time of `time.monotonic`, inf while the call is running.
    """

    until: float
    status: RankStatus


class UsesPipeline(Protocol):
    """A rank's part in a pipeline; `call_lock` knows the thread that made its last call."""

    call_lock: CallLock

    def call_status(self) -> CallStatus | None:
        """Returns what the rank does in a call of this pipeline, or did when it timed out recently; None between two calls."""


_numbers = count(1)
_registered: WeakValueDictionary[int, UsesPipeline] = WeakValueDictionary()


def register_pipeline(user: UsesPipeline) -> int:
    """Registers a new pipeline of this process and returns its number, from 1 in the order of creation."""
    number = next(_numbers)
    _registered[number] = user
    return number


def status_in_other_pipeline(user: UsesPipeline) -> RankStatus | None:
    """Returns what the thread that made the last call of this pipeline does in a call of another one; None if it is in none.

    Of several pipelines in which it timed out, the last one counts: the rank has left the earlier ones since.
    """
    users = [reference() for reference in _registered.valuerefs()]
    others = [other for other in users if other is not None and other is not user and other.call_lock.thread == user.call_lock.thread]
    calls = [call for other in others if (call := other.call_status()) is not None]
    return max(calls, key=lambda call: call.until).status if calls else None
