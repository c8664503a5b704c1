"""What all ranks do together between steps, where nobody knows whose message is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zerobubble.runtime.failure.blame import EVERYBODY
from zerobubble.runtime.transport.transport import Contact, LostContactError, reason_of


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Turn the failure of an exchange among all ranks, such as `Transport.gather_objects`, into a `LostContactError` with everybody."""
    try:
        with Contact(EVERYBODY, what):
            yield
    except RuntimeError as error:
        raise LostContactError(EVERYBODY, what, reason_of(error)) from error
