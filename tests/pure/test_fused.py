"""The price of splitting: a BW that takes less than its B and W, in costs, simulation, bounds and files.

Simulation gives the table of exposed exchanges of arXiv 2510.27257 to the digit.
"""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

import zerobubble as zb
from benchmarks.axes.judge import judged, least_time
from tests.thinned import every_of
from zerobubble import Costs, Kind, Limits, Placement
from zerobubble.bounds import lower_bounds
from zerobubble.planning import Problem, Workload, plan
from zerobubble.planning.pareto import pareto
from zerobubble.planning.problem.recomputation import Recomputation
from zerobubble.planning.table import SPLIT
from zerobubble.units import NS_PER_MS


@pytest.mark.parametrize(("times", "exchange"), [((8, 8, 6), 2), ((10, 10, 10), 3), ((9, 9, 6), 3)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 16), (8, 16)])
def test_table_of_stp(times: tuple[int, int, int], exchange: int, ranks: int, microbatches: int) -> None:
    # arXiv 2510.27257: times of a stage without its all-reduce, which F and B wait for and a BW hides behind W.
    forward, backward, weight = times
    costs = Costs.uniform(2 * ranks, (forward + exchange, backward + exchange, weight)).with_columns(
        fused=[(backward + weight) * NS_PER_MS] * 2 * ranks
    )
    work = 2 * microbatches * sum(times)
    bubble = {
        "interleaved-1f1b": (ranks - 1) * (forward + exchange + backward + weight) + 2 * microbatches * exchange,
        "zb-v": (ranks - 1) * (forward + 2 * exchange + backward - 2 * weight) + 4 * microbatches * exchange,
    }
    for name, idle in bubble.items():
        assert zb.simulate(zb.make(name, ranks, microbatches), costs).span == (work + idle) * NS_PER_MS


def test_pass_in_one_piece_never_takes_longer_than_apart() -> None:
    costs = Costs.from_ms([3, 3], [3, 3], [2, 2], fused=[4, 9])
    assert [costs.time(Kind.BW, stage) // NS_PER_MS for stage in range(2)] == [4, 5]
    assert costs.fused == (4 * NS_PER_MS, 9 * NS_PER_MS)
    assert costs.time(Kind.B, 0) == 3 * NS_PER_MS
    assert Costs.uniform(2).fused == ()
    assert costs.with_columns(fused=()) == Costs.from_ms([3, 3], [3, 3], [2, 2])


def test_shares_scale_it() -> None:
    costs = replace(Costs.from_ms([3], [3], [2], fused=[4]), shares=(1, 2))
    assert costs.times(Kind.BW, 0) == [costs.time(Kind.BW, 0, j) for j in range(2)] == [4 * NS_PER_MS, 8 * NS_PER_MS]


def test_files_keep_it() -> None:
    costs = Costs.from_ms([3, 3], [3, 3], [2, 2], fused=[4, 4])
    assert Costs.from_dict(costs.to_dict()) == costs
    work = Workload.uniform(2, (3, 3, 2), fused=4)
    assert Workload.from_dict(work.to_dict()) == work
    assert "fused" not in Workload.uniform(2, (3, 3, 2)).to_dict()
    assert work.costs(Placement.vee(2)).fused == (2 * NS_PER_MS,) * 4


def test_bounds_hold_for_it() -> None:
    placement, costs = Placement.linear(3), Costs.uniform(3, (10, 10, 8), fused=14)
    bounds = lower_bounds(placement, 6, costs, None)
    assert bounds.span.time == (20 + 6 * 24) * NS_PER_MS
    assert "BW" in bounds.span.reason
    assert zb.simulate(zb.make("1f1b", 3, 6), costs).span >= bounds.span.time


def test_as_long_as_apart_changes_no_bound() -> None:
    costs = Costs.uniform(4, (10, 10, 8))
    plain, same = (lower_bounds(Placement.linear(4), 8, each, None) for each in (costs, costs.with_columns(fused=[18 * NS_PER_MS] * 4)))
    assert plain == same


def test_least_work_of_a_problem_is_what_bubbles_are_shares_of() -> None:
    problem = Problem(Placement.linear(2), 2, Costs.uniform(2, (10, 10, 8), fused=14), zb.Limits((10**9,) * 2))
    assert problem.work == 2 * 2 * 24 * NS_PER_MS


def test_fit_finds_it_where_a_stage_ran_both() -> None:
    costs = Costs.uniform(2, (10, 10, 8), fused=14)
    rows = [[zb.Op(Kind.F, 0, j) for j in range(2)], [zb.Op(Kind.F, 1, 0), zb.Op(Kind.B, 1, 0), zb.Op(Kind.F, 1, 1), zb.Op(Kind.BW, 1, 1)]]
    rows[0] += [zb.Op(Kind.BW, 0, 0), zb.Op(Kind.B, 0, 1), zb.Op(Kind.W, 0, 1)]
    rows[1] += [zb.Op(Kind.W, 1, 0)]
    schedule = zb.Schedule("mixed", Placement.linear(2), 2, tuple(map(tuple, rows)))
    found = zb.fit.fit_costs(zb.simulate(schedule, costs))
    assert (found.fused, found.backward, found.weight) == (costs.fused, costs.backward, costs.weight)
    assert zb.fit.fit_costs(zb.simulate(schedule, replace(costs, further=()))).fused == ()


SHARES: dict[str, Any] = {"shares": (1, 2.5, 1, 0.5)}


WITH_THE_PRICE = [{"recompute": "auto"}, {"recompute": "full"}, SHARES, {"recompute": "auto"} | SHARES]


@pytest.mark.parametrize(("seed", "axes"), every_of(12, range(3), WITH_THE_PRICE), ids=str)
def test_recomputation_and_shares_pay_the_price_of_splitting(seed: int, axes: dict[str, Any]) -> None:
    """Never worse than the better of the plans with every backward apart and in one piece, played with the price."""
    dice, placement = random.Random(seed), (Placement.linear(3), Placement.vee(2), Placement.linear(2))[seed]
    costs = Costs.from_ms(*([dice.randint(low, low + 4) for _ in range(placement.num_stages)] for low in (8, 8, 6)), 0.4)
    costs = costs.with_columns(fused=[round(dice.uniform(0.75, 0.99) * (b + w)) for b, w in zip(costs.backward, costs.weight, strict=True)])
    given = {"placements": placement, "evaluations": 300, "objective": "makespan", **axes}
    limits = Limits((round(2.6 * max(axes.get("shares", (1,))) * placement.stages_per_rank * 10**6),) * placement.num_ranks)
    found = zb.plan(costs, 4, limits, **given)
    reported = judged(found)
    assert (reported.makespan, reported.peaks) == (found.makespan, found.peaks)
    assert all(map(int.__le__, reported.peaks, limits.memory))
    assert found.time is not None
    assert found.bound.time <= found.time
    whole = tuple(map(min, costs.fused, map(sum, zip(costs.backward, costs.weight, strict=True))))
    nothing = (0,) * costs.num_stages
    apart = zb.plan(costs.with_columns(fused=()), 4, limits, **given | {"evaluations": 100})
    in_one = zb.plan(
        costs.with_columns(fused=(), backward=whole, weight=nothing, held_after_b=nothing), 4, limits, **given | {"evaluations": 100}
    )
    assert apart.time is not None
    assert in_one.time is not None
    assert found.time <= min(apart.time, in_one.time + 4 * costs.num_stages)  # each pass of a share is rounded
    read = zb.planning.Plan.from_dict(json.loads(json.dumps(found.to_dict())))
    assert (read.problem, read.schedule, read.time) == (found.problem, found.schedule, found.time)


@pytest.mark.parametrize("seed", range(4))
def test_no_order_beats_the_bound_with_recomputation_and_the_price_of_splitting(seed: int) -> None:
    dice = random.Random(seed)
    costs = Costs(*(tuple(dice.randint(1, 9) for _ in range(2)) for _ in range(3)), (dice.randint(0, 3),), (4, 6), (2, 3))
    both = [b + w for b, w in zip(costs.backward, costs.weight, strict=True)]
    costs = costs.with_columns(fused=[dice.randint(max(1, most - 4), most) for most in both]).with_recompute(zb.costs.FULL)
    again = Recomputation((zb.costs.NONE, zb.costs.FULL), (zb.costs.FULL, zb.costs.FULL))
    chains = (("F", "B", "W"), ("F", "BW"), ("F", "R", "B", "W"), ("F", "R", "BW"))
    schedule = zb.schedules.with_recompute(zb.make("1f1b", 2, 1))
    for objective in zb.planning.Objective:
        problem = zb.planning.Problem(Placement.linear(2), 1, costs, Limits((99, 99)), objective, recomputation=again)
        given = zb.planning.Plan.from_schedule(problem, problem.bound(), schedule, 0.0, "given")
        assert given.bound.time <= least_time(given, chains)


def test_the_table_says_how_split_backward_passes_count() -> None:
    """The bubble of a plan counts the work of fused passes, so `show` has a smaller one for a plan that splits some."""
    work = Workload.uniform(2, (10, 10, 8), fused=15)
    found, plain = (plan(each, 4, 2, placements="linear", evaluations=0) for each in (work, replace(work, fused=())))
    assert SPLIT.strip() in " ".join(str(found).split())
    assert SPLIT.strip() not in " ".join(str(plain).split())
    assert SPLIT.strip() in " ".join(str(pareto(work, 4, [2], placements="linear", evaluations=0)).split())
