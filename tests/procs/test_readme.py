"""The programs of README and docs run as they are pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(page: Path, folder: Path, ranks: int) -> str:
    """What the first program of `page` prints on so many ranks."""
    program = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert program is not None
    (folder / "program.py").write_text(program[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "program.py"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_runs_as_pasted(tmp_path: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", run(ROOT / "README.md", tmp_path, 4))]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_the_page_on_hooks_keeps_replicas_equal(tmp_path: Path) -> None:
    printed = run(ROOT / "docs/hooks.md", tmp_path, 4)
    loss, difference = re.findall(r"loss ([\d.]+), replicas differ by (\S+)", printed)[0]
    assert float(loss) < 0.1
    assert float(difference) == 0


def test_the_page_on_auto_ends_with_a_plan(tmp_path: Path) -> None:
    printed = run(ROOT / "docs/auto.md", tmp_path, 2)
    names = re.findall(r"step \d+: (.+)", printed)
    assert names[0] == "one by one"
    assert len(names) > 1
    assert re.search(r"bubble [\d.]+ %, at least [\d.]+ %", printed)


def test_the_page_on_kinds_recomputes(tmp_path: Path) -> None:
    printed = run(ROOT / "docs/kinds.md", tmp_path, 2)
    assert printed.startswith("C0 C1 R0 ")
    assert "bytes held: 1100000 1000000" in printed
    assert re.search(r"loss [\d.]+", printed)
