"""Records which expressions each test reaches, in the process of pytest and in those that a test starts.

`tests/mutants.py` runs the tests once with `-p tests.reached` on marked sources, so that it need not run, for each mutant, tests that never
come to its line. The number of the current test is in memory that all processes map: rank processes outlive the test that started them.
"""

from __future__ import annotations

import ast
import json
import mmap
import os
from collections import defaultdict
from collections.abc import Container
from pathlib import Path

import pytest

FOLDER = "ZEROBUBBLE_REACHED"
"""Environment variable with the folder of the record."""
_seen: set[tuple[bytes, str]] = set()

if FOLDER in os.environ:
    _folder = Path(os.environ[FOLDER])
    _log = os.open(_folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with (_folder / "current").open("a+b") as _file:
        if _file.tell() == 0:
            _file.write(bytes(4))
            _file.flush()
        _current = mmap.mmap(_file.fileno(), 4)


def at(where: str) -> None:
    """Record that the current test comes to an expression."""
    key = bytes(_current), where
    if key not in _seen:
        _seen.add(key)
        os.write(_log, f"{int.from_bytes(key[0], 'little')} {where}\n".encode())


def marked(text: str, file: str, places: Container[tuple[int, int, int, int]]) -> str:
    """The text of a source file in which each expression at one of the places records its place before it is computed."""
    tree = _Marks(file, places).visit(ast.parse(text))
    after = 1 if ast.get_docstring(tree) is not None else 0
    after += sum(isinstance(statement, ast.ImportFrom) and statement.module == "__future__" for statement in tree.body)
    tree.body.insert(after, ast.ImportFrom("tests.reached", [ast.alias("at", "_reached_at")], 0))
    return ast.unparse(ast.fix_missing_locations(tree))


class _Marks(ast.NodeTransformer):
    def __init__(self, file: str, places: Container[tuple[int, int, int, int]]) -> None:
        self.file, self.places = file, places

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.pattern | ast.JoinedStr):  # a pattern has no calls, and parts of an f-string have no place of their own
            return node
        where = place(node) if isinstance(node, ast.expr) else None
        self.generic_visit(node)
        if where not in self.places or not isinstance(node, ast.expr):
            return node
        name = ast.Constant(place_name(self.file, where))
        return ast.BoolOp(ast.Or(), [ast.Call(ast.Name("_reached_at", ast.Load()), [name], []), node])


def place(node: ast.expr) -> tuple[int, int, int, int]:
    """Where an expression begins and ends: line and column in bytes, twice."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def place_name(file: str, where: tuple[int, int, int, int]) -> str:
    """One word for a place in a file."""
    return ":".join([file, *map(str, where)])


class Recorder:
    """Numbers the tests, from 1, and writes which passed, in how many seconds."""

    def __init__(self) -> None:
        self.tests: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Count the test."""
        self.tests.append(nodeid)
        _current[:] = len(self.tests).to_bytes(4, "little")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a part of the test."""
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the tests."""
        found = [[test, None if test in self.failed else self.seconds[test]] for test in self.tests]
        (_folder / "tests.json").write_text(json.dumps(found), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Record, in the process that runs the tests."""
    config.pluginmanager.register(Recorder())


def read(folder: Path) -> tuple[dict[str, float], list[str], dict[str, list[str]]]:
    """The seconds of each test that passed; those that did not; and which reach each place. What is computed at import, all reach."""
    tests = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
    failed = [test for test, seconds in tests if seconds is None]
    passed = {test: seconds for test, seconds in tests if seconds is not None}
    found: dict[str, set[str]] = defaultdict(set)
    for line in (folder / "log").read_text(encoding="utf-8").splitlines():
        test, _, where = line.partition(" ")
        found[where] |= passed.keys() & {tests[int(test) - 1][0]} if int(test) else passed.keys()
    return passed, failed, {where: sorted(names) for where, names in found.items()}
