"""Reading files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from zerobubble.costs import Costs
from zerobubble.errors import InputError, parsed_json
from zerobubble.export.document import Document, describe_document, loads
from zerobubble.ir import Schedule
from zerobubble.partition.layers import FORM as LAYERS
from zerobubble.planning.answer import Plan
from zerobubble.schedules import known_schedules
from zerobubble.timeline import Timeline
from zerobubble.whole_files import read_whole, unusable

Parsed = TypeVar("Parsed")

MOST_PASSES = 2_000_000
"""The most passes of a schedule."""
MOST_PLANNED = 8_000_000
"""The most passes of a plan on the largest placement; higher than `MOST_PASSES`, because the budget limits the search."""

MOST_BYTES = 500_000_000
"""The most bytes of a file: several times the size of a timeline of `MOST_PASSES`."""


def is_file(name: str) -> bool:
    """Whether `name` is a file or stdin, rather than a known schedule."""
    return (name == "-" or bool(Path(name).suffix) or os.path.exists(name)) and name not in known_schedules()


class ExpectedFile(NamedTuple):
    """A description of the file that a command expects, and how to write one."""

    words: str
    remedy: str


SCHEDULE = ExpectedFile("a schedule or a plan", "write one with 'zerobubble make NAME --format json' or 'zerobubble plan -o'")
COSTS = ExpectedFile(
    "costs of stages, the work of ranks or a plan", "write those of Pipeline.profile with zb.io.save_document(costs, 'costs.json')"
)
TIMELINE = ExpectedFile("a timeline", "write one with zb.io.save_document(pipe.timeline(), 'run.json')")


def read_document(file: str, wanted: ExpectedFile) -> Document:
    """Reads any document from `file`; `-` is stdin. Raises `InputError` with the file name if it cannot be read."""
    return parse_document(file, read_text(file), wanted)


def parse_document(file: str, text: str, wanted: ExpectedFile) -> Document:
    """Parses any document from the `text` of `file`. Raises `InputError` with the file name, and what is `wanted`, if it cannot."""
    try:
        document = loads(text, Path(file).stem if file != "-" else "stdin")
    except InputError as error:
        if error.fields.get("argument") != "format":
            named = {"file": shown_name(file), "reason": str(error), "remedy": wanted.remedy}
            raise InputError("cannot read {file}: {reason}; {remedy}", **named) from error
        remedy = "give it as --layers of plan" if error.fields.get("got") == LAYERS else wanted.remedy
        named = {"file": shown_name(file), "expected": wanted.words, "reason": error.fields["fault"], "remedy": remedy}
        raise InputError("{file} is not {expected}: {reason}; {remedy}", **named) from error
    if isinstance(document, Schedule):
        require_size(file, document.num_stages * document.num_microbatches)
    return document


def shown_name(file: str) -> str:
    """Returns the name of a file in messages."""
    return "stdin" if file == "-" else str(file)


def require_size(name: str, passes: int, most: int = MOST_PASSES) -> None:
    """Raises `InputError` if a schedule has more passes than the command line accepts."""
    if passes > most:
        raise InputError(
            "{name} would have up to {passes:,} passes; the command line takes at most {most:,}",
            name=name,
            passes=passes,
            most=most,
            remedy="give fewer microbatches or ranks, or call zb.make and zb.simulate in Python",
        )


def costs_of(document: Document | None, file: str) -> Costs:
    """Returns the costs of stages in a costs file or a plan. Raises `InputError` with the file name for anything else."""
    if isinstance(document, Plan):
        return document.problem.costs
    if isinstance(document, Costs):
        return document
    got = "nothing" if document is None else describe_document(document)
    raise InputError("{file} holds {got}, not costs of stages or a plan", file=shown_name(file), got=got, remedy=COSTS.remedy)


def read_timeline(file: str) -> Timeline:
    """Reads a timeline. Raises `InputError` with the file name for anything else."""
    document = read_document(file, TIMELINE)
    if not isinstance(document, Timeline):
        got = describe_document(document)
        raise InputError("{file} holds {got}, not a timeline", file=shown_name(file), got=got, remedy=TIMELINE.remedy)
    return document


def read_json(file: str, what: str, parse: Callable[[Any], Parsed], remedy: str = "") -> Parsed:
    """Parses the JSON in `file`. Raises `InputError` with the file name, the line or the message of `parse`, and the `remedy`."""
    text = read_text(file)
    try:
        return parse(parsed_json(text))
    except InputError as error:
        named = {"what": what, "file": str(file), "reason": str(error), "remedy": remedy}
        raise InputError("cannot read {what} from {file}: {reason}" + ("; {remedy}" if remedy else ""), **named) from error


def read_text(file: str) -> str:
    """Reads all of `file`; `-` is stdin. Raises `InputError` if it cannot be read or is not text."""
    if not file:
        raise InputError("cannot read a file with an empty name", remedy="give its path")
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as opened:
            data = read_whole(opened, MOST_BYTES)
        text = None if data is None else data.decode()
    except OSError as error:
        raise unusable("read", shown_name(file), error) from error
    except ValueError as error:
        raise InputError("cannot read {file}: it is not UTF-8 text", file=shown_name(file)) from error
    if text is None:
        message = "{file} has more than {most:,} bytes, the maximum of the command line"
        raise InputError(message, file=shown_name(file), most=MOST_BYTES, remedy="load it in Python, such as by zb.io.load_schedule")
    return text
