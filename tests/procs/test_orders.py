"""Any legal order trains as one device; an order that `verify` rejects is refused on every rank, and never hangs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import zerobubble as zb
from tests.procs.models import build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_gradients import worst_errors
from tests.pure.problems import schedules
from tests.pure.test_other_suites import ORDERS
from tests.pure.test_verify import disturbed
from tests.thinned import every
from zerobubble import Schedule

REAL = settings(max_examples=110, deadline=None, suppress_health_check=list(HealthCheck))


def train(group: Any, schedule: Schedule) -> dict[str, float]:
    return worst_errors(group, schedule, steps=1)


def refuse(group: Any, schedule: Schedule) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, schedule, schedule.num_microbatches, loss_fn, group=group)
    return str(caught.value)


def check_training(world: Ranks, schedule: Schedule) -> None:
    for worst in world.run(train, schedule, ranks=schedule.num_ranks):
        assert max(worst.values()) <= 1e-12


@pytest.mark.long
@settings(REAL, max_examples=8)
@given(schedules())
def test_a_legal_order_trains(world: Ranks, schedule: Schedule) -> None:
    check_training(world, schedule)


def test_a_first_route_that_no_microbatch_takes_trains(world: Ranks) -> None:
    """Its first rank, which opens the step, is given no inputs then."""
    rows = [[zb.Op.parse(text) for text in row.split()] for row in ("1F0 1BW0", "0F0 0BW0")]
    check_training(world, Schedule("one way", zb.Placement.custom((0, 1), (1, 0)), 1, tuple(map(tuple, rows)), (1,)))


@pytest.mark.parametrize("schedule", every(3, ORDERS))
def test_uneven_stages_and_reordered_backwards_train(world: Ranks, schedule: Schedule) -> None:
    check_training(world, schedule)


@pytest.mark.long
@REAL
@given(schedules())
def test_many_legal_orders_train(world: Ranks, schedule: Schedule) -> None:
    check_training(world, schedule)


@pytest.mark.long
@settings(REAL, max_examples=25)
@given(schedules(), st.integers(0, 1 << 32))
def test_a_faulty_order_is_refused(world: Ranks, schedule: Schedule, seed: int) -> None:
    broken = disturbed(schedule, random.Random(seed))
    faults = zb.schedule_faults(broken)
    assume(faults)
    for result in world.run(refuse, broken, ranks=broken.num_ranks):
        assert faults[0].message in result


def test_the_random_orders_reach_every_feature() -> None:
    """The property tests above would mean little if their schedules were all plain."""
    found: set[str] = set()

    @settings(max_examples=110, database=None)
    @given(schedules())
    def collect(schedule: Schedule) -> None:
        found.update(feature for feature, present in features(schedule).items() if present)

    collect()
    assert found == set(features(zb.make("1f1b", 1, 1)))


def features(schedule: Schedule) -> dict[str, bool]:
    return {
        "overlapped steps": bool(schedule.overlaps),
        "two routes in use": len(set(schedule.microbatch_routes)) == 2,
        "split and fused stages": 0 < len(schedule.split_stages) < schedule.num_stages,
        "several stages on a rank": schedule.num_stages > schedule.num_ranks,
        "microbatches out of order": any([op.microbatch for op in row] != sorted(op.microbatch for op in row) for row in schedule.rows),
    }
