"""Real rank processes, forked from a server that has imported torch, and given job after job.

A job is a module-level function `job(group, *args)`; it runs on the first `ranks` processes and its results come back in rank order.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.device import BACKEND, DEVICE
from tests.procs.hosts.hosts import live_on

_alone: list[Any] = []


def alone() -> Any:
    """In a job, a group of this rank only. A group that a job makes itself shifts the numbers of later groups on this rank."""
    return _alone[0]


def _worker(rank: int, size: int, store: str, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests.device import use_device
    from tests.procs.patience import bear_with_others

    use_device()
    bear_with_others()
    stacks = open(_stacks_of(folder, rank), "w", encoding="utf-8")  # noqa: SIM115 - as long as the process lives
    faulthandler.enable(stacks)  # a process that C code aborts writes what each of its threads did in Python
    faulthandler.register(signal.SIGRTMIN, stacks)
    tempfile.tempdir = folder  # what is left there was left by this world
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and what it starts, has it ignored
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND, init_method=store, rank=rank, world_size=size)
    groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
    _alone.extend([dist.new_group([each]) for each in range(size)][rank : rank + 1])
    while True:
        function, count, args = pipe.recv()
        try:
            pipe.send(("ok", function(groups[count], *args)))
        except BaseException as error:  # the test shows it
            pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _stacks_of(folder: str, rank: int) -> str:
    """The file to which a rank writes the stacks of its threads when C code aborts it or it gets SIGRTMIN."""
    return os.path.join(folder, f"stacks of rank {rank}")


ONE_AT_A_TIME = threading.Lock()
"""Held to start a process, which also polls all others, or to get an exit code: two threads that poll at once would read a status twice."""
PATIENCE_S = 240.0 if DEVICE.type == "cpu" else 90.0
"""How long a job may take. A machine with an accelerator has cores for all ranks."""


PORTS = range(20_000, 30_000)
"""Below those that systems give to connections and to servers that ask for any: nobody else is given one before it is used."""
_taken: list[socket.socket] = []
"""Names of ports, which other processes of the tests see, for as long as this process lives."""


def free_port() -> int:
    """A port that is free now, and that no other test will get."""
    for port in random.SystemRandom().sample(PORTS, 100):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0zerobubble-tests-port-{port}")
            with socket.create_server(("127.0.0.1", port)):
                _taken.append(name)
                return port
        except OSError:
            name.close()
    raise OSError("there seems to be no free port")


def forkserver() -> Any:
    """Starts processes from a server that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.procs.preload"])
    return context


class Ranks:
    """`size` processes in one gloo world. Its store is a file, in the process of rank 0 if `hosted`, or else at `store`.

    `hosts` has, for each rank, a process of the host (`tests.procs.hosts`) on which it runs.
    """

    def __init__(self, size: int, *, hosted: bool = False, store: str = "", hosts: Sequence[int] = ()) -> None:
        context = forkserver()
        self._folder = tempfile.TemporaryDirectory()
        self.file = Path(self._folder.name) / "store"
        default = f"tcp://127.0.0.1:{free_port()}" if hosted else f"file://{self.file}"
        arguments = [(rank, size, store or default, self._folder.name) for rank in range(size)]
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=live_on, args=(hosts[rank], _worker, *arguments[rank], theirs), daemon=True)
            if hosts
            else context.Process(target=_worker, args=(*arguments[rank], theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        self._jobs: list[list[str]] = [[] for _ in range(size)]
        for process in self.processes:
            with ONE_AT_A_TIME:
                process.start()
        for _, theirs in pairs:
            theirs.close()

    def outcomes(self, function: Any, *args: Any, ranks: int, seconds: float = PATIENCE_S) -> list[tuple[str, Any]]:
        """Per rank: ("ok", result), ("error", text), or, if the process ended, ("gone", the signal's name or the exit code)."""
        self.start(function, *args, ranks=ranks)
        return [self.outcome(rank, seconds) for rank in range(ranks)]

    def start(self, function: Any, *args: Any, ranks: int) -> None:
        """Give the first `ranks` processes a job."""
        name = getattr(function, "__qualname__", str(function))  # a partial has none
        job = f"{name}{args}"[:300]
        for rank, pipe in enumerate(self.pipes[:ranks]):
            try:
                pipe.send((function, ranks, args))
            except ConnectionError as error:
                ended = self._how_it_ended(rank)
                self.kill()
                raise AssertionError(f"rank {rank} ended by {ended} before it got {job}; {self._last_jobs(rank)}") from error
            self._jobs[rank].append(job)

    def outcome(self, rank: int, seconds: float = PATIENCE_S) -> tuple[str, Any]:
        """How the job ended on `rank`, in the form of `outcomes`."""
        try:
            if not self.pipes[rank].poll(seconds):
                stacks = self._stacks_of_the_living()
                self.kill()
                raise AssertionError(f"rank {rank} hangs; {self._last_jobs(rank)}{stacks}")
            found: tuple[str, Any] = self.pipes[rank].recv()
            return found
        except (EOFError, ConnectionError):
            return "gone", self._how_it_ended(rank)

    def run(self, function: Any, *args: Any, ranks: int, seconds: float = PATIENCE_S) -> list[Any]:
        """The results of a job that must succeed on every rank."""
        outcomes = self.outcomes(function, *args, ranks=ranks, seconds=seconds)
        failed = [
            f"rank {rank}: {result}" if state == "error" else f"rank {rank} ended by {result}; {self._last_jobs(rank)}{self._stacks(rank)}"
            for rank, (state, result) in enumerate(outcomes)
            if state != "ok"
        ]
        assert not failed, "\n".join(failed)
        return [result for _, result in outcomes]

    def _how_it_ended(self, rank: int) -> str:
        """The signal or exit code with which a process that has closed its pipe ended."""
        process = self.processes[rank]
        assert wait([process.sentinel], 60), f"rank {rank} has closed its pipe and does not end; {self._last_jobs(rank)}"
        with ONE_AT_A_TIME:
            code = process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

    def _stacks_of_the_living(self) -> str:
        """The stacks of the threads of each living rank."""
        for process in self.processes:
            with ONE_AT_A_TIME:
                if process.pid is not None and process.is_alive():
                    os.kill(process.pid, signal.SIGRTMIN)
        time.sleep(1.0)  # there is no sign that a rank has written
        return "".join(f"\nrank {rank}:{self._stacks(rank)}" for rank in range(len(self.processes)))

    def _stacks(self, rank: int) -> str:
        """The first lines of the stacks that a rank has written."""
        path = Path(_stacks_of(self._folder.name, rank))
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return "".join(f"\n{line}" for line in lines[:40])

    def _last_jobs(self, rank: int) -> str:
        """The last jobs, any of which may be the cause: memory that one job corrupts can end the process in the next one."""
        return f"its last jobs were {' and '.join(self._jobs[rank][-2:]) or 'none'}"

    def kill_all_but_frozen(self) -> None:
        """End every process that is not stopped, so that any remaining lock is held by a stopped one."""
        for process in self.processes:
            with suppress(OSError):
                if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                    process.kill()
                    wait([process.sentinel])

    def kill(self) -> None:
        """End every process."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()
