"""JSON form of the values of this package. Each has a `format` tag with its type and version."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from zerobubble.arguments import instance, takes
from zerobubble.costs import Costs
from zerobubble.errors import InputError, ParseError, parsed_json, shown
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
    """Return the JSON text of a schedule, timeline, costs, program, plan or workload. `loads` reads it."""
    return json.dumps(value.to_dict()) + "\n"


@takes(text=str)
def loads(text: str) -> Document:
    """Load a value written by `dumps`; raises `ParseError` for text that is not JSON, an unknown `format` or a malformed part."""
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
