"""Writes values as JSON, and loads any file that this package writes, or PyTorch's schedule CSV, by recognizing its form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from zerobubble.arguments import instance, takes
from zerobubble.costs import Costs
from zerobubble.errors import InputError, ParseError, parsed_json, shown
from zerobubble.export.torch_csv import from_torch_csv, looks_like_torch_csv
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Plan
from zerobubble.planning.problem.workload import Workload
from zerobubble.program import Program
from zerobubble.timeline import Timeline

Document = Schedule | Timeline | Costs | Program | Plan | Workload

_READERS: dict[str, Callable[[dict[str, Any]], Document]] = {
    "zerobubble schedule 1": Schedule.from_dict,
    "zerobubble timeline 1": Timeline.from_dict,
    "zerobubble costs 1": Costs.from_dict,
    "zerobubble program 1": Program.from_dict,
    "zerobubble plan 1": Plan.from_dict,
    "zerobubble workload 1": Workload.from_dict,
}


@takes(value=instance(Schedule, Timeline, Costs, Program, Plan, Workload))
def dumps(value: Document) -> str:
    """Return the JSON text of `value`, a schedule, timeline, costs, program, plan or workload. `loads` reads it."""
    return json.dumps(value.to_dict()) + "\n"


@takes(text=str)
def loads(text: str) -> Document:
    """Load the value that `dumps` wrote as `text`.

    Raises `ParseError` for text that is not JSON, an unknown `format` or a malformed part.
    """
    data = parsed_json(text)
    tag = data.get("format") if isinstance(data, dict) else None
    reader = _READERS.get(tag) if isinstance(tag, str) else None
    if reader is None:
        fault = "the JSON has no key 'format'" if tag is None else f"its 'format' {shown(tag)} is unknown"
        raise ParseError("{fault}, as in files that zerobubble writes", fault=fault, argument="format", got=tag, expected=tuple(_READERS))
    try:
        return reader(data)
    except InputError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ParseError("the JSON form {got!r} has a malformed part: {reason}", got=tag, reason=str(error)) from error


_NAMES: dict[type[Document], str] = {
    Schedule: "a schedule",
    Plan: "a plan",
    Costs: "costs of stages",
    Timeline: "a timeline",
    Program: "a program",
    Workload: "the work of ranks",
}

_INSTEAD: dict[type[Document], str] = {
    Costs: "name the schedule, and give this file as --costs",
    Timeline: "name the schedule that ran, as in zerobubble diff zb-h1 run.json --costs costs.json",
    Workload: "zerobubble plan --costs takes it",
}
"""What to do on the command line with a file that has no schedule."""

_FILE_NAME = re.compile(r"\S+\.(csv|json|txt)")
_STARTS = "schedules start with 'zerobubble schedule 1', '{' (JSON) or a pass such as 0F0 (CSV)"


@takes(text=str, name=str)
def load_document(text: str, name: str = "unnamed") -> Document:
    """Load the value in `text`, whose form is recognized by its beginning.

    The form is JSON, the text form of a schedule or a program, or PyTorch's schedule CSV. A schedule from the CSV, which has no name, is
    called `name`. The result may be illegal; see `schedule_faults` and `program_faults`. Raises `ParseError` if the form is unknown or
    malformed, and `InputError` if its parts do not match.
    """
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        return loads(text)
    if looks_like_torch_csv(text):
        return from_torch_csv(text, name)
    first = next((line.strip() for line in text.split("\n") if line.partition("#")[0].strip()), "")
    if not first.startswith("zerobubble"):
        fault = f"it begins with {shown(first)}" if first else "it is empty"
        remedy = f"give what the file contains, Path({first!r}).read_text()" if re.fullmatch(r"\S+\.(json|txt|csv)", text) else ""
        message = "the text has no known form: {fault}; {expected}"
        raise ParseError(message, fault=fault, argument="format", got=first, expected=_STARTS, remedy=remedy)
    is_program = text.lstrip().startswith("zerobubble program")
    try:
        return Program.from_text(text) if is_program else Schedule.from_text(text)
    except InputError:
        raise
    except (OverflowError, ValueError) as error:
        raise ParseError(
            "the {noun} text cannot be read: {reason}", noun="program" if is_program else "schedule", reason=str(error)
        ) from error


def describe_document(value: Document) -> str:
    """Return what `value` is, with its article: `a plan`."""
    return _NAMES[type(value)]


def schedule_of(value: Document) -> Schedule:
    """Return the schedule that `value` is or contains; raises `ParseError` if there is none."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Plan):
        return value.schedule
    remedy = _INSTEAD.get(type(value), "")
    raise ParseError("the file has {got}, not a schedule or a plan", got=describe_document(value), remedy=remedy)


@takes(text=str, name=str)
def load_schedule(text: str, name: str = "unnamed") -> Schedule:
    """Load the schedule in `text`, or the schedule of the plan there. A schedule from the CSV, which has no name, is called `name`.

    To load a file, pass `Path(file).read_text()`. The schedule may be illegal; see `schedule_faults`. Raises `ParseError` if the form is
    unknown or malformed.
    """
    if _FILE_NAME.fullmatch(text):
        raise ParseError("text must be that of a schedule, got {got!v}", got=text, remedy="for a file, pass pathlib.Path(name).read_text()")
    return schedule_of(load_document(text, name))
