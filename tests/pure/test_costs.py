"""Costs: exact inside, milliseconds outside, and every wrong value named.

Times and bytes are integers inside; milliseconds appear at entry points only.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

from tests.refusals import Stated, raises
from zerobubble import Costs, InputError, Kind, Limits, Workload
from zerobubble.costs import Level
from zerobubble.kinds import KINDS, ValueKind


def test_uniform_costs_share_a_rank_among_its_stages() -> None:
    costs = Costs.uniform(4, (1.5, 2.0, 0.5), 0.25, stages_per_rank=2, held=0.5).with_recompute(Level("half", extra=0.4, kept=0.25))
    costs = costs.with_divided_head((0.1, 0.2, 0.4), held=1000)
    times = [750_000, 1_000_000, 250_000, 1_250_000, 300_000, 300_000, 400_000, 100_000, 600_000]
    assert [costs.time(kind, 3) for kind in KINDS] == times
    assert costs.comm == (250_000,) * 3
    held = [costs.held(kind, 0) for kind in (ValueKind.SAVED, ValueKind.WEIGHT_WORK, ValueKind.GRADIENT)]
    assert held == [1_000_000, 500_000, 0]
    assert [costs.memory_change(kind, 0) for kind in KINDS] == [
        1_000_000,
        -500_000,
        -500_000,
        -1_000_000,
        750_000,
        1000,
        -1000,
        1000,
        -1000,
    ]
    assert costs.memory_change(Kind.F, 0, recomputed_by=Kind.R) == 250_000


def test_costs_in_ms_stage_by_stage() -> None:
    costs = Costs.from_ms([1, 2], [3, 4], [0.5, 0], comm=[0.125], held_after_f=[7, 8], held_after_b=[0, 1])
    assert costs == Costs((10**6, 2 * 10**6), (3 * 10**6, 4 * 10**6), (500_000, 0), (125_000,), (7, 8), (0, 1))
    assert Costs.from_ms([1, 2, 3], [1, 1, 1], [1, 1, 1], comm=1).comm == (10**6, 10**6)


@pytest.mark.parametrize(
    ("build", "stated"),
    [
        (lambda: Costs.uniform(2, (1, float("nan"), 1)), ("B", "cost", "nan")),
        (lambda: Costs.uniform(2, comm=-1), ("cost", "comm", -1)),
        (lambda: Costs.uniform(0), ("num_stages", 0, 1)),
        (lambda: Costs.from_ms([], [], []), ("costs", "stage", "least")),
        (lambda: Costs.from_ms([1, 2], [1], [1, 1]), ("2 stages", "backward", 1)),
        (lambda: Costs.from_ms([1, float("inf")], [1, 1], [1, 1]), ("stage 1", "forward", "inf")),
        (lambda: Costs.from_ms([1, 2], [1, 1], [1, 1], comm=[1, 2]), ("2 stages", 1, "comm", 2)),
        (lambda: Costs.from_ms([1], [1], [1], held_after_f=[]), ("1 stages", "held_after_f", 0)),
        (lambda: Costs((1,), (-1,), (1,), (), (1,), (1,)), ("stage 0", "backward", -1)),
        (lambda: Costs((1.5,), (1,), (1,), (), (1,), (1,)), ("stage 0", "forward", "1.5")),
        (lambda: Limits((5, 0)), ("rank 1", "memory", "limit", 0)),
    ],
)
def test_wrong_costs_are_named(build: Any, stated: Stated) -> None:
    with raises(InputError, *stated):
        build()


WRONG = (float("nan"), float("inf"), -1, 10**400, "many", [1])


@pytest.mark.parametrize("name", [column.name for column in fields(Costs)])
def test_every_wrong_value_of_costs_is_named(name: str) -> None:
    costs = Costs.uniform(3)
    for value in WRONG:
        length = 2 if name == "comm" else 3
        for given in (value, (value,) * length):
            if given == [1]:
                continue  # a column of one stage, or a share of one microbatch
            with raises(InputError, foreign=name.removesuffix("s")):
                replace(costs, **{name: given})


def test_all_wrong_values_are_named_at_once() -> None:
    with raises(InputError, "forward", "nan", "weight", -1, "stage 0", "stage 1"):
        Costs((float("nan"), 1), (1, 1), (1, -1), (1,), (1, 1), (1, 1))
    with raises(InputError, "rank 0", "nan", "rank 2", -1):
        Limits((float("nan"), 1, -1))
    with raises(InputError, "forward", "nan", "weight", -1, "rank 0", "rank 1"):
        Workload((float("nan"), 1), (1, 1), (1, -1), (1, 1), (1, 1), (1, 1))
    with raises(InputError, "slice 0", "nan", "slice 1", -1):
        Costs.uniform(3).sliced((float("nan"), -1))


@pytest.mark.parametrize("count", [0, -1, 10**9, 10**400, 1.5, float("nan"), "4"])
def test_wrong_numbers_of_stages_are_named(count: Any) -> None:
    for build, name in ((Costs.uniform, "num_stages"), (partial(Workload.uniform, times=(1, 1, 1)), "num_ranks")):
        with raises(InputError, name):
            build(count)
    with raises(InputError, foreign="slice"):
        Costs.uniform(2).sliced(count)
