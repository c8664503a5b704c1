"""Signals and errors at random times against ranks that train: nobody hangs, all name the culprit, no number is wrong, nothing is left.

A case follows from its seed; play one alone with `python -m tests.procs.random_signals SEED`.
"""

from __future__ import annotations

import pytest

from tests.procs.random_signals import case as cases
from tests.procs.random_signals.campaign import play_all, summary
from tests.procs.random_signals.judge import Row

AT_ONCE = 8


def tell(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{row}", flush=True)


def test_a_few_random_signals(capsys: pytest.CaptureFixture[str]) -> None:
    rows = play_all([cases.anywhere(seed) for seed in range(10)], AT_ONCE, lambda row: None)
    wrong = [row for row in rows if row.faults]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_random_signals_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    rows = play_all([cases.anywhere(seed) for seed in range(400)], AT_ONCE, lambda row: row.faults and tell(row, capsys))
    told = summary(rows)
    with capsys.disabled():
        print(f"\n{told}")
    assert not any(fault for row in rows for fault in row.faults if "hangs" in fault or "unequal" in fault or "has the loss" in fault), told
    assert sum(not row.faults for row in rows) >= 0.99 * len(rows), told


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kills_and_freezes_in_construction(capsys: pytest.CaptureFixture[str]) -> None:
    rows = play_all([cases.in_construction(seed) for seed in range(200)], AT_ONCE, lambda row: row.faults and tell(row, capsys))
    told = summary(rows)
    with capsys.disabled():
        print(f"\n{told}")
    assert not any(row.faults for row in rows), told
