"""Starts ranks without torchrun, which ends all ranks of a machine when one fails: so ranks on other machines see the failure."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.procs.programs import free_port

ROOT = Path(__file__).parents[2]


def outcomes_of_two_ranks(*command: str | Path) -> list[tuple[int, str]]:
    """The exit code of a Python program on each of two ranks, and what it wrote to stderr."""
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    given |= {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    given["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    with ExitStack() as stack:
        started = []
        for rank in ("0", "1"):
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            environment = os.environ | given | {"RANK": rank, "LOCAL_RANK": rank}
            process = subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL, stderr=errors)
            stack.callback(process.kill)
            started.append((process, errors))
        outcomes = []
        for process, errors in started:
            process.wait()
            errors.seek(0)
            outcomes.append((process.returncode, errors.read()))
        return outcomes


def cases_played(request: pytest.FixtureRequest, test: str) -> set[str]:
    """The cases of a test that this run plays: a fixture that all of them share trains no others."""
    return {
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test and item.path == request.path
    }
