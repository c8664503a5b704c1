"""The example of the page on measuring runs as it is pasted, and the command line reads the files it writes."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from textwrap import indent

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.procs.programs import ROOT, programs_of, run_forked
from zerobubble.cli import main

PAGE = (ROOT / "docs/measure.md").read_text(encoding="utf-8")


def test_the_lines_for_a_script_of_one_s_own_explain_each_rank(tmp_path: Path) -> None:
    lines, program = programs_of("docs/measure.md")
    before, _ = program.split("    costs = pipe.profile")
    printed = run_forked(f"{before}    y = x\n{indent(lines, '    ')}dist.destroy_process_group()\n", tmp_path, 2)
    assert re.findall(r"^rank (\d): idle for ", printed, re.MULTILINE) == ["0", "1"]


def test_the_page_s_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, program = programs_of("docs/measure.md")
    printed = run_forked(program, tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    costs, run = (json.loads(Path(f"{name}.json").read_text()) for name in ("costs", "run"))
    schedule = zb.Schedule.from_text(Path("plan.txt").read_text())
    difference = zb.diff(schedule, zb.Costs.from_dict(costs), zb.Timeline.from_dict(run))
    assert all(account.total == difference.measured for account in difference.accounts)
    assert printed == f"{difference}\n"
    command = re.search(r"\$ (zerobubble diff .*)", PAGE)
    assert command is not None
    done = CliRunner().invoke(main, shlex.split(command[1])[1:])
    assert done.exit_code == 0, done.output
    assert {"diff.html", "diff.trace.json"} <= set(os.listdir())
    assert done.output.startswith(str(difference).split(",")[0])
