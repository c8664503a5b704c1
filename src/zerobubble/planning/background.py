"""A plan made in the background by a separate low-priority process that cannot harm the caller.

If the process is killed, hangs, crashes or never starts, the result is a `PlannerError` and nothing else: a plan is only advice.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from zerobubble.errors import ZeroBubbleError
from zerobubble.planning.answer import Plan
from zerobubble.planning.problem.problem import Problem

PROGRAM = Path(__file__).with_name("search_process.py")
MARGIN_S = 120.0
"""Seconds allowed beyond the budget: to start, compile the search, and check the answer."""
NICENESS = 10
"""Niceness of the process, so that it takes little processor time from training."""
_REAPED_S = 2.0
"""Seconds to wait for a killed process to exit."""
_MOST_BYTES = 2**28
"""Bytes of the process's output that are read."""
_MOST_WORDS = 600
"""Characters of its errors that are reported."""


class PlannerError(Exception):
    """The process returned no plan; the message says why."""


class BackgroundPlanner:
    """Searches for the best schedule for `problem` in a process, for `seconds`. Poll `answer`, and call `close` when done.

    Raises `PlannerError` if no process can be started.
    """

    def __init__(self, problem: Problem, seconds: float) -> None:
        self._problem = problem
        self._longest_s = seconds + MARGIN_S
        self._deadline = time.monotonic() + self._longest_s
        try:
            with ExitStack() as files:
                self._written, self._errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                self._process = _start(problem, seconds, self._longest_s, self._written, self._errors)
                self._end = weakref.finalize(self, _end, self._process, files.pop_all())
        except (OSError, TypeError, ValueError) as error:  # no interpreter, no disk space, no more processes
            raise PlannerError(f"its process cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    def answer(self) -> Plan | None:
        """The plan, or None while the search runs. Raises `PlannerError` if there will be none."""
        code = self._process.poll()
        if code is None:
            if time.monotonic() > self._deadline:
                raise PlannerError(f"its process gave no answer in {self._longest_s:g} s{self._last_words()}")
            return None
        if code != 0:
            raise PlannerError(f"its process {_ended(code)}{self._last_words()}")
        return self._read()

    def close(self) -> None:
        """Kills the process if it still runs, and frees its resources."""
        self._end()

    def _read(self) -> Plan:
        """Reads the answer of a process that exited normally."""
        try:
            lines = _last_bytes(self._written, _MOST_BYTES).splitlines()
            plan = Plan.from_dict(json.loads(lines[-1]))
        except (IndexError, ValueError, RecursionError, ZeroBubbleError) as error:
            raise PlannerError(f"its process ended without a plan that can be read ({error}){self._last_words()}") from error
        if plan.problem != self._problem:
            raise PlannerError("its process returned a plan for another problem")
        return plan

    def _last_words(self) -> str:
        """The end of stderr in one line, after a colon; empty if nothing was written."""
        text = _last_bytes(self._errors, 4 * _MOST_WORDS).decode(errors="replace")
        words = " | ".join(line.strip() for line in text.splitlines() if line.strip())
        return f": {words[-_MOST_WORDS:]}" if words else ""


def _start(problem: Problem, seconds: float, longest_s: float, written: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts the process with the problem on stdin. Unnamed files carry all data, so none can be left behind."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    command = [sys.executable, "-I", str(PROGRAM), str(os.getpid()), str(seconds), str(longest_s), str(NICENESS), *folders]
    with tempfile.TemporaryFile() as asked:
        asked.write(pickle.dumps(problem))
        asked.seek(0)
        return subprocess.Popen(command, stdin=asked, stdout=written, stderr=errors)


def _end(process: subprocess.Popen[bytes], files: ExitStack) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_REAPED_S)
    files.close()


def _ended(code: int) -> str:
    """Describes an exit code."""
    if code >= 0:
        return f"ended with code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _last_bytes(file: IO[bytes], most: int) -> bytes:
    """The last bytes of a file. Another process shares its offset, so it must no longer write if the offset matters."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - most))
    return file.read(most)
