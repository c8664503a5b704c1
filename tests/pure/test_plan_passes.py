"""Passes planned for the microbatches of one step: never slower than the order alone, within its memory, of the same kinds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
import torch

import zerobubble as zb
from tests.thinned import every
from zerobubble.planning.unequal.order import numbers_by_place, with_numbers
from zerobubble.planning.unequal.passes import WORTH, plan_passes
from zerobubble.runtime.mailbox.handshake import StepOrder, read_passes, write_passes
from zerobubble.schedules import with_recompute
from zerobubble.simulation import peak_memory

SCHEDULES = [
    zb.make("1f1b", 4, 8),
    zb.make("zb-h1", 4, 8),
    zb.make("zb-h2", 3, 9),
    zb.make("zb-v", 3, 8),
    zb.make("interleaved-1f1b", 3, 6),
    with_recompute(zb.make("zb-h1", 3, 8)),
    with_recompute(zb.make("1f1b", 4, 8), stages=[0, 1]),
]


def problem(schedule: zb.Schedule, seed: int) -> tuple[zb.Schedule, zb.Costs]:
    """The best order of microbatches of unequal cost on stages of unequal cost, and what they cost."""
    dice = Random(seed)
    shares = [dice.choice((1, 1, 2, 4)) * dice.uniform(1, 2) for _ in range(schedule.num_microbatches)]
    stages = range(schedule.num_stages)
    forward, backward, weight = ([dice.uniform(5, 15) for _ in stages] for _ in range(3))
    costs = zb.Costs.from_ms(forward, backward, weight, comm=dice.choice((0.0, 0.5)), held_after_f=[1000] * len(stages))
    costs = costs.with_columns(fused=[round(0.9 * (b + w)) for b, w in zip(costs.backward, costs.weight, strict=True)])
    costs = replace(costs.with_recompute(zb.costs.FULL), shares=tuple(share / fmean(shares) for share in shares))
    return zb.planning.order_microbatches(schedule, costs, evaluations=200), costs


def kinds_of(schedule: zb.Schedule) -> Counter[tuple[zb.Kind, int]]:
    return Counter(op[:2] for row in schedule.rows for op in row)


@pytest.mark.parametrize("schedule", every(2, SCHEDULES), ids=lambda schedule: schedule.name)
def test_plans_are_never_slower_and_hold_no_more_than_the_order_alone(schedule: zb.Schedule) -> None:
    found = []
    for seed in range(5):
        ordered, costs = problem(schedule, seed)
        planned = plan_passes(ordered, costs, moves=5000)
        assert planned == plan_passes(ordered, costs, moves=5000)
        if planned is None:
            continue
        found.append(planned)
        alone, after = zb.simulate(ordered, costs), zb.simulate(planned, costs)
        assert not zb.schedule_faults(planned)
        assert after.span <= (1 - WORTH) * alone.span
        assert after.makespan <= alone.makespan
        assert all(held <= most for held, most in zip(peak_memory(planned, costs), peak_memory(ordered, costs), strict=True))
        assert kinds_of(planned) == kinds_of(schedule)
    assert found


def test_more_memory_is_used_where_limits_allow_it() -> None:
    spans = {1: 0, 2: 0}
    for seed in range(4):
        ordered, costs = problem(zb.make("zb-h1", 4, 8), seed)
        for factor in spans:
            limits = zb.Limits(tuple(factor * held for held in peak_memory(ordered, costs)))
            planned = plan_passes(ordered, costs, limits=limits) or ordered
            assert all(held <= most for held, most in zip(peak_memory(planned, costs), limits.memory, strict=True))
            spans[factor] += zb.simulate(planned, costs).span
    assert spans[2] < spans[1]


def test_a_search_that_is_stopped_gives_what_it_has_found() -> None:
    ordered, costs = problem(zb.make("zb-h1", 4, 8), 1)
    looks = iter([False] * 2 + [True] * 10_000)
    stopped = plan_passes(ordered, costs, stops=lambda: next(looks))
    whole = plan_passes(ordered, costs)
    assert whole is not None
    assert stopped is None or zb.simulate(whole, costs).span <= zb.simulate(stopped, costs).span < zb.simulate(ordered, costs).span
    assert next(looks), "the search looks whether it is to stop"


def test_what_recomputes_only_some_microbatches_of_a_stage_is_not_planned() -> None:
    schedule = with_recompute(zb.make("1f1b", 3, 8), stages=[0], microbatches=[1, 2])
    assert plan_passes(*problem(schedule, 0)) is None


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_passes_are_read_as_they_were_written(schedule: zb.Schedule) -> None:
    planned = plan_passes(*problem(schedule, 1), moves=5000) or problem(schedule, 1)[0]
    found = StepOrder(tuple(numbers_by_place(planned)), write_passes(planned))
    heard = StepOrder.read(torch.tensor(found.numbers(), dtype=torch.float64))
    assert heard == found
    in_places = read_passes("planned", schedule, heard.passes)
    assert with_numbers(in_places, heard.order).rows == planned.rows
    assert found.digest == heard.digest != StepOrder(found.order).digest
