"""Schedules for replicas with lost ranks: legal, with all work on the remaining ranks, and near the busiest rank's bound."""

from __future__ import annotations

import pytest

import zerobubble as zb
from tests.refusals import raises
from zerobubble.lowering import lower
from zerobubble.rerouting import rerouted, slowdown_of
from zerobubble.verify_program import program_faults


def replicas_of(placement: zb.Placement, replicas: int) -> list[list[int]]:
    ranks = placement.num_ranks
    return [list(range(number * ranks, (number + 1) * ranks)) for number in range(replicas)]


@pytest.mark.parametrize(
    ("placement", "replicas", "gone", "busiest"),
    [
        (zb.Placement.linear(4), 2, (), 8),
        (zb.Placement.linear(4), 2, (5,), 16),
        (zb.Placement.linear(4), 2, (0, 5), 16),
        (zb.Placement.linear(4), 3, (5,), 12),
        (zb.Placement.linear(8), 4, (9, 20), 11),
        (zb.Placement.vee(4), 2, (3,), 32),
        (zb.Placement.bidirectional(4), 2, (6,), 12),
    ],
    ids=str,
)
def test_work_goes_to_other_holders_and_the_busiest_rank_is_hardly_ever_idle(
    placement: zb.Placement, replicas: int, gone: tuple[int, ...], busiest: int
) -> None:
    """`busiest` is the number of microbatches of the busiest rank, of 8 a replica, its stages counted apart."""
    schedule = rerouted(placement, replicas_of(placement, replicas), gone, 8 * replicas)
    assert not zb.schedule_faults(schedule)
    assert not program_faults(lower(schedule, 1))
    assert schedule.num_ranks == placement.num_ranks * replicas - len(gone)
    passes = [op for row in schedule.rows for op in row]
    assert len(passes) == len(set(passes)) == 3 * 8 * replicas * placement.num_stages
    assert max(map(len, schedule.rows)) == 3 * busiest
    makespan = zb.simulate(schedule, zb.Costs.uniform(placement.num_stages)).makespan // 1_000_000
    assert 3 * busiest <= makespan <= 3 * busiest + 2 * placement.num_stages


def test_routes_do_not_depend_on_the_number_of_microbatches() -> None:
    replicas = replicas_of(zb.Placement.linear(4), 3)
    assert rerouted(zb.Placement.linear(4), replicas, {5}, 3).placement == rerouted(zb.Placement.linear(4), replicas, {5}, 24).placement


def test_the_slowdown_counts_idle_time_that_further_work_fills() -> None:
    """ZB-H1 of 8 microbatches on 4 ranks takes 27 units, of which a rank works 24; with twice stage 1's work one works 48, from 1 on."""
    before = zb.make("zb-h1", 4, 8)
    slowdown = slowdown_of(before, rerouted(before.placement, replicas_of(before.placement, 2), {1}, 16))
    assert slowdown == (49 / 27, 49 / 27)


@pytest.mark.parametrize(("replicas", "microbatches"), [(2, 8), (3, 6), (4, 8), (8, 16)])
def test_no_step_is_shorter_than_its_least(replicas: int, microbatches: int) -> None:
    before = zb.make("zb-h1", 4, microbatches)
    for gone in range(4):
        now = rerouted(before.placement, replicas_of(before.placement, replicas), {gone}, replicas * microbatches)
        planned, least = slowdown_of(before, now)
        assert 1 <= least <= planned <= 1.1 * least + 0.1


def test_a_stage_that_nobody_holds_is_named() -> None:
    with raises(zb.InputError, "stage 1", "rank", "checkpoint"):
        rerouted(zb.Placement.linear(4), replicas_of(zb.Placement.linear(4), 2), {1, 5}, 8)
