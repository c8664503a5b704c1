"""Loading schedules from text, JSON or PyTorch's CSV."""

from __future__ import annotations

from zerobubble.arguments import takes
from zerobubble.export.document import load_document, schedule_of
from zerobubble.ir import Schedule


@takes(text=str, name=str)
def load_schedule(text: str, name: str = "unnamed") -> Schedule:
    """Load the schedule in `text`, or the schedule of the plan there. A schedule from the CSV, which has no name, is called `name`.

    The schedule may be illegal; see `schedule_faults`. Raises `ParseError` if the form is unknown or malformed.
    """
    return schedule_of(load_document(text, name))
