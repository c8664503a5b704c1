"""Signals and errors at random times during training: no rank hangs, all name the culprit, no value is wrong, nothing leaks.

A seed determines a case. `python -m tests.procs.random_signals SEED` plays one, and `--count 400` plays more than CI has time for.
`--construction` strikes while pipelines are made. `--mesh` adds kills, freezes and cut cables in a mesh of two replicas over two hosts.
`--survive` does so in a mesh that continues without lost ranks. It is only played by hand: on a busy machine, its cases are more likely
to get late reports.

Covers a mesh over several hosts with cut cables. Surviving ranks have the losses of one device.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.procs.exhaustive import EXHAUSTIVE, SEED
from tests.procs.hosts.hosts import why_not
from tests.procs.random_signals import case as cases
from tests.procs.random_signals.campaign import play_all, summary
from tests.procs.random_signals.case import Case
from tests.procs.random_signals.diary import Entry
from tests.procs.random_signals.judge import REPORTED_S, WORK_S, Load, Row, judged
from tests.procs.random_signals.outside import Delays, is_locked, is_torn
from tests.procs.random_signals.world import Evidence

pytestmark = pytest.mark.ranks_wait

AT_ONCE = 4


def show(what: object, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{what}", flush=True)


def judge_campaign(rows: list[Row], message: str) -> None:
    """All are right in everything. What the machine's load made wrong was played again (`campaign`)."""
    assert not any(row.faults for row in rows), message


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("draw", "count"),
    [
        (cases.anywhere, 75 if EXHAUSTIVE else 24),
        (cases.in_construction, 60 if EXHAUSTIVE else 16),
        pytest.param(cases.on_a_mesh, 40 if EXHAUSTIVE else 12, marks=pytest.mark.skipif(bool(why_not()), reason=why_not())),
    ],
)
def test_many_random_signals(draw: Callable[[int], Case], count: int, capsys: pytest.CaptureFixture[str]) -> None:
    first = 1000 * int(os.environ.get(SEED, 0))
    rows = play_all(
        [draw(seed) for seed in range(first, first + count)], AT_ONCE, lambda row: (row.faults or row.outside) and show(row, capsys)
    )
    found = summary(rows)
    show(found, capsys)
    judge_campaign(rows, "\n".join([found, *(str(row) for row in rows if row.faults)]))


def test_a_store_that_ends_within_an_entry_or_is_locked_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "store"
    store = dist.FileStore(str(file), 2)
    store.set("a", "hello")
    store.add("n", 3)
    assert not is_torn(file)
    assert not is_locked(file)
    whole = file.read_bytes()
    ends = [end for end in range(len(whole)) if not is_torn(copied(whole[:end], tmp_path))]
    assert len(ends) == 3, "between entries alone: those of the store itself, of a, and of n"
    with file.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        assert is_locked(file)


def copied(data: bytes, folder: Path) -> Path:
    (folder / "copy").write_bytes(data)
    return folder / "copy"


def test_threads_that_wait_for_a_processor_are_seen() -> None:
    delays = Delays({7: os.getpid()})
    began = time.monotonic()
    while not delays.between(began, time.monotonic())[7] and time.monotonic() < began + 60:
        threads = [threading.Thread(target=lambda: sum(range(1_000_000))) for _ in range(4 * (os.cpu_count() or 1))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    delays.close()
    assert 0 < delays.between(began, time.monotonic())[7] <= time.monotonic() - began
    assert delays.between(began - 2, began - 1) == {7: 0.0}


class Waits(NamedTuple):
    """In the place of `Delays`: how long each rank waited for a processor, whenever that is asked."""

    seconds: dict[int, float]

    def between(self, begin: float, end: float) -> dict[int, float]:
        return self.seconds


def rows_of_a_kill(report_after: float, named: int, waited: float, store: str = "", text: str = "") -> Row:
    """The row of a case in which rank 2 is killed, and two others get the report so many seconds later that it was rank `named`."""
    calls = (cases.START, cases.MEET, cases.MAKE, cases.STEP, cases.CLOSE, cases.END)
    case = Case(0, 3, "1f1b", 6, "gloo", "file", 8.0, False, calls, (0.0,) * 3, victim=2, deed=cases.KILL, call=3)
    report = Entry(100 + report_after, "reported", 3, ["PipelineError", text or f"rank {named} is gone", named])
    diaries = [[Entry(99.0, "begin", 3, None), report], [Entry(99.0, "begin", 3, None), report], [Entry(99.0, "begin", 3, None)]]
    waits: Any = Waits({0: 0.0, 1: waited, 2: 0.0})
    ended = [101 + report_after, 101 + report_after, 100.1]
    load = Load()
    load.close()
    return judged(case, Evidence(100.0, None, diaries, [1, 1, -9], ended, [], [], [], waits, store), load)


def test_a_fault_is_outside_only_where_the_evidence_says_so() -> None:
    late = 8.0 + REPORTED_S + WORK_S + 1.5
    right, slow, kept, blamed, starved = (
        rows_of_a_kill(*asked) for asked in ((1.0, 2, 0.0), (late, 2, 1.0), (late, 2, 2.0), (1.0, 1, 3.9), (1.0, 1, 4.1))
    )
    assert (right.faults, right.outside) == ((), ())
    assert (len(slow.faults), len(slow.outside)) == (2, 0)
    assert (len(kept.faults), len(kept.outside)) == (0, 2)
    assert (len(blamed.faults), len(blamed.outside)) == (2, 0)
    assert (len(starved.faults), len(starved.outside)) == (0, 2)
    silent = "the torch.distributed store does not answer"
    counts = [len(rows_of_a_kill(1.0, 0, 0.0, store, silent).faults) for store in ("", "torn")]
    assert counts == [2, 0]
