"""Every pair of axes is either planned together or refused by the one table."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

import zerobubble as zb
from docs import combinations as combinations_page
from tests.thinned import every
from zerobubble import InputError, Limits, Placement
from zerobubble.cli.outputs.plan import plan_to_dict
from zerobubble.offload import HostLink
from zerobubble.partition import Layer
from zerobubble.planned_run import NOT_RUN
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
    "slices": {"slices": 2},
    "period": {"objective": "period"},
}
"""What asks `zb.plan` for each axis; errors of times are asked of what is planned."""
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
    assert set(ASKED) == set(AXES) - {"what_if"}


@pytest.mark.parametrize(("one", "other"), every(2, PAIRS))
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


def test_every_pair_that_pipelines_refuse_is_refused_or_noted() -> None:
    """The axes of a plan among the options of a pipeline: none is planned silently with one that it refuses."""
    as_axes = {("head", "divided"): "head", ("offload", "all"): "host", ("mesh", "dp_shard"): "sharded", ("recompute", "full"): "recompute"}
    refused = [{as_axes.get(one), as_axes.get(other)} for one, other, _ in combinations_page.EXCLUDED]
    assert [pair for pair in refused if None not in pair] == [{*pair} for pair in (("head", "host"), ("head", "sharded"))]
    assert {frozenset(pair) for pair in NOT_RUN} == {frozenset(pair) for pair in refused if None not in pair}
    assert all(AXES.index(one) < AXES.index(other) for one, other in NOT_RUN)


HEAVY = Head((30, 30, 30), held=1e6)


@pytest.mark.parametrize("axis", ["sharded", "host"])
def test_a_plan_that_no_pipeline_runs_says_so(axis: str) -> None:
    asked = GIVEN | {"work": zb.Workload.uniform(2, (10, 10, 8)), "num_microbatches": 6, "evaluations": 0, "head": HEAVY}
    asked["memory"] = 4 if axis == "sharded" else 1.4
    found = zb.plan(**asked, **ASKED[axis])
    assert found.schedule.has_divided_head
    pair = ("sharded", "head") if axis == "sharded" else ("head", "host")
    (note,) = found.not_run
    assert NOT_RUN[pair] in note
    assert " ".join(str(found).split()).count(note) == 1
    assert plan_to_dict(found)["not_run"] == [note]
    read = zb.planning.Plan.from_dict(found.to_dict())
    assert read.not_run == (note,)
    assert note in " ".join(str(read).split())
    whole = zb.plan(**asked | {"head": None}, **ASKED[axis])
    assert whole.not_run == ()
