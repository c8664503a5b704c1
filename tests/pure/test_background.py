"""The planner's process: its end is always reported, it leaves nothing behind, and it ends with its rank.

A plan is advice: no failure of the planner's process stops training.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.refusals import raises, states
from zerobubble import Costs, Limits, Placement, make
from zerobubble.planning import Plan, Problem, Status, background, solve
from zerobubble.planning.background import BackgroundPlanner, PlannerError
from zerobubble.simulation import peak_memory

PROBLEM = Problem(Placement.vee(2), 4, Costs.uniform(4), Limits((4_000_000,) * 2))
V_HALF = make("v-half", 8, 32)
DICE = random.Random(1)
UNEVEN = Costs.from_ms(*[[DICE.uniform(0.5, 1.5) for _ in range(16)] for _ in range(3)], 0.3)
LONG = Problem(V_HALF.placement, 32, UNEVEN, Limits(peak_memory(V_HALF, UNEVEN)))
"""A problem that keeps a search busy."""
UNEVEN_VEE = Costs.from_ms([1.0, 0.9, 0.6, 0.7], [0.6, 0.6, 1.4, 1.2], [0.7, 0.8, 1.3, 0.6], 0.1)
SEARCHED = Problem(Placement.vee(2), 8, UNEVEN_VEE, Limits((100_000_000,) * 2))
"""A problem of which no published schedule meets the bound, while a search does in a second and ends."""
LONGEST_S = 500.0
"""Seconds after which something hangs: on a busy machine it may take more than a minute to compile what searches."""


def until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def is_gone(pid: int) -> bool:
    """Whether there is no such process, not even one that has ended and was not asked after."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def open_files(folder: Path) -> list[str]:
    """The files of a folder that this process has open, also those without a name."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return [target for target in targets if target.startswith(f"{folder}/")]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of temporary files, for this test alone."""
    made = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    monkeypatch.setenv("TMPDIR", str(made))
    return made


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[list[BackgroundPlanner]]:
    """Planners that a test has started, with the priority of other processes. The test leaves no process and no file of them."""
    monkeypatch.setattr(background, "NICENESS", 0)
    planners: list[BackgroundPlanner] = []
    yield planners
    assert open_files(folder)
    for planner in planners:
        planner.close()
        assert is_gone(planner.pid)
    assert not open_files(folder)
    assert not [*folder.iterdir()]


def start(planners: list[BackgroundPlanner], problem: Problem = PROBLEM, seconds: float = 0.0) -> BackgroundPlanner:
    planners.append(BackgroundPlanner(problem, seconds))
    return planners[-1]


def outcome(planner: BackgroundPlanner) -> Plan | str:
    """The plan, or why there is none."""
    found: list[Plan | str] = []

    def asked() -> bool:
        try:
            answer = planner.answer()
        except PlannerError as error:
            found.append(str(error))
            return True
        found.extend([] if answer is None else [answer])
        return bool(found)

    assert until(asked, LONGEST_S)
    return found[0]


def test_the_planner_process_returns_the_requested_plan(started: list[BackgroundPlanner]) -> None:
    answer = outcome(start(started))
    assert isinstance(answer, Plan)
    assert answer.problem == PROBLEM
    assert answer.time == solve(PROBLEM, seconds=0).time


SHADOWS = ("random", "numpy", "llvmlite", "json", "pickle", "zerobubble")


@pytest.mark.sweep
@pytest.mark.parametrize("where", ["PYTHONPATH", "working directory", "sys.path"])
def test_no_file_stands_in_for_a_module(
    started: list[BackgroundPlanner], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    if where == "working directory":
        monkeypatch.chdir(tmp_path)
    elif where == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    else:
        monkeypatch.syspath_prepend(tmp_path)
    answer = outcome(start(started, SEARCHED, LONGEST_S))
    assert isinstance(answer, Plan), answer
    assert answer.how.startswith("planned by"), "what searches was found, and llvmlite for it"
    assert answer.status is Status.OPTIMAL, "so it ended long before its time"


def test_the_planner_process_has_low_priority(started: list[BackgroundPlanner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "NICENESS", 7)
    planner = start(started, LONG, LONGEST_S)
    assert until(lambda: os.getpriority(os.PRIO_PROCESS, planner.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 7, LONGEST_S)


def test_one_that_is_killed_is_reported(started: list[BackgroundPlanner]) -> None:
    planner = start(started, LONG, 60.0)
    os.kill(planner.pid, signal.SIGKILL)
    states(outcome(planner), "SIGKILL", "process", "killed")


@pytest.mark.long
def test_one_that_is_frozen_is_given_up_and_ended(started: list[BackgroundPlanner], monkeypatch: pytest.MonkeyPatch) -> None:
    planner = start(started, LONG, LONGEST_S)
    os.kill(planner.pid, signal.SIGSTOP)
    monkeypatch.setattr(planner, "_deadline", time.monotonic())
    states(outcome(planner), f"{LONGEST_S + background.MARGIN_S:.0f}", "process", "answer")


@pytest.mark.long
def test_one_that_takes_too_long_ends_by_itself(started: list[BackgroundPlanner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MARGIN_S", -57.0)
    planner = start(started, LONG, 60.0)
    monkeypatch.setattr(planner, "_deadline", time.monotonic() + LONGEST_S)
    found = outcome(planner)
    assert isinstance(found, str)
    states(found, 1, "process", "ended")
    assert " | File " in found, "where it was"


OTHER = json.dumps(solve(Problem(Placement.vee(2), 6, PROBLEM.costs, PROBLEM.limits), seconds=0).to_dict())
WRONG = {
    "raise ValueError('boom')": "its process ended with code 1: Traceback ",
    "import os; os._exit(3)": "its process ended with code 3",
    "import os; os.abort()": "its process was killed by SIGABRT",
    "pass": "its process ended without a plan that can be read (list index out of range)",
    "print('{garbage')": "its process ended without a plan that can be read (",
    "print('[' * 200_000)": "its process ended without a plan that can be read (",
    "import sys; sys.stdout.buffer.write(bytes(range(256)))": "its process ended without a plan that can be read (",
    f"print({OTHER!r})": "its process returned a plan for another problem",
}


@pytest.mark.parametrize("program", WRONG, ids=range(len(WRONG)))
def test_one_that_goes_wrong_is_reported(
    started: list[BackgroundPlanner], program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(f"{program}\n")
    monkeypatch.setattr(background, "PROGRAM", tmp_path / "program.py")
    found = outcome(start(started))
    assert isinstance(found, str)
    assert found.startswith(WRONG[program])
    assert len(found) < 1500
    assert "\n" not in found


@pytest.mark.sweep
@pytest.mark.parametrize("interpreter", ["/no/such/python", "", None])
def test_one_that_cannot_be_started_is_reported(interpreter: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)
    with raises(PlannerError, "process", "started"):
        BackgroundPlanner(PROBLEM, 0.0)
    assert not open_files(folder)


PARENT = """
import sys, time
from tests.pure.test_background import LONG
from zerobubble.planning.background import BackgroundPlanner

planner = BackgroundPlanner(LONG, 100.0)
print(planner.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("after", [0.0, 0.3, pytest.param(4.0, marks=pytest.mark.long)])
def test_the_planner_process_ends_with_its_parent(after: float) -> None:
    """At once, while it starts, and while it compiles or searches."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline())
        time.sleep(after)
        assert not is_gone(pid)
        parent.kill()
    assert until(lambda: is_gone(pid) or state_of(pid) == "Z", LONGEST_S)


def state_of(pid: int) -> str:
    """The state of a process in /proc; Z for one that has ended, whether or not its parent has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
