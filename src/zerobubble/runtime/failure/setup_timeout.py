"""Bounds the time that a rank waits for other ranks while a pipeline is created, and listens for failures during that time.

Constructors of communication backends block. If a rank is missing, they return only after several times their own timeout. So each such
call runs in a thread of its own. This rank leaves that thread behind if another rank reports a failure, or if the calls together have taken
`timeout` seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.transport.background import in_background
from zerobubble.runtime.transport.contact import TIMED_OUT
from zerobubble.runtime.transport.endpoint import PeerGoneError
from zerobubble.runtime.transport.transport import Transport

Answer = TypeVar("Answer")

_TIMEOUTS_OF_GLOO = 5
"""Gloo's constructor waits for another rank for up to this many times its timeout."""


class SetupTimeout:
    """The budget of `timeout` seconds for waiting while a pipeline is created, shared by all calls of this rank."""

    def __init__(self, transport: Transport, guard: FailureGuard, timeout: float) -> None:
        self._transport = transport
        self._guard = guard
        self._left_s = timeout
        self._longest_s = _TIMEOUTS_OF_GLOO * timeout

    def run(self, call: Callable[[], Answer], doing: str, *, is_brief: bool = True) -> Answer:
        """Runs `call`, which all ranks make together, and returns its result or raises its error. Errors say what it was `doing`.

        Raises `LostContactError` if connections are lost, if another rank has failed, or if no time is left. Pass `is_brief=False` for a
        call that may take long, such as one that copies many parameters. It does not count against the timeout, so each wait inside it
        must be bounded.
        """
        with self._transport.collective(doing):
            return in_background(call, self._listen_and_count if is_brief else self._listen, self._longest_s)

    def _listen(self, seconds: float) -> None:
        if self._guard.is_failure_reported(seconds):
            raise PeerGoneError("another rank has failed")

    def _listen_and_count(self, seconds: float) -> None:
        self._listen(seconds)
        self._left_s -= seconds
        if self._left_s <= 0:
            raise PeerGoneError(TIMED_OUT)
