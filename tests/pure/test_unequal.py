"""Microbatches of unequal cost: shares of the costs, read by everything that reads costs, or refused.

No order of the microbatches beats a bound.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.problems import problems
from tests.pure.test_cli import refused, run
from tests.refusals import Stated, raises, states
from zerobubble import Costs, InputError, Kind, Limits, Placement, Schedule, diff, make, simulate
from zerobubble.bounds import lower_bounds, shortage
from zerobubble.explain import attribute
from zerobubble.export.document import dumps, loads
from zerobubble.fit import fit_costs
from zerobubble.formulas import setting
from zerobubble.lowering import plan_gathers
from zerobubble.planning import Problem, solve
from zerobubble.simulation import metrics, peak_memory

EQUAL = Costs.uniform(3, (20, 30, 10), 0.5, held=0.5)
SHARES = (1, 4, 2.5, 1)
UNEQUAL = replace(EQUAL, shares=SHARES)


def test_a_share_is_a_factor_on_times_and_bytes_and_on_nothing_else() -> None:
    assert [UNEQUAL.time(Kind.F, 0, j) for j in range(4)] == [20_000_000, 80_000_000, 50_000_000, 20_000_000]
    assert UNEQUAL.time(Kind.BW, 2, 2) == 100_000_000
    assert [UNEQUAL.memory_change(Kind.B, 1, microbatch=j) for j in range(2)] == [-500_000, -2_000_000]
    assert UNEQUAL.message_time(Kind.F, 0) == EQUAL.message_time(Kind.F, 0)
    assert UNEQUAL.scaled(2.5).time(Kind.F, 0) == UNEQUAL.time(Kind.F, 0, 2)
    assert UNEQUAL.scaled(2.5).comm == EQUAL.comm


def test_the_work_of_a_rank_is_the_sum_of_the_shares() -> None:
    schedule = make("zb-h1", 3, 4)
    timeline = simulate(schedule, UNEQUAL)
    assert [figures.work for figures in timeline.ranks] == [8.5 * 60_000_000] * 3
    assert peak_memory(make("1f1b", 3, 4), UNEQUAL)[2] == 4_000_000
    assert metrics(schedule, UNEQUAL) == (timeline.span, timeline.makespan)


@given(problems())
def test_equal_shares_are_no_shares(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem[0], replace(problem[1], shares=())
    ones = replace(costs, shares=(1,) * schedule.num_microbatches)
    assert simulate(schedule, ones) == simulate(schedule, costs)
    assert attribute(schedule, ones) == attribute(schedule, costs)
    tripled = replace(ones, shares=(3,) * schedule.num_microbatches)
    assert simulate(schedule, tripled) == simulate(schedule, costs.scaled(3))


@given(problems(), st.randoms(use_true_random=False))
def test_numbers_of_microbatches_are_names(problem: tuple[Schedule, Costs], dice: Any) -> None:
    """The schedule with its microbatches numbered in another order takes as long with their shares in that order."""
    schedule, costs = problem
    number = list(range(schedule.num_microbatches))
    dice.shuffle(number)
    if not costs.shares or schedule.microbatch_routes or schedule.overlaps:
        return
    rows = tuple(tuple(op._replace(microbatch=number[op.microbatch]) for op in row) for row in schedule.rows)
    shares = tuple(costs.shares[number.index(j)] for j in range(len(number)))
    renamed = replace(schedule, rows=rows), replace(costs, shares=shares)
    assert metrics(*renamed) == metrics(schedule, costs)
    assert peak_memory(*renamed) == peak_memory(schedule, costs)


def test_a_measured_run_is_fitted_and_differs_in_nothing_from_its_plan() -> None:
    schedule = make("zb-h1", 3, 4)
    run = replace(simulate(schedule, UNEQUAL), source="measured")
    held = [list(accumulate(UNEQUAL.memory_change(*span.op[:2], microbatch=span.op.microbatch) for span in row)) for row in run.rows]
    run = replace(
        run, memory=tuple(tuple((span.end, size) for span, size in zip(*both, strict=True)) for both in zip(run.rows, held, strict=True))
    )
    assert fit_costs(run, 0.5, SHARES) == UNEQUAL
    assert fit_costs(run, 0.5, (2, 8, 5, 2)).forward == (10_000_000,) * 3
    assert diff(schedule, UNEQUAL, run).extra == 0
    slower = replace(simulate(schedule, replace(UNEQUAL, forward=(40_000_000,) * 3)), source="measured")
    found = diff(schedule, UNEQUAL, slower)
    assert [(drift.planned, drift.measured) for drift in found.drifts if drift.passes[0][0] is Kind.F] == [(20_000_000, 40_000_000)] * 3
    assert all(account.noise.total == account.comm == account.host == 0 for account in found.accounts)


def test_the_largest_microbatch_must_fit() -> None:
    limits = Limits((4_000_000,) * 3)
    assert not shortage(Placement.linear(3), UNEQUAL, limits)
    states(shortage(Placement.linear(3), UNEQUAL, Limits((3_999_999,) * 3)), 4000000, "rank", "bytes")
    bound = lower_bounds(Placement.linear(3), 4, UNEQUAL, limits).makespan
    assert "1 microbatch of share 4 or more" in bound.reason or "of work" in bound.reason
    assert bound.time >= 8.5 * 60_000_000


def test_activations_of_unequal_size_leave_unequal_room_for_weights() -> None:
    schedule = make("1f1b", 3, 4)
    peak = max(peak_memory(schedule, UNEQUAL))
    plan_gathers(schedule, [1000] * 3, peak + 1000, UNEQUAL)
    with raises(InputError, "gathered", "weights", 1000):
        plan_gathers(schedule, [1000] * 3, peak + 999, UNEQUAL)


def test_shares_survive_their_file() -> None:
    assert UNEQUAL.to_dict()["shares"] == list(SHARES)
    assert loads(dumps(UNEQUAL)) == UNEQUAL
    states(repr(UNEQUAL), 4, 1, "microbatches", "shares")


@pytest.mark.parametrize(
    ("shares", "stated"),
    [
        ((1, 0), ("microbatch 1", "share", "costs", 0)),
        ((1, float("nan")), ("microbatch 1", "share", "costs", "nan")),
        (("2",), ("microbatch 0", "share", "costs", "2")),
        (3, ("shares", "costs", 3)),
    ],
)
def test_wrong_shares_are_named(shares: Any, stated: Stated) -> None:
    with raises(InputError, *stated):
        replace(EQUAL, shares=shares)


def test_shares_of_another_number_of_microbatches_are_refused() -> None:
    with raises(InputError, "1f1b", 5, 4):
        simulate(make("1f1b", 3, 5), UNEQUAL)
    with raises(InputError, "bound", 5, "shares", 4):
        lower_bounds(Placement.linear(3), 5, UNEQUAL, None)
    with raises(InputError, 4, 2, "microbatches", "shares"):
        fit_costs(simulate(make("1f1b", 3, 4), UNEQUAL), 0, (1, 2))
    with raises(InputError, "share", 5000, "pass"):
        replace(EQUAL.with_columns(forward=(10**15,) * 3), shares=(5000,))


def test_what_does_not_know_shares_refuses_them() -> None:
    schedule = make("1f1b", 3, 4)
    problem = Problem(schedule.placement, 4, UNEQUAL, Limits((10**9,) * 3))
    with raises(InputError, "microbatches", "equal"):
        solve(problem, seconds=0)
    with raises(InputError, "closed", "microbatches"):
        setting(schedule, UNEQUAL)
    with raises(InputError, "shares", "microbatch"):
        UNEQUAL.time(Kind.F, 0)


TIMED = ("--ranks", "3", "--microbatches", "4", "--times", "20,30,10", "--comm", "0.5")


def test_the_command_line_takes_microbatch_costs(tmp_path: Path) -> None:
    shown = json.loads(run("show", "zb-h1", *TIMED, "--microbatch-costs", "1,4,2.5,1", "--json").stdout)
    timeline = simulate(make("zb-h1", 3, 4), UNEQUAL)
    assert (shown["makespan_ms"], shown["costs"].endswith("microbatch costs 1 to 4")) == (timeline.makespan / 1e6, True)
    compared = json.loads(run("compare", "1f1b", "zb-h1", *TIMED, "--microbatch-costs", "1,4,2.5,1", "--json").stdout)
    assert compared[1]["makespan_ms"] == timeline.makespan / 1e6
    measured = tmp_path / "run.json"
    measured.write_text(dumps(replace(timeline, source="measured")))
    data = json.loads(run("diff", "zb-h1", str(measured), *TIMED, "--microbatch-costs", "1,4,2.5,1", "--json").stdout)
    assert data["planned"] == data["measured"]


def test_the_command_line_refuses_wrong_microbatch_costs() -> None:
    states(refused("show", "1f1b", *TIMED, "--microbatch-costs", "1,2"), 4, 2, "microbatches", "costs")
    states(refused("show", "1f1b", *TIMED, "--microbatch-costs", "1,0,1,1"), 0, "factor")
    states(refused("compare", "1f1b", *TIMED, "--microbatch-costs", "1,x,1,1"), "1,x,1,1", "numbers")
