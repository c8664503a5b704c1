"""Reading files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from zerobubble.costs import Costs
from zerobubble.errors import InputError, parsed_json
from zerobubble.export.document import describe_document, load_document
from zerobubble.export.json_form import Document
from zerobubble.ir import Schedule
from zerobubble.planning.answer import Plan
from zerobubble.schedules import known_schedules
from zerobubble.timeline import Timeline
from zerobubble.whole_files import read_whole

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


def read_document(file: str) -> Document:
    """Reads any document from `file`; `-` is stdin. Raises `InputError` with the file name if it cannot be read."""
    return parse_document(file, read_text(file))


def parse_document(file: str, text: str) -> Document:
    """Parses any document from the `text` of `file`. Raises `InputError` with the file name if it cannot."""
    try:
        document = load_document(text, Path(file).stem if file != "-" else "stdin")
    except InputError as error:
        raise InputError("cannot read {file}: {reason}", file=str(file), reason=str(error)) from error
    if isinstance(document, Schedule):
        require_size(file, document.num_stages * document.num_microbatches)
    return document


def require_size(name: str, passes: int, most: int = MOST_PASSES) -> None:
    """Raises `InputError` if a schedule has more passes than the command line accepts."""
    if passes > most:
        raise InputError(
            "{name} would have up to {passes:,} passes; the command line takes at most {most:,}", name=name, passes=passes, most=most
        )


def read_costs(file: str) -> Costs:
    """Reads costs of stages from a costs file or a plan. Raises `InputError` with the file name for anything else."""
    document = read_document(file)
    if isinstance(document, Plan):
        return document.problem.costs
    if not isinstance(document, Costs):
        raise InputError("{file} holds {got}, not costs of stages or a plan", file=str(file), got=describe_document(document))
    return document


def read_timeline(file: str) -> Timeline:
    """Reads a timeline. Raises `InputError` with the file name for anything else."""
    document = read_document(file)
    if not isinstance(document, Timeline):
        raise InputError(
            "{file} holds {got}, not a timeline", file=str(file), got=describe_document(document), remedy="write one with Pipeline.timeline"
        )
    return document


def read_json(file: str, what: str, parse: Callable[[Any], Parsed]) -> Parsed:
    """Parses the JSON in `file`. Raises `InputError` with the file name, and the line or the message of `parse`."""
    text = read_text(file)
    try:
        return parse(parsed_json(text))
    except InputError as error:
        raise InputError("cannot read {what} from {file}: {reason}", what=what, file=str(file), reason=str(error)) from error


def read_text(file: str) -> str:
    """Reads all of `file`; `-` is stdin. Raises `InputError` if it cannot be read or is not text."""
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as opened:
            data = read_whole(opened, MOST_BYTES)
        text = None if data is None else data.decode()
    except OSError as error:
        raise InputError("cannot read {file}: {reason}", file=str(file), reason=str(error.strerror)) from error
    except ValueError as error:
        raise InputError("cannot read {file}: it is not UTF-8 text", file=str(file)) from error
    if text is None:
        raise InputError("{file} has more than {most:,} bytes, the maximum of the command line", file=str(file), most=MOST_BYTES)
    return text
