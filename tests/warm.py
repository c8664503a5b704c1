"""A process that has imported and collected tests, from which each mutant gets a fork of its own: only its tests take time.

The fork exchanges the code of the functions that the mutant changes. Processes that a test starts import the changed file. A mutant outside
a function, such as the default of an argument, needs a new import, and so does one whose tests pass in a fork: what was computed at import
or collection may hide it. `tests/mutants.py` runs these in a process of their own.
"""

from __future__ import annotations

import ast
import gc
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from multiprocessing.connection import Connection
from types import CodeType, FunctionType
from typing import NamedTuple

import pytest


class Trial(NamedTuple):
    """A source file before and after a change, None without one, the tests to run, and the seconds that they may take."""

    file: str
    texts: tuple[str, str] | None
    tests: list[str]
    seconds: float


class Forks:
    """A plugin that runs, in place of all tests, those of each trial that arrives; it sends back what failed, or an empty text."""

    def __init__(self, pipe: Connection, other_end: Connection) -> None:
        self._pipe, self._other_end = pipe, other_end

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Answer trials until the pipe closes."""
        self._other_end.close()  # so that the pipe ends with the other process
        items = {item.nodeid: item for item in session.items}
        self._pipe.send("ready")
        with suppress(EOFError):
            while True:
                trial: Trial = self._pipe.recv()
                self._pipe.send(_forked(trial, [items[name] for name in trial.tests]))
        return True


def _forked(trial: Trial, items: Sequence[pytest.Item]) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()
        try:
            result = _run(trial, items)
        except BaseException:  # the driver shows it, and must not take it for a test that fails
            result = f"error: {traceback.format_exc()}"
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    end = time.monotonic() + trial.seconds
    while (ended := os.waitpid(child, os.WNOHANG)[0] != 0) is False and time.monotonic() < end:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with its ranks
    if not ended:
        os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    return (found or "the process ends early") if ended else f"no end in {trial.seconds:.0f} s"


def _run(trial: Trial, items: Sequence[pytest.Item]) -> str:
    if trial.texts is not None and not exchange(trial.file, *trial.texts):
        return "cold"
    failed: list[str] = []

    class Failures:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    config = items[0].config
    config.pluginmanager.register(Failures())
    for item, after in zip_longest(items, items[1:]):
        config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if failed:
            item.session._setupstate.teardown_exact(None)
            return failed[0]
    return "passed"


def exchange(file: str, before: str, after: str) -> bool:
    """Give each imported function of a file the code that the changed text has for it; False if that cannot show the change."""
    path, found = os.path.abspath(file), False
    modules = [compile(text, path, "exec", dont_inherit=True) for text in (before, after)]
    changed = {old: new for old, new in _pairs(*modules) if old != new}
    for function in [each for each in gc.get_objects() if type(each) is FunctionType]:
        if function.__code__.co_filename == path and function.__code__ in changed:
            function.__code__ = changed[function.__code__]
            found = True
    return found


def _pairs(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    for old, new in zip(*([each for each in code.co_consts if isinstance(each, CodeType)] for code in (before, after)), strict=True):
        yield old, new
        yield from _pairs(old, new)


def is_inside_a_function(text: str, line: int, end_line: int) -> bool:
    """Whether lines of a source file are part of the body of a function."""
    bodies = (node.body for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return any(body[0].lineno <= line and end_line <= (body[-1].end_lineno or 0) for body in bodies)
