"""The example of the page on measuring runs as it stands, and the command line reads the files it writes."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner

import zerobubble as zb
from tests.procs.programs import ROOT, programs_of
from tests.procs.ranks import Ranks
from zerobubble.cli import main

PAGE = (ROOT / "docs/measure.md").read_text(encoding="utf-8")


def run_page(group: Any, folder: str) -> zb.explain.Difference:
    """The page's program in `folder`; a group of two ranks is its world."""
    (program,) = programs_of("docs/measure.md")
    text = program.replace("nn.functional.mse_loss)", "nn.functional.mse_loss, group=group)")
    names: dict[str, Any] = {"group": group}
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(text, names)
    finally:
        os.chdir(before)
    dist.barrier(group)
    found: zb.explain.Difference = names["difference"]
    return found


def test_the_page_s_program_runs(world: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = world.run(run_page, str(tmp_path), ranks=2)
    assert first == second
    assert all(account.total == first.measured for account in first.accounts)
    command = re.search(r"\$ (zerobubble diff .*)", PAGE)
    assert command is not None
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, shlex.split(command[1])[1:])
    assert done.exit_code == 0, done.output
    assert {"diff.html", "diff.trace.json"} <= set(os.listdir())
    assert done.output.startswith(str(first).split(",")[0])
