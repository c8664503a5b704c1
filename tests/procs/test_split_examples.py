"""The examples of cut models run as their first lines say, and learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = {
    "a language model": ["split_language_model.py", "--steps", "6"],
    "low-rank adapters": ["split_language_model.py", "--steps", "6", "--lora"],
    "a mixture of experts": ["split_language_model.py", "--steps", "6", "--family", "mixtral"],
    "ResNet": ["split_resnet.py"],
    "T5": ["split_t5.py"],
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_an_example_runs_on_two_ranks_and_learns(case: str) -> None:
    name, *options = CASES[case]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = [*ranks, str(ROOT / "tests/run_example.py"), str(ROOT / "examples" / name), *options]
    told = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert told.returncode == 0, told.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", told.stdout)]
    assert losses[-1] < losses[0]
