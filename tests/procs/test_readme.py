"""The programs of README and docs run as they are pasted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.procs.programs import programs_of, run_forked, torchrun


def by_torchrun(program: str, folder: Path, ranks: int) -> str:
    done = torchrun(program, folder, ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("run", [run_forked, pytest.param(by_torchrun, marks=pytest.mark.long)])
def test_the_program_runs_as_pasted(run: Callable[[str, Path, int], str], tmp_path: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", run(programs_of("README.md")[0], tmp_path, 4))]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_the_page_on_hooks_keeps_replicas_equal(tmp_path: Path) -> None:
    (program,) = programs_of("docs/hooks.md")
    loss, difference = re.findall(r"loss ([\d.]+), replicas differ by (\S+)", run_forked(program, tmp_path, 4))[0]
    assert float(loss) < 0.1
    assert float(difference) == 0


def test_the_page_on_auto_ends_with_a_plan(tmp_path: Path) -> None:
    (program,) = programs_of("docs/auto.md")
    printed = run_forked(program, tmp_path, 2)
    names = re.findall(r"step \d+: (.+)", printed)
    assert names[0] == "one by one"
    assert len(names) > 1
    assert re.search(r"bubble [\d.]+ %, at least [\d.]+ %", printed)


def test_the_page_on_kinds_recomputes(tmp_path: Path) -> None:
    (program,) = programs_of("docs/kinds.md")
    printed = run_forked(program, tmp_path, 2)
    assert printed.startswith("C0 C1 R0 ")
    assert "bytes held: 1100000 1000000" in printed
    assert re.search(r"loss [\d.]+", printed)
