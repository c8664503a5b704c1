"""docs/bubbles.md prints what it shows, names every cause, and has the shares that the simulator gives."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout

import zerobubble as zb
from tests.nearest import ROOT

PAGE = (ROOT / "docs/bubbles.md").read_text(encoding="utf-8")


def test_the_program_prints_what_is_shown() -> None:
    ((program, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    with redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    assert printed.getvalue() == shown


def test_every_cause_is_defined() -> None:
    assert set(re.findall(r"^\| ([a-z]+) \|", PAGE, re.MULTILINE)) - {"cause", "schedule"} == set(zb.explain.Causes._fields)


def test_a_slow_stage_is_reported_as_imbalance() -> None:
    """More than half of the idle time, and as much as the others have less to do; for any number of microbatches, none if all are equal."""
    slow = (10, 10, 20, 10)
    for microbatches in (8, 16, 64):
        for name in ("1f1b", "zb-h1", "gpipe"):
            schedule = zb.make(name, 4, microbatches)
            ranks = zb.explain.attribute(schedule, zb.Costs.from_ms(slow, slow, slow)).ranks
            less = 30_000_000 * microbatches
            assert [rank.imbalance for rank in ranks] == [less, less, 0, less]
            assert sum(rank.imbalance for rank in ranks) > sum(map(sum, ranks)) / 2
            assert not zb.explain.attribute(schedule, zb.Costs.uniform(4)).overall.imbalance


def test_the_shares_are_those_of_the_simulator() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.*%) \|$", PAGE, re.MULTILINE)
    (counts,) = re.findall(r"^\| schedule, microbatches \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for name, shares in rows:
        assert [share(name, int(count)) for count in counts.split(" | ")] == shares.split(" | ")


def share(name: str, microbatches: int) -> str:
    schedule = zb.make(name, 4, microbatches)
    costs = zb.Costs.uniform(schedule.num_stages, times=(10, 10, 10), stages_per_rank=schedule.num_stages // 4)
    idle = sum(map(sum, zb.explain.attribute(schedule, costs).ranks))
    return f"{idle / 4 / zb.simulate(schedule, costs).makespan:.1%}"
