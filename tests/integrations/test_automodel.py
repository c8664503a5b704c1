"""NeMo AutoModel plays the schedules we export: its `pp_schedule_csv` reads the file, and the gradients are those of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zerobubble as zb
from zerobubble.export.torch_csv import to_torch_csv

PROGRAM = Path(__file__).with_name("play_in_automodel.py")


@pytest.mark.feature("losses of one device", "any schedule of one route")
@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "interleaved-zb"])
def test_gradients_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    (tmp_path / "schedule.csv").write_text(to_torch_csv(zb.make(name, 2, 4)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}
    command = [*launcher, str(PROGRAM), str(tmp_path / "schedule.csv"), str(tmp_path / "error")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(float((tmp_path / f"error{rank}").read_text()) <= 1e-12 for rank in (0, 1))
