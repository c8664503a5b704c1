"""The seed of a long run selects its tests: three consecutive seeds cover every long test. `make test` runs the first case of a sweep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ONE_IN, ROOT, TURNS, not_played
from tests.procs.exhaustive import SEED

TESTS = [f"tests/procs/test_{name}.py::test_{name}" for name in "abcdefghijkl"]


@pytest.mark.parametrize("count", [1, ONE_IN, ONE_IN + 1, 100])
def test_seeds_in_a_row_play_every_test_once_with_a_share_of_its_cases(count: int) -> None:
    cases = list(range(count))
    for test in TESTS:
        played = [count - len(not_played(test, cases, str(seed))) for seed in range(40, 40 + TURNS)]
        assert sorted(played) == [0] * (TURNS - 1) + [-(-count // ONE_IN)]


def test_a_seed_repeats_its_cases_and_another_one_has_others() -> None:
    cases, test = list(range(100)), TESTS[0]
    turn = next(seed for seed in range(TURNS) if not_played(test, cases, str(seed)) != cases)
    drawn = [not_played(test, cases, str(seed)) for seed in (turn, turn, turn + TURNS)]
    assert drawn[0] == drawn[1] != drawn[2]


SUITE = """
import pytest
from hypothesis import given, strategies

@pytest.mark.sweep
@pytest.mark.parametrize("case", range(17))
def test_sweep(case): pass

@given(strategies.integers())
def test_random(number): pass

def test_plain(): pass
"""


def collected(folder: Path, *arguments: str, seed: str = "") -> list[str]:
    """The names of the tests that a run would play, with this repository's settings."""
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *settings, "-n", "0", "--collect-only"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", **({SEED: seed} if seed else {})}
    run = subprocess.run([*command, *arguments, str(folder)], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return [line.partition("::")[2] for line in run.stdout.splitlines() if "::" in line]


@pytest.mark.long
def test_runs_are_short_or_long(tmp_path: Path) -> None:
    assert collected(tmp_path, "-m", "not long") == ["test_sweep[0]", "test_random", "test_plain"]
    runs = [collected(tmp_path, "-m", "long", seed=str(seed)) for seed in range(TURNS)]
    assert all("test_random" in run and "test_plain" not in run and "test_sweep[0]" not in run for run in runs)
    assert sorted(len(run) for run in runs) == [1] * (TURNS - 1) + [3]
