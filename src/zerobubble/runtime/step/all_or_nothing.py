"""Changes that several ranks make together: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from zerobubble.errors import InputError, PipelineError
from zerobubble.runtime.failure.context import AgreedError
from zerobubble.runtime.transport.contact import LostContactError

FAILURES = (PipelineError, LostContactError, AgreedError)
"""These end the pipeline on every rank, or are raised by every rank alike: they refuse nothing."""


class Change(Protocol):
    """A change that can be undone. `what` names in errors what is changed, such as "the scaler"."""

    what: str

    def make(self) -> None:
        """Make the change. Raises any exception to refuse it, and may leave it half made."""

    def undo(self) -> None:
        """Restore what was there before `make`, even if that raised."""


def make_all(changes: Iterable[Change], agree: Callable[[str], str], where: str = "") -> str:
    """Make `changes` on every rank, or on none. Returns, on every rank, everything that refused its change; empty if all are made.

    `agree` takes the faults of this rank and returns those of all ranks; `where` names this rank in them. A rank tries all of its
    changes even after one is refused, so that what hooks exchange while they load stays in order, and no fault is hidden by another.
    """
    made = list(changes)
    faults = agree(_faults(made, "make", f"{where}{{what}} cannot take over what was saved: {{why}}"))
    worse = agree(_faults(made[::-1], "undo", f"{where}{{what}} could not be restored: {{why}}")) if faults else ""
    return "; ".join(filter(None, (faults, worse)))


def _faults(changes: Iterable[Change], method: str, words: str) -> str:
    found = []
    for change in changes:
        try:
            getattr(change, method)()
        except FAILURES:
            raise
        except Exception as error:  # noqa: BLE001 - hooks and optimizers of users may raise anything
            found.append(words.format(what=change.what, why=why_refused(error)))
    return "; ".join(found)


def why_refused(error: Exception) -> str:
    """The message of an `InputError`; other exceptions with their type."""
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
