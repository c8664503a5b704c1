"""One case played: the processes are started, the deed is done, and what every rank wrote and left behind is gathered."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.procs.hosts.hosts import Hosts, Quality, child_of, live_on, store_on
from tests.procs.random_signals import case as cases
from tests.procs.random_signals import diary, script
from tests.procs.random_signals.case import Case
from tests.procs.random_signals.diary import Entry
from tests.procs.random_signals.outside import Delays, is_locked, is_torn
from tests.procs.ranks import ONE_AT_A_TIME, forkserver, free_port

PATIENCE_S = 60.0
"""Beyond the timeouts of torch and of the pipeline: a rank that has not ended by then hangs."""
_CABLE = Quality(delay_ms=0.5, jitter_ms=0.5, loss=0.001)
_SIGNALS = {cases.KILL: signal.SIGKILL, cases.TERMINATE: signal.SIGTERM, cases.INTERRUPT: signal.SIGINT}


@dataclass(frozen=True)
class Evidence:
    """The evidence of a case.

    `deed` is when the deed was done, None where it never was, and `woken` when the victim went on. `diaries` and `codes` are those of the
    ranks: a code is negative for a signal, None for a rank that hung and was ended by the harness; `ended` is when each process was seen
    to have ended. `files` and `processes` are left. `delays` has how long ranks waited for a processor; `store` says how the victim left
    a file that is the store, if so: "torn" or "locked".
    """

    deed: float | None
    woken: float | None
    diaries: list[list[Entry]]
    codes: list[int | None]
    ended: list[float]
    files: list[str]
    processes: list[str]
    logs: list[str]
    delays: Delays
    store: str


def play(case: Case, offset: float) -> Evidence:
    """Play a case from its beginning to its end; a deed from outside is done `offset` seconds into the call at which it is aimed."""
    with tempfile.TemporaryDirectory(prefix="random-signals-") as folder:
        (Path(folder) / "tmp").mkdir()
        with Hosts(["host0", "host1"], _CABLE) if case.hosts else nullcontext() as hosts:
            return _World(case, Path(folder), offset, hosts).play()


def warm_up() -> None:
    """Start the server that ranks are forked from, which imports torch."""
    first = forkserver().Process(target=os.getpid)
    first.start()
    first.join()


class _World:
    """The processes of one case."""

    def __init__(self, case: Case, folder: Path, offset: float, hosts: Hosts | None) -> None:
        self.case = case
        self.offset = offset
        self.folder = folder
        self.deed: float | None = None
        self.woken: float | None = None
        self.ended = [0.0] * case.ranks
        context = forkserver()
        self._bell, self._bells = context.Pipe(duplex=False)
        self._store, address = _store(case, folder)
        self._hosts = hosts
        self.pids: list[int] = []
        self.processes: list[Any] = [
            context.Process(target=self._live(rank), args=(case, rank, folder, address, self._bells), daemon=True)
            for rank in range(case.ranks)
        ]

    def _live(self, rank: int) -> Callable[..., object]:
        """What the process of a rank runs, on its host if it has one."""
        if self._hosts is None:
            return script.live
        return partial(live_on, self._hosts.pids[self.case.hosts[rank]], script.live)

    def play(self) -> Evidence:
        try:
            for process in self.processes:
                with ONE_AT_A_TIME:
                    process.start()
                self.pids.append(child_of(process.pid) if self.case.hosts else process.pid)
            self._delays = Delays(dict(enumerate(self.pids)))
            self._do_the_deed()
            living = [rank for rank in range(self.case.ranks) if rank != self.case.victim or self.case.deed == cases.CUT]
            self._wait(self._longest(), living)
            self._wait(0.0 if self.case.deed == cases.FREEZE and self.deed else PATIENCE_S, [self.case.victim])
            return self._gather()
        finally:
            self._end()

    def _do_the_deed(self) -> None:
        case = self.case
        if case.place:
            return
        end = time.monotonic() + self._longest()
        while not self._watch(1.0, [self._bell]):
            if self.ended[case.victim] or time.monotonic() > end:
                return
        self._wait(self.offset)
        if self.ended[case.victim]:
            return
        if self._hosts is not None and case.deed == cases.CUT:
            self._hosts.cut(1)
        else:
            self._signal(_SIGNALS.get(case.deed, signal.SIGSTOP))
        self.deed = time.monotonic()
        if case.asleep is not None:
            self._wait(case.asleep)
            self._signal(signal.SIGCONT)
            self.woken = time.monotonic()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pids[self.case.victim], number)

    def _watch(self, seconds: float, bells: Sequence[Connection] = ()) -> bool:
        """Wait for so long, or until a process ends, whose time is noted, or until one of the bells rings: whether one did."""
        running = {process.sentinel: rank for rank, process in enumerate(self.processes) if not self.ended[rank]}
        heard = wait([*running, *bells], seconds)
        for rank in (rank for sentinel, rank in running.items() if sentinel in heard):
            self.ended[rank] = time.monotonic()
        return any(bell in heard for bell in bells)

    def _wait(self, seconds: float, ranks: Sequence[int] = ()) -> None:
        """Wait for so long, or where `ranks` are given, until they have ended."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not (ranks and all(self.ended[rank] for rank in ranks)):
            self._watch(left)

    def _longest(self) -> float:
        going_on = 2 * self.case.timeout * self.case.survives
        return 2 * script.MEETING_S + self.case.timeout + going_on + PATIENCE_S

    def _read(self, rank: int) -> list[Entry]:
        return diary.read(self.folder / f"diary{rank}")

    def _gather(self) -> Evidence:
        diaries = [self._read(rank) for rank in range(self.case.ranks)]
        if self.case.place:
            self.deed = next((entry.time for entry in diaries[self.case.victim] if entry.what == "deed"), None)
        with ONE_AT_A_TIME:
            codes = [process.exitcode for process in self.processes]
        shared = self._shared_left()
        self._delays.close()
        is_frozen = self.deed is not None and self.woken is None  # who lives and waits may hold the lock for a moment, too
        locked = "locked" if is_frozen and is_locked(self.folder / "store") else ""
        self._end()
        torn = "torn" if is_torn(self.folder / "store") else ""
        return Evidence(
            self.deed,
            self.woken,
            diaries,
            codes,
            self.ended,
            [*sorted(os.listdir(self.folder / "tmp")), *shared],
            self._processes_left(diaries),
            [(self.folder / f"log{rank}").read_text(errors="replace") for rank in range(self.case.ranks)],
            self._delays,
            torn or locked,
        )

    def _shared_left(self) -> list[str]:
        """What is left in the hosts' own /dev/shm."""
        hosts = self._hosts
        return [f"/dev/shm/{name}" for pid in (hosts.pids if hosts else ()) for name in os.listdir(f"/proc/{pid}/root/dev/shm")]

    def _processes_left(self, diaries: list[list[Entry]]) -> list[str]:
        """Processes that the ranks have started and not ended, but for the child that is to hold what it inherits; they are ended now."""
        holds = self.case.child is not None and self.case.child.does == "holds"
        children = {entry.said for entries in diaries for entry in entries if entry.what == "child" and holds}
        sessions = set(self.pids)
        left = _of_sessions(sessions)
        end = time.monotonic() + 30
        while set(left) - children and time.monotonic() < end:
            time.sleep(0.1)
            left = _of_sessions(sessions)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [words for pid, words in left.items() if pid not in children]

    def _end(self) -> None:
        for process in self.processes:
            if process.pid is not None:
                process.kill()
        started = [process.sentinel for process in self.processes if process.pid is not None]
        while started:
            started = [sentinel for sentinel in started if sentinel not in wait(started)]
        self._store = None


def _of_sessions(sessions: set[int]) -> dict[int, str]:
    """The processes whose session one of these processes has opened, each with what it runs."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, _, fields = (folder / "stat").read_text().rpartition(")")
            state, _, _, session = fields.split()[:4]
            if int(session) in sessions and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")[:200] or name
    return found


def _store(case: Case, folder: Path) -> tuple[Any, str | int]:
    """The store where the harness is its host, as a launcher is, and the address by which ranks find it."""
    if case.store == "file":
        return None, f"file://{folder / 'store'}"
    if case.hosts:
        return None, store_on(0)
    if case.store == "rank 0":
        return None, f"tcp://127.0.0.1:{free_port()}"
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port
