"""Runs a program of a framework on ranks that are forked from a process that has imported it: an import takes 5 to 15 s of CPU.

There is no torchrun, which ends all ranks of a machine when one fails: so the others see the failure, as ranks on other machines do.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import random
import runpy
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.procs.ranks import free_port


def outcomes(program: Path, *arguments: str | Path, ranks: int) -> list[tuple[int, str]]:
    """The exit code of a program on each of so many ranks, or alone with 0, and what it printed."""
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    given["TORCHELASTIC_RUN_ID"] = "none"
    context = forks_of(program)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(max(ranks, 1))]
        environments = [given | {"RANK": file.name, "LOCAL_RANK": file.name} if ranks else {} for file in files]
        processes = [
            context.Process(target=_run, args=(program, arguments, environment, file), daemon=True)
            for environment, file in zip(environments, files, strict=True)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
        return [(process.exitcode, file.read_text()) for process, file in zip(processes, files, strict=True)]


def run_program(program: Path, *arguments: str | Path, ranks: int = 0) -> None:
    """Runs a program that must succeed, as `outcomes` does."""
    failed = [printed[-5000:] for code, printed in outcomes(program, *arguments, ranks=ranks) if code]
    assert not failed, "\n\n".join(failed)


def forks_of(program: Path) -> Any:
    """A context whose processes are forked from a server that has imported this program, and no other one."""
    context = multiprocessing.get_context("forkserver")
    modules = [f"tests.integrations.{program.stem}"]
    if forkserver._forkserver._preload_modules != modules:
        forkserver._forkserver._stop()
        context.set_forkserver_preload(modules)
    return context


def _run(program: Path, arguments: tuple[str | Path, ...], environment: dict[str, str], output: Path) -> None:
    gc.freeze()  # the server's imports: otherwise each collection would traverse them
    torch.set_num_threads(1)
    random.seed(), torch.seed()  # a process that torchrun starts has random states of its own, and a forked one those of its parent
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ |= environment
    sys.argv[:] = map(str, [program, *arguments])
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # processes of `multiprocessing` do not


def cases_played(request: pytest.FixtureRequest, test: str) -> set[str]:
    """The cases of a test that this run plays: a fixture that all of them share trains no others."""
    return {
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test and item.path == request.path
    }
