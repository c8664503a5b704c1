"""Real rank processes, forked from a server that has imported torch, and given job after job.

A job is a module-level function `job(group, *args)`; it runs on the first `ranks` processes and its results come back in rank order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import traceback
from multiprocessing.connection import Connection
from typing import Any


def _worker(rank: int, size: int, store: str, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    tempfile.tempdir = folder  # what is left there was left by this world
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and what it starts, has it ignored
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, count, args = job
        try:
            pipe.send(("ok", function(groups[count], *args)))
        except BaseException as error:  # the test shows it
            pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Ranks:
    """`size` processes in one gloo world; its store is a file, or where `hosted`, in the process of rank 0."""

    def __init__(self, size: int, *, hosted: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.procs.preload"])
        self._folder = tempfile.TemporaryDirectory()
        store = f"tcp://127.0.0.1:{_free_port()}" if hosted else f"file://{os.path.join(self._folder.name, 'store')}"
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_worker, args=(rank, size, store, self._folder.name, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def outcomes(self, function: Any, *args: Any, ranks: int, seconds: float = 120) -> list[tuple[str, Any]]:
        """Per rank: ("ok", result), ("error", text) or ("gone", "") when the process died."""
        self.start(function, *args, ranks=ranks)
        return [self.outcome(rank, seconds) for rank in range(ranks)]

    def start(self, function: Any, *args: Any, ranks: int) -> None:
        """Give the first `ranks` processes a job."""
        for pipe in self.pipes[:ranks]:
            pipe.send((function, ranks, args))

    def outcome(self, rank: int, seconds: float = 120) -> tuple[str, Any]:
        """How the job ended on `rank`, as `outcomes` tells it."""
        try:
            if not self.pipes[rank].poll(seconds):
                self.kill()
                raise AssertionError(f"rank {rank} hangs")
            found: tuple[str, Any] = self.pipes[rank].recv()
            return found
        except (EOFError, ConnectionResetError):
            return "gone", ""

    def run(self, function: Any, *args: Any, ranks: int, seconds: float = 120) -> list[Any]:
        """The results of a job that must succeed on every rank."""
        outcomes = self.outcomes(function, *args, ranks=ranks, seconds=seconds)
        failed = [f"rank {rank}: {result}" for rank, (state, result) in enumerate(outcomes) if state != "ok"]
        assert not failed, "\n".join(failed)
        return [result for _, result in outcomes]

    def kill(self) -> None:
        """End every process."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()
