"""While a pipeline is made, this rank waits for others in calls that may block for long and hear nothing: it listens beside them.

Backends are connected by constructors that go on, whatever happens, until several of their timeouts have passed. So each such call is made
in a thread of its own. This rank leaves it behind when it has heard of a failure, or has waited for as long as it may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.transport.background import in_background
from zerobubble.runtime.transport.contact import IN_TIME
from zerobubble.runtime.transport.endpoint import PeerGoneError
from zerobubble.runtime.transport.transport import Transport

Answer = TypeVar("Answer")

_TIMEOUTS_OF_GLOO = 5
"""For how many of its timeouts gloo's constructor waits for another rank."""


class Patience:
    """The `timeout` seconds that a rank waits for others while a pipeline is made, in all calls together."""

    def __init__(self, transport: Transport, guard: FailureGuard, timeout: float) -> None:
        self._transport = transport
        self._guard = guard
        self._left_s = timeout
        self._longest_s = _TIMEOUTS_OF_GLOO * timeout

    def bear(self, call: Callable[[], Answer], doing: str, *, is_brief: bool = True) -> Answer:
        """What `call`, which all ranks make together, gives or raises.

        Raises `LostContactError` when its connections are gone, when another rank has failed, and when there is no time left. A call that
        is not brief, such as one that copies many parameters, takes its time; each wait inside it must be bounded.
        """
        with self._transport.collective(doing):
            return in_background(call, self._listen_and_count if is_brief else self._listen, self._longest_s)

    def _listen(self, seconds: float) -> None:
        if self._guard.is_told(seconds):
            raise PeerGoneError("another rank has failed")

    def _listen_and_count(self, seconds: float) -> None:
        self._listen(seconds)
        self._left_s -= seconds
        if self._left_s <= 0:
            raise PeerGoneError(IN_TIME)
