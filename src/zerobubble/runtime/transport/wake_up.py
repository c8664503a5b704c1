"""Lets a receiver in shared memory sleep until it is woken, and lets either end of a channel detect that the other is gone.

Shared memory alone shows neither. An eventfd wakes the receiver. A socket between the two ends becomes readable when the other process
closes it or ends. Both are polled together, so no wait outlives its peer.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable

from zerobubble.runtime.transport.endpoint import PeerGoneError


class Connection:
    """One end of a channel's wake-up: an eventfd that wakes the receiver, and a socket that passes segments and reveals a disconnect.

    The eventfd wakes only the receiver (`wakes`): a sender that waits for a slot would consume a wake-up that was meant for it.
    """

    def __init__(self, end: socket.socket, wake_up: int, timeout: float, *, wakes: bool) -> None:
        self._socket = end
        self._wake_up = wake_up
        self._timeout = timeout
        self._segments: list[int] = []
        self._gone = ""
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        if wakes:
            self._poll.register(wake_up, select.POLLIN)
        end.setblocking(False)

    def fileno(self) -> int:
        """The descriptor of the socket."""
        return self._socket.fileno()

    def wake(self) -> None:
        """Wakes the receiver."""
        os.eventfd_write(self._wake_up, 1)

    def hand_over(self, segment: int) -> None:
        """Passes the file descriptor of a segment to the other end."""
        try:
            socket.send_fds(self._socket, [b"s"], [segment])
        except OSError as error:
            raise PeerGoneError(str(error)) from error

    def take_over(self) -> int:
        """Waits for the file descriptor of a segment from the other end, and returns it."""
        self.sleep_until(lambda: bool(self._segments))
        return self._segments.pop(0)

    def sleep_until(self, ready: Callable[[], bool], longest_ms: int = 100) -> None:
        """Sleeps until `ready()`. Checks it at least every `longest_ms`: a sender may look for a sleeper just before this one sleeps."""
        end = time.monotonic() + self._timeout
        pause_ms = min(10, longest_ms)
        while not ready():
            if self._gone:
                raise PeerGoneError(self._gone)
            if time.monotonic() > end:
                raise PeerGoneError(f"no answer within {self._timeout:g} s")
            for descriptor, _ in self._poll.poll(pause_ms):
                if descriptor == self._wake_up:
                    os.eventfd_read(self._wake_up)
                else:
                    self._read()
            pause_ms = min(2 * pause_ms, longest_ms)

    def _read(self) -> None:
        """Takes a segment from the socket, or notes that the other end is gone. Messages it has put before remain valid."""
        try:
            data, segments, _, _ = socket.recv_fds(self._socket, 1, 1)
            self._segments += segments
            self._gone = "" if data else "the connection was closed"
        except OSError as error:
            self._gone = str(error)

    def close(self) -> None:
        """Closes both. Waits here, now and later, raise that the connection was closed."""
        self._gone = self._gone or "the connection was closed"
        self._socket.close()
        os.close(self._wake_up)
