"""Bounds and plans where overlapped passes hide time: no schedule with pairs beats a bound, and nothing slower than pairs is optimal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import zerobubble as zb
from tests.pure.problems import fill
from tests.refusals import raises
from tests.thinned import every_and_all
from zerobubble import Costs, InputError, Kind, Limits, Op, Placement, Schedule
from zerobubble.bounds import Bounds, bounds_with_divided_head, bounds_with_recompute, lower_bounds
from zerobubble.costs import FULL, NONE, Level
from zerobubble.planning import Problem, Status, solve
from zerobubble.planning.papers.exact import exact
from zerobubble.schedules.vocabulary import with_vocabulary
from zerobubble.simulation import peak_memory, simulate

VEE = Placement.vee(4)
COSTS = Costs.uniform(8, times=(10, 10, 8), stages_per_rank=2, overlap=20)
"""F and the whole backward take 28 ms one after the other on a rank, and 20 ms overlapped."""


def test_no_plan_is_optimal_that_a_published_schedule_with_pairs_beats() -> None:
    pairs = simulate(zb.make("dualpipe-v", 4, 16), COSTS)
    for objective, time in (("period", pairs.span), ("makespan", pairs.makespan)):
        best = zb.plan(COSTS, 16, placements=VEE, objective=objective, seconds=0)
        assert (best.how, best.time) == ("dualpipe-v", time)
        assert best.status is Status.FEASIBLE
        assert best.bound.time < time
        assert best.bubble == pytest.approx(pairs.bubble_span if objective == "period" else pairs.bubble_makespan)
        assert best.least_bubble == 0


def test_pairs_are_planned_only_within_the_memory_and_where_they_hide_something() -> None:
    pairs = zb.make("dualpipe-v", 4, 16)
    fits = Limits(peak_memory(pairs, COSTS))
    tight = Limits((min(fits.memory) - 1,) * 4)
    planned = [zb.plan(COSTS, 16, limits, placements=VEE, seconds=0).schedule for limits in (fits, tight)]
    assert [bool(schedule.overlaps) for schedule in planned] == [True, False]
    assert not zb.plan(replace(COSTS, hidden=()), 16, placements=VEE, seconds=0).schedule.overlaps
    problem = Problem(VEE, 16, COSTS, fits)
    assert solve(problem, seconds=0).how == "dualpipe-v"


@pytest.mark.long
def test_plans_of_other_kinds_take_costs_in_which_pairs_hide_time() -> None:
    unequal = zb.plan(COSTS, 16, placements=VEE, seconds=0, shares=[1, 2] * 8)
    again = zb.plan(COSTS, 16, placements=VEE, evaluations=0, recompute="auto")
    headed = zb.plan(replace(COSTS, placement=VEE).with_divided_head((1, 1, 1)), 16, seconds=0)
    moved = zb.plan(COSTS, 16, Limits((9_000_000,) * 4), host=zb.offload.HostLink(1e9, 1e9), placements=VEE, seconds=0)
    for found in (unequal, again, headed, moved):
        assert found.time is not None
        assert found.bound.time < found.time


def test_the_exact_planner_refuses_hidden_time() -> None:
    with raises(InputError, "exact", "hidden"):
        exact(Problem(Placement.linear(2), 2, Costs.uniform(2, overlap=2), Limits((9_000_000,) * 2)))


@pytest.mark.long
@every_and_all(8)
def test_no_schedule_with_pairs_beats_a_bound(nth: int) -> None:
    """Random schedules with as many pairs as fit, plain, recomputed and with a divided head, of equal and unequal microbatches."""
    for seed in range(0, 160, nth):
        dice = random.Random(seed)
        placement = random_placement(dice)
        microbatches = dice.randint(1, 4)
        costs = random_costs(placement.num_stages, dice)
        if dice.random() < 0.3:
            costs = replace(costs, shares=tuple(dice.choice((0.3, 0.5, 1, 1.7, 3)) for _ in range(microbatches)))
        for _ in range(3):
            plain = random_schedule(placement, microbatches, dice)
            hold_plain(with_pairs(plain, dice), costs)
            hold_again(with_pairs(with_recompute(plain), dice), costs, Level("some", dice.choice((0.3, 0.5, 1.5)), 0.5))
            if not costs.shares:
                hold_divided(plain, costs.with_divided_head((3e-6, 2e-6, 4e-6), collective=1e-6), dice)


def hold_plain(schedule: Schedule, costs: Costs) -> None:
    limits = Limits(tuple(max(1, peak) for peak in peak_memory(schedule, costs)))
    for known in (limits, None):
        hold(lower_bounds(schedule.placement, schedule.num_microbatches, costs, known), schedule, costs)
    hold(bounds_with_recompute(schedule.placement, schedule.num_microbatches, costs, limits, [NONE, FULL]), schedule, costs)


def hold_again(schedule: Schedule, costs: Costs, level: Level) -> None:
    again = costs.with_recompute(level)
    limits = Limits(tuple(max(1, peak) for peak in peak_memory(schedule, again)))
    for levels in ([level], [NONE, FULL, level]):
        hold(bounds_with_recompute(schedule.placement, schedule.num_microbatches, costs, limits, levels), schedule, again)


def hold_divided(plain: Schedule, costs: Costs, dice: random.Random) -> None:
    for algorithm in (1, 2):
        schedule = with_pairs(with_vocabulary(plain, algorithm, costs), dice)
        hold(bounds_with_divided_head(plain.placement, plain.num_microbatches, costs, None), schedule, costs)


def hold(bounds: Bounds, schedule: Schedule, costs: Costs) -> None:
    timeline = simulate(schedule, costs)
    assert bounds.span.time <= timeline.span, (bounds.span, schedule, costs)
    assert bounds.makespan.time <= timeline.makespan, (bounds.makespan, schedule, costs)


def random_placement(dice: random.Random) -> Placement:
    """One to three ranks with one or two stages each, in any order."""
    home = list(range(dice.randint(1, 3))) * dice.randint(1, 2)
    dice.shuffle(home)
    return Placement.custom(home)


def random_costs(stages: int, dice: random.Random) -> Costs:
    most = dice.choice((3, 9, 1000))
    times = [tuple(dice.randint(0, most) for _ in range(length)) for length in (stages, stages, stages, stages - 1, stages)]
    held = [tuple(dice.randint(least, 6) for _ in range(stages)) for least in (1, 0)]
    return Costs(*times[:4], *held, hidden=times[4])


def random_schedule(placement: Placement, microbatches: int, dice: random.Random) -> Schedule:
    split = [dice.random() < 0.6 for _ in range(placement.num_stages)]
    kinds = [(Kind.F, Kind.B, Kind.W) if apart else (Kind.F, Kind.BW) for apart in split]
    passes = {Op(kind, stage, j) for stage, own in enumerate(kinds) for kind in own for j in range(microbatches)}
    return fill(Schedule("random", placement, microbatches, ((),) * placement.num_ranks), passes, dice)


def with_recompute(schedule: Schedule) -> Schedule:
    """The schedule with R right before each backward pass."""
    again = [[(op._replace(kind=Kind.R), op) if op.kind in (Kind.B, Kind.BW) else (op,) for op in row] for row in schedule.rows]
    return replace(schedule, rows=tuple(tuple(op for ops in row for op in ops) for row in again))


def with_pairs(schedule: Schedule, dice: random.Random) -> Schedule:
    """The schedule with most neighbors overlapped that can be."""
    found = schedule
    for row in schedule.rows:
        place = 0
        while place + 1 < len(row):
            pair = replace(found, overlaps=found.overlaps | {(row[place], row[place + 1])})
            if dice.random() < 0.9 and not zb.schedule_faults(pair):
                found = pair
                place += 1
            place += 1
    return found
