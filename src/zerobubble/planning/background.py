"""A plan made in the background of other work: in a process of its own, at low priority.

`python -m zerobubble.planning.background PROBLEM ANSWER SECONDS` is that process.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from zerobubble.errors import InputError
from zerobubble.planning.competition import solve
from zerobubble.planning.problem import Problem, Solved


class BackgroundPlanner:
    """Searches `seconds` for the best schedule for `problem`; ask `answer` now and then, and `close` what is not needed any more."""

    def __init__(self, problem: Problem, seconds: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zerobubble-plan-")
        self._answer = Path(self._folder.name, "answer.json")
        asked = Path(self._folder.name, "problem")
        asked.write_bytes(pickle.dumps(problem))
        self._stderr = Path(self._folder.name, "stderr")
        with self._stderr.open("wb") as stderr:
            command = [sys.executable, "-m", "zerobubble.planning.background", str(asked), str(self._answer), str(seconds)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)

    def answer(self) -> Solved | None:
        """The plan, None while it is being made. Raises `InputError` with the last line of its errors when it failed."""
        code = self._process.poll()
        if code is None:
            return None
        if code != 0:
            words = self._stderr.read_text(errors="replace").strip().splitlines()
            raise InputError(f"the planner ended with code {code}: {words[-1] if words else 'it said nothing'}")
        return Solved.from_dict(json.loads(self._answer.read_text(encoding="utf-8")))

    def close(self) -> None:
        """End the process if it still runs, and remove its files."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _main(asked: str, answer: str, seconds: str) -> None:
    os.nice(10)
    solved = solve(pickle.loads(Path(asked).read_bytes()), seconds=float(seconds))
    Path(answer).write_text(json.dumps(solved.to_dict()), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
