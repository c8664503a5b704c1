"""Schedules from files, whichever of the three forms they are in: text, JSON or PyTorch's CSV."""

from __future__ import annotations

from zerobubble.arguments import takes
from zerobubble.export.document import load_document, schedule_of
from zerobubble.ir import Schedule


@takes(text=str, name=str)
def load_schedule(text: str, name: str = "unnamed") -> Schedule:
    """The schedule in `text`, or of the plan there, recognised by how it starts; `name` is used for the CSV, which carries none.

    The schedule may be illegal: ask `verify.schedule_faults`. Raises `ParseError` when the form is unknown or malformed.
    """
    return schedule_of(load_document(text, name))
