"""Schedules from files, whichever of the three forms they are in: text, JSON or PyTorch's CSV."""

from __future__ import annotations

from zerobubble.errors import InputError, ParseError
from zerobubble.export.json_form import loads
from zerobubble.export.torch_csv import from_torch_csv, looks_like_torch_csv
from zerobubble.ir import Schedule
from zerobubble.planning.problem import Solved


def load_schedule(text: str, name: str = "unnamed") -> Schedule:
    """The schedule in `text`, or of the plan there, recognised by how it starts; `name` is used for the CSV, which carries none.

    The schedule may be illegal: ask `verify.schedule_faults`. Raises `ParseError` when the form is unknown or malformed.
    """
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        return _from_json(text)
    if looks_like_torch_csv(text):
        return from_torch_csv(text, name)
    if not text.strip():
        raise ParseError("the file is empty; a schedule starts with 'zerobubble schedule 1', '{' (JSON) or a pass such as 0F0 (CSV)")
    try:
        return Schedule.from_text(text)
    except InputError:
        raise
    except (OverflowError, ValueError) as error:
        raise ParseError(f"the schedule text cannot be read: {error}") from error


def _from_json(text: str) -> Schedule:
    value = loads(text)
    if isinstance(value, Solved) and value.schedule is not None:
        return value.schedule
    if not isinstance(value, Schedule):
        raise ParseError(f"the JSON holds a {type(value).__name__.lower()}, not a schedule")
    return value
