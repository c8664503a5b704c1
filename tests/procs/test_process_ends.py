"""The end of a rank's process is reported at once, even if its children live on and keep its connections open.

The report comes within 4 s.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

import zerobubble as zb
from tests.procs.exhaustive import one_in
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_fault_injection import MOMENTS, kill, replaced, struck
from tests.refusals import states
from tests.thinned import every
from zerobubble.runtime import session
from zerobubble.runtime.failure import processes

pytestmark = pytest.mark.ranks_wait

LONG_S, SOON_S = 100.0, 50.0
"""The timeout of pipelines that must not need it, and the time within which the others must know."""
LIFE_S = 200.0
"""How long a child lives at most."""
M = 8


def live_on(folder: Path) -> None:
    """What a child does: say who it is, and stay."""
    (folder / str(os.getpid())).touch()
    time.sleep(LIFE_S)
    os._exit(0)


def fork_in_python(folder: Path) -> None:
    if os.fork() == 0:
        live_on(folder)


def fork_in_c(folder: Path) -> None:
    """As a library does of which Python hears nothing."""
    if ctypes.CDLL(None).fork() == 0:
        live_on(folder)


_loaders: list[Any] = []


def load_data(folder: Path) -> None:
    """Two workers that live as long as their iterator."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    _loaders.append(iter(DataLoader(torch.arange(1000), batch_size=1, num_workers=2, multiprocessing_context="fork")))
    next(_loaders[0])


class Killed(NamedTuple):
    """Which rank is killed in what, the child it has, and whether messages go over gloo or through rings."""

    fork: Callable[[Path], None]
    moment: str
    rank: int
    transport: str

    def __str__(self) -> str:
        return f"{self.fork.__name__}-{self.moment}-{self.rank}-{self.transport}"


def die_with_a_child(group: Any, case: Killed, folder: Path) -> tuple[float, str, int | None]:
    """The time, text and rank of the error on this rank after another one was killed."""
    with zb.Pipeline(build, "zb-h1", M, loss_fn, group=group, timeout=LONG_S, transport=case.transport) as pipe:
        pipe.step(*batch(M))
        try:
            if pipe.rank == case.rank:
                case.fork(folder)
                with struck(MOMENTS[case.moment], lambda: kill_at(folder)):
                    use(pipe)
            use(pipe)
        except zb.PipelineError as error:
            return time.time(), str(error), error.rank
    raise AssertionError("nobody was killed")


def die_between_machines(group: Any, case: Killed, folder: Path) -> tuple[float, str, int | None]:
    """As `die_with_a_child`; even and odd ranks take each other for ranks of another machine."""
    mine = processes.this_process()._replace(place=f"machine {torch.distributed.get_rank(group) % 2}")
    with replaced(session, "this_process", lambda: mine), replaced(processes, "this_process", lambda: mine):
        return die_with_a_child(group, case, folder)


def kill_at(folder: Path) -> None:
    (folder / "killed").write_text(str(time.time()))
    kill()


def use(pipe: zb.Pipeline) -> None:
    pipe.step(*batch(M))
    pipe.clip_grad_norm_(1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where children say who they are; they end with the test."""
    yield tmp_path
    for name in os.listdir(tmp_path):
        if name.isdigit():
            with suppress(ProcessLookupError):
                os.kill(int(name), signal.SIGKILL)


SHORT = [
    Killed(fork_in_python, "backward", 2, "gloo"),
    Killed(fork_in_c, "backward", 1, "gloo"),
    Killed(fork_in_c, "forward", 2, "auto"),
    Killed(fork_in_c, "clip", 3, "gloo"),
    Killed(load_data, "backward", 1, "auto"),
]
LONG = one_in(
    5,
    [
        Killed(fork, moment, rank, transport)
        for fork in (fork_in_python, fork_in_c, load_data)
        for moment in ("forward", "backward", "weight", "clip")
        for rank in range(4)
        for transport in ("gloo", "auto")
    ],
)
"""One case in five, unless ZEROBUBBLE_EXHAUSTIVE=1."""


def judge(case: Killed, folder: Path, job: Any = die_with_a_child, *, hosted: bool = False) -> None:
    world = Ranks(4, hosted=hosted)
    try:
        world.start(job, case, folder, ranks=4)
        outcomes = [world.outcome(rank) for rank in range(4) if rank != case.rank]
        world.processes[case.rank].join(SOON_S)
        assert world.processes[case.rank].exitcode == -signal.SIGKILL
        killed = float((folder / "killed").read_text())
        seen = [result for state, result in outcomes if state == "ok"]
        assert len(seen) == 3, outcomes
        for when, text, rank in seen:
            assert when - killed < SOON_S, (when - killed, text)
            assert rank == case.rank, text
            states(text, f"rank {rank}", "process", "ended")
        assert len({text for _, text, _ in seen}) == 1, seen
    finally:
        world.kill()


@pytest.mark.sweep
@pytest.mark.parametrize("case", [*every(2, SHORT), *(pytest.param(case, marks=pytest.mark.long) for case in LONG)], ids=str)
def test_a_killed_rank_is_reported_of_while_its_child_lives(case: Killed, folder: Path) -> None:
    judge(case, folder)


@pytest.mark.long
def test_a_rank_that_cannot_see_the_process_hears_of_its_end_from_one_that_can(folder: Path) -> None:
    judge(Killed(fork_in_c, "backward", 2, "gloo"), folder, die_between_machines)


@pytest.mark.long
def test_the_store_may_be_held_open_too(folder: Path) -> None:
    judge(Killed(fork_in_c, "backward", 0, "gloo"), folder, hosted=True)
