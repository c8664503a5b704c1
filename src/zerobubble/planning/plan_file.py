"""A plan as a file: its schedule, the problem it answers, its bound and its figures."""

from __future__ import annotations

import json
from pathlib import Path

from zerobubble.errors import InputError, ParseError, ZeroBubbleError
from zerobubble.planning.problem import Solved


def save_plan(solved: Solved, file: str | Path) -> None:
    """Write `solved` to `file`, as JSON. Raises `InputError` when it has no schedule or the file cannot be written."""
    text = plan_text(solved)
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error


def plan_text(solved: Solved) -> str:
    """The JSON text of a plan; raises `InputError` when it has no schedule."""
    return json.dumps(solved.to_dict()) + "\n"


def load_plan(file: str | Path) -> Solved:
    """The plan in `file`, its schedule checked and played anew: `Pipeline(..., schedule=load_plan("plan.json").schedule)` trains with it.

    Raises `InputError` naming the file when it cannot be read, is no plan, or holds a schedule that cannot run.
    """
    try:
        return Solved.from_dict(json.loads(Path(file).read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (ZeroBubbleError, ValueError, RecursionError) as error:
        raise ParseError(f"cannot read a plan from {file}: {error}") from error
