"""The README's own program and picture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import zerobubble as zb
from zerobubble.export import timeline_svg

ROOT = Path(__file__).parents[2]


def test_the_program_runs_as_pasted(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert program is not None
    (tmp_path / "hello.py").write_text(program[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "hello.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_the_picture_is_what_the_code_draws() -> None:
    timelines = []
    for name in ("1f1b", "zb-h1", "zb-v"):
        schedule = zb.make(name, 4, 8)
        costs = zb.Costs.uniform(schedule.num_stages, (10, 10, 8), 0.2, stages_per_rank=schedule.num_stages // 4)
        timelines.append(zb.simulate(schedule, costs))
    picture = timeline_svg(*timelines, title="One training step on 4 ranks: 1F1B, ZB-H1, ZB-V")
    assert (ROOT / "docs" / "timeline.svg").read_text() == picture
