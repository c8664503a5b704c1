"""How a program may end without asking the pipeline first."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from tests.procs.programs import torchrun
from tests.procs.ranks import free_port
from tests.refusals import states

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


UNCAUGHT = """
import os, sys, torch, torch.distributed as dist, zerobubble as zb
dist.init_process_group("gloo")
pipe = zb.Pipeline(lambda stage, num_stages: torch.nn.Linear(4, 4), "zb-h1", 4, torch.nn.functional.mse_loss)
pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
if pipe.rank == 1:
    raise ValueError("outside of calls")
try:
    pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
except zb.PipelineError as error:
    print(error.rank, error, flush=True)
"""


@pytest.mark.long
def test_a_rank_that_ends_by_an_error_of_its_own_code_is_named_with_the_error(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(UNCAUGHT)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        Popen([sys.executable, "program.py"], cwd=tmp_path, env={**os.environ, **address, "RANK": str(rank)}, text=True, stdout=PIPE)
        for rank in range(2)
    ]
    (text, _), _ = [rank.communicate() for rank in ranks]
    states(text, 1, "ValueError", "program.py:7", foreign="outside of calls")
