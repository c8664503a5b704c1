"""What all ranks do together between steps, where nobody knows whose message is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zerobubble.runtime.messages.transport import LostContactError


class LostGroupError(LostContactError):
    """Something that every rank takes part in could not be done; which of them is gone is not known."""

    def __init__(self, what: str, reason: str) -> None:
        Exception.__init__(self, f"lost contact with another rank while {what}: {reason}")
        self.peer = -1


@contextmanager
def meeting(what: str) -> Iterator[None]:
    """Turn the failure of an exchange among all ranks, such as `Transport.gather_objects`, into `LostGroupError`."""
    try:
        yield
    except RuntimeError as error:
        raise LostGroupError(what, str(error).splitlines()[0]) from error
