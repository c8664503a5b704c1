"""Writes values as JSON, and reads any form that this package writes, or PyTorch's schedule CSV, by recognizing it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from zerobubble.arguments import READABLE, WRITABLE, instance, takes
from zerobubble.costs import Costs
from zerobubble.errors import InputError, ParseError, parsed_json, shown
from zerobubble.export.torch_csv import from_torch_csv, looks_like_torch_csv
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Plan
from zerobubble.planning.problem.workload import Workload
from zerobubble.program import Program
from zerobubble.timeline import Timeline
from zerobubble.whole_files import File, name_of, read_text, require_suffix, write_text

Loaded = TypeVar("Loaded")
Document = Schedule | Timeline | Costs | Program | Plan | Workload

_READERS: dict[str, Callable[[dict[str, Any]], Document]] = {
    "zerobubble schedule 1": Schedule.from_dict,
    "zerobubble timeline 1": Timeline.from_dict,
    "zerobubble costs 1": Costs.from_dict,
    "zerobubble program 1": Program.from_dict,
    "zerobubble plan 1": Plan.from_dict,
    "zerobubble workload 1": Workload.from_dict,
}


_DOCUMENT = instance(Schedule, Timeline, Costs, Program, Plan, Workload)


@takes(value=_DOCUMENT)
def dumps(value: Document) -> str:
    """Return the JSON text of `value`, a schedule, timeline, costs, program, plan or workload. `loads` reads it."""
    return json.dumps(value.to_dict()) + "\n"


_STARTS = "schedules start with 'zerobubble schedule 1', '{' (JSON) or a pass such as 0F0 (CSV)"


@takes(text=str, name=str)
def loads(text: str, name: str = "unnamed") -> Document:
    """Load the value in `text`, whose form is recognized by its beginning; `load_document` reads a file.

    The form is JSON, the text form of a schedule or a program, or PyTorch's schedule CSV. A schedule from the CSV, which has no name, is
    called `name`. The result may be illegal; see `schedule_faults` and `program_faults`. Raises `ParseError` if the form is unknown or
    malformed, and `InputError` if its parts do not match.
    """
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        return _of_json(parsed_json(text))
    if looks_like_torch_csv(text):
        return from_torch_csv(text, name)
    first = next((line.strip() for line in text.split("\n") if line.partition("#")[0].strip()), "")
    if not first.startswith("zerobubble"):
        fault = f"it begins with {shown(first)}" if first else "it is empty"
        remedy = "load_document takes the path of a file" if re.fullmatch(r"\S+\.(json|txt|csv)", text) else ""
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


def _of_json(data: Any) -> Document:
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


def costs_of(value: Document) -> Costs:
    """Return the costs of stages that `value` is or contains; raises `ParseError` if there are none."""
    if isinstance(value, Plan):
        return value.problem.costs
    if isinstance(value, Costs):
        return value
    remedy = "workload.costs(placement) gives them for one placement" if isinstance(value, Workload) else ""
    raise ParseError("the file has {got}, not costs of stages or a plan", got=describe_document(value), remedy=remedy)


def _plan_of(value: Document) -> Plan:
    if isinstance(value, Plan):
        return value
    raise ParseError("the file has {got}, not a plan", got=describe_document(value))


@takes(file=READABLE)
def load_document(file: File) -> Document:
    """Load the schedule, timeline, costs, program, plan or workload in `file`, a path or an open file, whose form is recognized.

    A schedule in PyTorch's CSV, which has no name, is called like its file. The result may be illegal; see `schedule_faults`. `loads` reads
    text. Raises `InputError` with the name of the file if it cannot be read, or has an unknown form or malformed part.
    """
    return _loaded(file, "a value", lambda value: value)


@takes(file=READABLE)
def load_schedule(file: File) -> Schedule:
    """Load the schedule in `file`, a path or an open file, or the schedule of the plan there, like `load_document`."""
    return _loaded(file, "a schedule", schedule_of)


@takes(file=READABLE)
def load_costs(file: File) -> Costs:
    """Load the costs of stages in `file`, a path or an open file, or those of the plan there, like `load_document`.

    >>> import io
    >>> import zerobubble as zb
    >>> zb.io.load_costs(io.StringIO(zb.io.dumps(zb.Costs.uniform(2, (10, 10, 8)))))
    <Costs of 2 stages: F 10 ms, B 10 ms, W 8 ms, messages 0 ms>
    """
    return _loaded(file, "costs", costs_of)


@takes(file=READABLE)
def load_plan(file: File) -> Plan:
    """Load the plan in `file`, a path or an open file, and verify its schedule; `Pipeline(..., load_plan("plan.json"))` trains with it.

    Raises `InputError` with the name of the file if it cannot be read, is no plan, or holds a schedule that cannot run.

    >>> import zerobubble as zb, tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "plan.json"
    ...     zb.io.save_plan(zb.plan(zb.Workload.uniform(2, times=(10, 10, 8)), 4, placements="vee", seconds=0), file)
    ...     zb.io.load_plan(file).problem
    <Problem on vee over 2 ranks: 4 microbatches for the shortest period>
    """
    return _loaded(file, "a plan", _plan_of)


def _loaded(file: File, what: str, part: Callable[[Document], Loaded]) -> Loaded:
    if isinstance(file, str) and ("\n" in file or file.startswith("{")):
        raise ParseError("file must be a path or an open file, got text", argument="file", got=file, remedy="zb.io.loads reads text")
    text, name = read_text(file), name_of(file)
    try:
        return part(loads(text, Path(name).stem))
    except InputError as error:
        raise ParseError("cannot read {what} from {file}: {reason}", what=what, file=name, reason=str(error)) from error


@takes(value=_DOCUMENT, file=WRITABLE)
def save_document(value: Document, file: File) -> None:
    """Save `value`, a schedule, timeline, costs, program, plan or workload, as JSON into `file`, a path or an open file.

    `load_document` reads it, and so do commands: `zb.io.save_document(pipe.profile(x, y), "costs.json")` writes the file for `--costs`.
    Raises `InputError` if the file cannot be written; it is then unchanged.
    """
    text = dumps(value)
    if isinstance(file, str | Path):
        require_suffix(file, ".json")
    write_text(file, text)


@takes(plan=Plan, file=WRITABLE)
def save_plan(plan: Plan, file: File) -> None:
    """Save `plan` as JSON into `file`, a path or an open file; of several choices, the winner.

    The file holds everything the plan was made from: costs, placement, limits, objective, the workload or the cut of the layers, recompute
    levels, sharded weights, a head, offloads and their link. Raises `InputError` if there is no schedule or the file cannot be written; the
    file is then unchanged.

    >>> import zerobubble as zb, tempfile
    >>> from pathlib import Path
    >>> found = zb.plan(zb.Workload.uniform(2, times=(10, 10, 8)), 4, placements="vee", seconds=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "plan.json"
    ...     zb.io.save_plan(found, file)
    ...     zb.io.load_plan(file).schedule == found.schedule
    True
    """
    save_document(plan, file)
