"""An exchange that has been started, whatever carries it."""

from __future__ import annotations

from typing import Protocol


class Work(Protocol):
    """An exchange that has been started."""

    def wait(self) -> object:
        """Return when a tensor has been received, or when a tensor that was sent may be changed again.

        On a device with streams it is enough that the current stream waits for it. Raises `RuntimeError`, such as `PeerGoneError`, when the
        connection is gone; its text has "timed out" when the other rank did not answer in time.
        """
