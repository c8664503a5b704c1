"""The helpers of `tests/refusals.py` fail if a value is missing, and refuse to compare wording. No test compares wording otherwise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.refusals import raises, states
from zerobubble import InputError
from zerobubble.arguments import wrong

TESTS = Path(__file__).parents[1]


def test_values_are_found_as_whole_words_only() -> None:
    states("rank 1 of zb-v has 2,000,000 bytes, more than 1.5 MB", "rank 1", "zb-v", 2_000_000, "1.5 MB", 1.5)
    for part in ("rank", "bytes"):
        states("rank 1 has bytes", part)
    for absent in (5, 1, "zb", "v", "000", "MB of"):
        with pytest.raises(AssertionError):
            states("rank 12 of zb-v has 2,000 bytes, more than 1.5 MB", absent)


def test_fields_are_compared_where_the_error_has_them() -> None:
    error = wrong("width", 639, "at least 640")
    states(error, 640, argument="width", got=639)
    for fields in ({"argument": "least"}, {"got": 640}, {"stage": 7}):
        with pytest.raises(AssertionError):
            states(error, **fields)
    states(InputError("width must be at least 640, got 639"), argument="width", got=639)


def test_wording_and_nothing_are_refused_as_checks() -> None:
    for values in ((), ("must be at least",), ("the pipeline is closed",)):
        with pytest.raises(AssertionError), raises(InputError, *values):
            raise InputError("the pipeline is closed: it must be at least open")


OURS = {"InputError", "ParseError", "PipelineError", "ProgramError", "ScheduleError", "ZeroBubbleError", "PlannerError", "NotCompiledError"}


def test_no_test_compares_the_wording_of_our_errors() -> None:
    """Only text of other libraries is given to `match`."""
    found = []
    for file in sorted(TESTS.rglob("*.py")):
        text = file.read_text()
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)] if "match=" in text else []
        for call in calls:
            if any(key.arg == "match" for key in call.keywords) and OURS & set(re.findall(r"\w+", ast.unparse(call.args[0]))):
                found.append(f"{file.relative_to(TESTS)}:{call.lineno}")
    assert not found, "use tests.refusals.raises"
