"""Every multi-rank program of the pages runs as the page says: under torchrun, in processes that share nothing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.procs.programs import ROOT, programs_of, torchrun
from zerobubble.cli import main

pytestmark = pytest.mark.spread

LAUNCHER = r"torchrun --nproc-per-node (\d+) "
PAGES = [str(page.relative_to(ROOT)) for page in (ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md")))]
ON_ONE_RANK = "world_size=1"
LIBRARY = "site-packages/transformers"
"""Warnings of this library's own code are about what peft calls."""
ALWAYS = ("README.md", "docs/checkpoints.md")
"""Pages whose programs are played even where one long case in several is."""
PROGRAMS = [
    pytest.param(page, program, id=f"{page}-{number}", marks=pytest.mark.long(all=page in ALWAYS))
    for page in PAGES
    for number, program in enumerate(programs_of(page))
    if re.search("init_process_group|init_distributed", program) and ON_ONE_RANK not in program
]


def num_ranks(page: str, program: str) -> int:
    """The ranks that the program's first line names, or else the page."""
    return int(re.findall(LAUNCHER, program + (ROOT / page).read_text(encoding="utf-8"))[0])


def make_plans(page: str) -> None:
    """Make the plan files of the page, as the program expects them, without a search."""
    for command in re.findall(r"^\$ zerobubble (plan .*-o plan\.json.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)[:1]:
        unlimited = re.sub(r"--evaluations \d+", "", command)
        result = CliRunner().invoke(main, [*shlex.split(unlimited), "--budget", "0"])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_a_program_of_a_page_runs_under_torchrun(page: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "plan.json" in program:
        make_plans(page)
    done = torchrun(program, tmp_path, num_ranks(page, program))
    assert done.returncode == 0, done.stderr[-4000:]
    warnings = [line for line in done.stderr.splitlines() if "Warning" in line and LIBRARY not in line]
    assert not warnings, done.stderr[-4000:]
