"""How a program may end without asking the pipeline first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs.programs import torchrun

pytestmark = pytest.mark.ranks_wait

FORGETFUL = """
import torch, torch.distributed as dist, zerobubble as zb
dist.init_process_group("gloo")
build = lambda stage, num_stages: torch.nn.Linear(4, 4)
pipe = zb.Pipeline(build, "zb-h1", 4, torch.nn.functional.mse_loss)
for _ in range(3):
    pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
print("done", flush=True)
"""


@pytest.mark.long
def test_a_program_that_never_closes_its_pipeline_ends_cleanly(tmp_path: Path) -> None:
    done = torchrun(FORGETFUL, tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    assert "terminate called" not in done.stderr
