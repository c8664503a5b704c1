"""Ordering W passes to hide sums over replicas: legal, within the limits, and never longer than before."""

from __future__ import annotations

import pytest

import zerobubble as zb
from zerobubble.planning import Objective, Plan, Problem, solve
from zerobubble.planning.weight_order import with_weights_ordered
from zerobubble.simulation import memory_faults


def solved_by(
    name: str, stages: int, sums: float, room: int = 10**12, times: tuple[float, float, float] = (20.0, 20.0, 20.0), buckets: int = 0
) -> Plan:
    schedule = zb.make(name, 4, 8, *([stages] if stages > 2 else []))
    costs = zb.Costs.uniform(schedule.num_stages, times, stages_per_rank=stages, reduce=sums, buckets=buckets)
    problem = Problem(schedule.placement, 8, costs, zb.Limits((room,) * 4), Objective.MAKESPAN)
    return Plan.from_schedule(problem, problem.bound(), schedule, 0.0, name)


def passes(schedule: zb.Schedule) -> list[list[zb.Op]]:
    return [sorted(row) for row in schedule.rows]


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
@pytest.mark.parametrize("sums", [10, 40, 80, 200])
@pytest.mark.parametrize("times", [(20.0, 20.0, 20.0), (10.0, 12.0, 7.0)])
def test_an_order_is_legal_and_never_longer(name: str, sums: float, times: tuple[float, float, float]) -> None:
    before = solved_by(name, 2, sums, times=times)
    after = with_weights_ordered(before)
    assert before.schedule is not None
    assert after.schedule is not None
    assert after.time is not None
    assert before.time is not None
    assert after.time <= before.time
    assert not zb.schedule_faults(after.schedule)
    assert passes(after.schedule) == passes(before.schedule)
    kinds = [[op.kind for op in row] for row in before.schedule.rows]
    assert [[op.kind for op in row] for row in after.schedule.rows] == kinds


def test_the_sum_of_one_of_two_stages_hides_behind_the_weights_of_the_other() -> None:
    """Without sums a step of ZB-V takes 510 ms; with 80 ms of them on each rank half of these hide."""
    before, after = (each.time for each in (solved_by("zb-v", 2, 80), with_weights_ordered(solved_by("zb-v", 2, 80))))
    assert (before, after) == (580_000_000, 550_000_000)


def test_with_buckets_three_quarters_of_the_sums_of_zb_v_hide() -> None:
    """Those of the stage that ends last leave while its last W's run, too."""
    before = solved_by("zb-v", 2, 80, buckets=8)
    assert (before.time, with_weights_ordered(before).time) == (547_500_000, 531_250_000)


def test_what_holds_too_much_is_left_as_it_is() -> None:
    """W that waits longer holds more; where the limits are what the order before holds, no other may hold more."""
    free = solved_by("zb-v", 2, 80)
    assert free.schedule is not None
    most = max(max(held for _, held in row) for row in zb.simulate(free.schedule, free.problem.costs).memory)
    tight = with_weights_ordered(solved_by("zb-v", 2, 80, most))
    assert tight.schedule is not None
    assert not memory_faults(tight.schedule, tight.problem.costs, tight.problem.limits)


def test_without_sums_nothing_changes() -> None:
    before = solved_by("zb-v", 2, 0)
    assert with_weights_ordered(before) is before


@pytest.mark.parametrize("sums", [20, 80])
def test_plans_have_their_weights_ordered(sums: float) -> None:
    """The best published one within the memory of V-Half, none of which is in a good order as it is."""
    half = solved_by("v-half", 2, 0)
    room = max(held for row in zb.simulate(half.schedule or zb.make("v-half", 4, 8), half.problem.costs).memory for _, held in row)
    problem = solved_by("v-half", 2, sums, room).problem
    found = solve(problem, evaluations=0)
    assert found == with_weights_ordered(found)
