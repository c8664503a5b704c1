"""Runs whole programs, from the pages or from tests: each rank runs the text as its main program."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

from tests.libraries import IMAGE_MODELS
from tests.procs.ranks import ONE_AT_A_TIME, forkserver, free_port

ROOT = Path(__file__).parents[2]
LONGEST_S = 540.0


def programs_of(page: str) -> list[str]:
    """The Python programs on a page; the path is relative to the project."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def torchrun(program: str, folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `program` in `folder` with torchrun, as users do."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "program.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False)


def run_forked(program: str, folder: Path, ranks: int) -> str:
    """Run `program` in processes that have already imported torch, which saves seconds over torchrun; returns what it prints."""
    (folder / "program.py").write_text(program)
    port = free_port()
    processes = [forkserver().Process(target=_run, args=(folder, rank, ranks, port), daemon=True) for rank in range(ranks)]
    for process in processes:
        with ONE_AT_A_TIME:
            process.start()
    try:
        for process in processes:
            assert wait([process.sentinel], LONGEST_S), "a rank hangs"
        codes = [process.exitcode for process in processes]
        assert not any(codes), (codes, (folder / "stderr").read_text())
    finally:
        for process in processes:
            process.kill()
    return (folder / "stdout").read_text()


def _run(folder: Path, rank: int, size: int, port: int) -> None:
    import random

    import torch

    torch.set_num_threads(1)
    sys.path[:] = [folder for folder in sys.path if folder != str(IMAGE_MODELS)]
    random.seed(), torch.seed()  # a process that torchrun starts has random states of its own, and a forked one those of its parent
    os.chdir(folder)
    sys.argv = ["program.py"]
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr] # a line in one write: all ranks share the file
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    runpy.run_path("program.py", run_name="__main__")
