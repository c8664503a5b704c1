"""The period of schedules: the time per step in steady state, compared with several steps simulated as one."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, permutations
from math import ceil

import pytest

import zerobubble as zb
from tests.refusals import raises
from zerobubble.bounds import lower_bounds
from zerobubble.graph import play
from zerobubble.lowering import Compiled
from zerobubble.lowering.rollback import with_rollback_points
from zerobubble.program import Compute
from zerobubble.simulation import _largest_mean, metrics, pass_times, period
from zerobubble.verify import checked

NAMES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-1f1b", "1f1b-v", "hanayo", "dualpipe-v")


def drawn(name: str, seed: int) -> tuple[zb.Schedule, zb.Costs]:
    """A published schedule with times of its passes and messages that differ from stage to stage."""
    dice = random.Random(f"{name} {seed}")
    ranks = dice.choice((2, 4))
    schedule = zb.make(name, ranks, 4 * dice.randint(2, 4))
    stages = schedule.num_stages
    times = [tuple(dice.randint(1, 30) for _ in range(stages)) for _ in range(3)]
    return schedule, zb.Costs(*times, tuple(dice.randint(0, 20) for _ in range(stages - 1)), (1,) * stages, (1,) * stages)


def in_a_row(schedule: zb.Schedule, costs: zb.Costs, steps: int) -> list[int]:
    """When the last rank ends each of so many steps, in one long play of all passes."""
    graph, order = checked(schedule)
    takes, delays = pass_times(graph, costs)
    free, ends = dict.fromkeys(range(schedule.num_ranks), 0), []
    for _ in range(steps):
        begin = dict(zip(graph.first, free.values(), strict=False))
        played = play(graph, order, takes, delays, earliest=lambda number, _, begin=begin: begin.get(number, 0))
        free = {rank: played.end[graph.first[rank + 1] - 1] for rank in free}
        ends.append(max(free.values()))
    return ends


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", NAMES)
def test_consecutive_steps_take_the_period_each(name: str, seed: int) -> None:
    schedule, costs = drawn(name, seed)
    ends = in_a_row(schedule, costs, 60)
    assert ends[-1] - ends[-41] <= 40 * period(schedule, costs)
    assert ends[-1] - ends[-41] >= 40 * (period(schedule, costs) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_period_lies_between_the_bound_on_a_span_and_the_makespan(name: str) -> None:
    schedule, costs = drawn(name, 7)
    alone, meeting = period(schedule, costs), period(schedule, costs, [0] * schedule.num_ranks)
    assert alone <= metrics(schedule, costs).span
    assert meeting == metrics(schedule, costs).makespan
    if len(schedule.placement.routes) == 1 and not schedule.overlaps:
        assert lower_bounds(schedule.placement, schedule.num_microbatches, costs, None).span.time <= alone


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_meeting_at_rollback_points_costs_no_time(name: str, seed: int) -> None:
    """Post-update validation needs no objective of its own: its plans are those of the period."""
    schedule, costs = drawn(name, seed)
    if len(schedule.placement.routes) > 1:
        pytest.skip("post-update validation refuses schedules of two routes")
    program, points = with_rollback_points(Compiled.from_schedule(schedule).program)
    places = [sum(isinstance(action, Compute) for action in row[: point.position]) for row, point in zip(program.rows, points, strict=True)]
    assert period(schedule, costs, places) == period(schedule, costs)


def test_sums_over_replicas_end_before_the_next_step() -> None:
    schedule, costs = zb.make("1f1b", 2, 4), zb.Costs.uniform(2, (10, 10, 10))
    costs = replace(costs, reduce=(100_000_000, 0))
    assert period(schedule, costs) == period(schedule, replace(costs, reduce=())) + 100_000_000


def test_wrong_places_are_refused() -> None:
    schedule, costs = zb.make("1f1b", 2, 4), zb.Costs.uniform(2)
    with raises(zb.InputError, "meets_at", 1, 2):
        period(schedule, costs, [0])
    with raises(zb.InputError, "meets_at", "rank 1", 0, 8, "None", 9):
        period(schedule, costs, [0, 9])


@pytest.mark.parametrize("seed", range(30))
def test_the_largest_mean_is_that_of_a_cycle(seed: int) -> None:
    """Of all cycles, written one by one. Ranks that add the same in each step do not need it."""
    dice = random.Random(seed)
    ranks = range(dice.randint(1, 4))
    weights = [[dice.randint(0, 50) for _ in ranks] for _ in ranks]
    history = [[dice.randint(0, 9) for _ in ranks]]
    for _ in ranks:
        history.append([max(history[-1][before] + weights[before][after] for before in ranks) for after in ranks])
    cycles = [(*cycle, cycle[0]) for size in ranks for cycle in permutations(ranks, size + 1)]
    means = [Fraction(sum(weights[a][b] for a, b in pairwise(cycle)), len(cycle) - 1) for cycle in cycles]
    assert _largest_mean(history) == ceil(max(means))
