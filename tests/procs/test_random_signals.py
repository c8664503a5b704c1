"""Signals and errors at random times against ranks that train: nobody hangs, all name the culprit, no number is wrong, nothing is left.

A case follows from its seed; play one alone with `python -m tests.procs.random_signals SEED`, and more than CI has time for with
`--count 400`, with `--construction` those that strike while pipelines are made, with `--mesh` kills, freezes and cut cables in a mesh of
two replicas over two hosts, with `--survive` in one that is to go on without who is gone (played by hand alone: on a machine that is
busier than its ranks can bear, more of these cases than of the others are told late).

Covers a mesh over several hosts with cut cables. Surviving ranks have the losses of one device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.procs.exhaustive import EXHAUSTIVE
from tests.procs.hosts.hosts import why_not
from tests.procs.random_signals import case as cases
from tests.procs.random_signals.campaign import play_all, summary
from tests.procs.random_signals.case import Case
from tests.procs.random_signals.judge import Row

pytestmark = pytest.mark.ranks_wait

AT_ONCE = 4
MOST_WRONG = 0.04
"""The share of cases that may be judged wrong: their moments fall anew in every run, and another load makes another of them late."""
MOST_WRONG_ON_HOSTS = 0.1
"""Likewise between hosts, whose packets a program carries that needs the processors, too."""


def tell(what: object, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{what}", flush=True)


def judge_campaign(rows: list[Row], message: str, most_wrong: float = MOST_WRONG) -> None:
    """No number is wrong in any case, and nearly all are right in everything."""
    assert not any("has the loss" in fault for row in rows for fault in row.faults), message
    assert sum(bool(row.faults) for row in rows) <= max(1, most_wrong * len(rows)), message


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
    rows = play_all([draw(seed) for seed in range(count)], AT_ONCE, lambda row: row.faults and tell(row, capsys))
    found = summary(rows)
    tell(found, capsys)
    judge_campaign(rows, found, MOST_WRONG if draw in (cases.anywhere, cases.in_construction) else MOST_WRONG_ON_HOSTS)
