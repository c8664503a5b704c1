"""The helpers of `tests/refusals.py` fail if a value is missing, and refuse to compare wording. No test compares wording otherwise."""

from __future__ import annotations

import ast
import re
from itertools import permutations
from pathlib import Path

import pytest

from tests.refusals import PROSE, raises, states
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


def quoting(text: str) -> list[int]:
    """The lines that compare the wording of an error: a `match` for an error of ours, or a sentence looked for in a caught error."""
    found: list[int] = []
    for node in ast.walk(ast.parse(text)) if "match=" in text or ".value)" in text else ():
        if isinstance(node, ast.Call) and any(key.arg == "match" for key in node.keywords):
            is_wording = bool(OURS & set(re.findall(r"\w+", ast.unparse(node.args[0]))))
        else:
            is_wording = isinstance(node, ast.Compare) and any(
                isinstance(one, ast.Constant) and PROSE.search(str(one.value)) and re.fullmatch(r"str\(\w+\.value\)", ast.unparse(other))
                for one, other in permutations((node.left, node.comparators[0]))
            )
        if is_wording:
            found.append(node.lineno)
    return found


def test_no_test_compares_the_wording_of_our_errors() -> None:
    """Only text of other libraries is given to `match`."""
    for line in ('pytest.raises(zb.InputError, match="as many")', 'assert "needs as many" in str(caught.value)'):
        assert quoting(line) == [1]
    assert quoting('pytest.raises(KeyError, match="mine")') == quoting('assert "0F0" in str(caught.value)') == []
    found = {str(file.relative_to(TESTS)): quoting(file.read_text()) for file in sorted(TESTS.rglob("*.py"))}
    found.pop(Path(__file__).relative_to(TESTS).as_posix())
    assert {file: lines for file, lines in found.items() if lines} == {}, "use tests.refusals.raises"
