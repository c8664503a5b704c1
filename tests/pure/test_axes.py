"""Every pair of axes is either planned together or refused by the one table, all pairs at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

import zerobubble as zb
from zerobubble import InputError, Limits, Placement
from zerobubble.offload import HostLink
from zerobubble.partition import Layer
from zerobubble.planning import Head, Sharded
from zerobubble.planning.problem.axes import AXES, NOT_TOGETHER, refuse_pairs

ASKED: dict[str, dict[str, Any]] = {
    "links": {"links": (0.5, 1)},
    "layers": {"work": [Layer(3, 3, 2, 1, 1, output_comm=1)] * 4, "placements": Placement.linear(2)},
    "speeds": {"work": [Layer(3, 3, 2, 1, 1, output_comm=1)] * 4, "placements": Placement.linear(2), "speeds": (1, 0.9)},
    "baseline": {"baseline": "zb-heuristic"},
    "sharded": {"sharded": Sharded(4, 4)},
    "shares": {"shares": (1, 2)},
    "recompute": {"recompute": "full"},
    "head": {"head": Head((1, 1, 1))},
    "host": {"host": HostLink(1e9, 1e9)},
    "fused": {"work": zb.Workload.uniform(2, (3, 3, 2), comm=1, fused=4)},
    "period": {"objective": "period"},
}
"""What asks `zb.plan` for each axis; noise and errors of times are asked of what is planned."""
WORK = zb.Workload.uniform(2, (3, 3, 2), comm=1)
GIVEN = {"work": WORK, "num_microbatches": 2, "memory": Limits((48_000_000,) * 2), "placements": "linear"}
PAIRS = list(combinations(ASKED, 2))


def plan(*axes: str) -> zb.planning.Plan:
    asked = {name: value for axis in axes for name, value in ASKED[axis].items()}
    if "fused" in axes and {"layers", "speeds"} & {*axes}:
        asked["work"] = [replace(layer, fused=4) for layer in ASKED["layers"]["work"]]
    return zb.plan(**{**GIVEN, **asked}, evaluations=0)


def test_the_table_is_in_the_order_of_the_axes() -> None:
    assert all(AXES.index(one) < AXES.index(other) for one, other in NOT_TOGETHER)
    assert set(ASKED) == set(AXES) - {"noise", "what_if"}


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_pair_is_planned_or_refused(one: str, other: str) -> None:
    if (one, other) not in NOT_TOGETHER:
        assert zb.schedule_faults(plan(one, other).schedule) == ()
        return
    with pytest.raises(InputError) as caught:
        plan(one, other)
    assert NOT_TOGETHER[one, other] in str(caught.value)


def test_all_pairs_are_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        refuse_pairs({axis: axis for axis in AXES})
    assert all(reason in str(caught.value) for reason in NOT_TOGETHER.values())
