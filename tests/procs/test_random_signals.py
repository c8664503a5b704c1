"""Signals and errors at random times against ranks that train: nobody hangs, all name the culprit, no number is wrong, nothing is left.

A case follows from its seed; play one alone with `python -m tests.procs.random_signals SEED`, and more than CI has time for with
`--count 400`, with `--construction` those that strike while pipelines are made, with `--mesh` kills, freezes and cut cables in a mesh of
two replicas over two hosts, with `--survive` in one that is to go on without who is gone (played by hand alone: on a machine that is
busier than its ranks can bear, more of these cases than of the others are told late).

Covers a mesh over several hosts with cut cables. Surviving ranks have the losses of one device.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.procs.exhaustive import EXHAUSTIVE, SEED
from tests.procs.hosts.hosts import why_not
from tests.procs.random_signals import case as cases
from tests.procs.random_signals.campaign import play_all, summary
from tests.procs.random_signals.case import Case
from tests.procs.random_signals.judge import Row
from tests.procs.random_signals.outside import Delays, is_locked, is_torn

pytestmark = pytest.mark.ranks_wait

AT_ONCE = 4


def tell(what: object, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{what}", flush=True)


def judge_campaign(rows: list[Row], message: str) -> None:
    """All are right in everything. What the machine's load made wrong was played again (`campaign`)."""
    assert not any(row.faults for row in rows), message


def test_a_few_random_signals() -> None:
    rows = play_all([cases.anywhere(seed) for seed in range(4)], 4, lambda row: None)
    judge_campaign(rows, "\n".join(str(row) for row in rows if row.faults))


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
        [draw(seed) for seed in range(first, first + count)], AT_ONCE, lambda row: (row.faults or row.outside) and tell(row, capsys)
    )
    found = summary(rows)
    tell(found, capsys)
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
