"""The protocol of an exchange that was started, over any endpoint."""

from __future__ import annotations

from typing import Protocol


class Work(Protocol):
    """An exchange that was started."""

    def wait(self) -> object:
        """Waits until a tensor has been received, or until a sent tensor may be modified.

        On a device with streams, making the current stream wait is enough. Raises `RuntimeError`, such as `PeerGoneError`, if the
        connection is lost. The text contains "timed out" if the other rank did not answer in time.
        """
