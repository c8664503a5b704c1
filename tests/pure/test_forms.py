"""JSON forms: any input gives a value or an `InputError`."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.problems import problems
from tests.refusals import raises
from zerobubble import Costs, InputError, Limits, Program, Schedule, Timeline, Workload, lower, make, simulate
from zerobubble.planning import Plan, Problem
from zerobubble.simulation import peak_memory

SAMPLE = make("zb-v", 2, 2)
WORK = Workload.uniform(2, (1, 1, 1))
COSTS = WORK.costs(SAMPLE.placement)
PROBLEM = Problem(
    SAMPLE.placement, 2, COSTS, Limits(peak_memory(SAMPLE, COSTS)), workload=WORK, layers_per_stage=(1, 2, 1, 1), layer_names=tuple("abcde")
)
FORMS: dict[type[Any], dict[str, Any]] = {
    Schedule: SAMPLE.to_dict(),
    Costs: replace(Costs.uniform(4), placement=SAMPLE.placement).to_dict(),
    Timeline: simulate(SAMPLE, Costs.uniform(4)).to_dict(),
    Program: lower(SAMPLE).to_dict(),
    Plan: Plan.from_schedule(PROBLEM, PROBLEM.bound(), SAMPLE, 0.1, "zb-v").to_dict(),
    Workload: WORK.to_dict(),
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.just(10**30),
    st.sampled_from([float("inf"), float("nan"), 0.5]),
    st.text(max_size=3),
    st.lists(st.integers(0, 2), max_size=2),
    st.just({}),
)


def places(form: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every part of a JSON value."""
    items = form.items() if isinstance(form, dict) else enumerate(form) if isinstance(form, list) else ()
    return [path] * bool(path) + [place for key, part in items for place in places(part, (*path, key))]


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_broken_part_is_refused_or_harmless(kind: type[Any], data: st.DataObject) -> None:
    form = copy.deepcopy(FORMS[kind])
    *path, last = data.draw(st.sampled_from(places(form)))
    holder = form
    for key in path:
        holder = holder[key]
    holder[last] = data.draw(JUNK)
    try:
        value = kind.from_dict(form)
    except InputError:
        return
    assert kind.from_dict(value.to_dict()) == value


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
def test_every_key_but_the_optional_is_asked_for(kind: type[Any]) -> None:
    optional = {
        "format",
        "microbatch_routes",
        "memory",
        "source",
        "hidden",
        "reduce",
        "buckets",
        "reductions",
        "copies",
        "status",
        "figures",
        "marks",
    }
    of_plans = {"placement", "workload", "layers_per_stage", "layer_names", "sharded", "recomputation", "head", "host", "offloads", "cut"}
    optional |= of_plans if kind in (Costs, Plan) else set()
    for key in FORMS[kind].keys() - optional:
        form = {k: v for k, v in FORMS[kind].items() if k != key}
        with raises(InputError, key):
            kind.from_dict(form)


@given(problems())
def test_every_value_survives_json(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    for value in (schedule, costs, simulate(schedule, costs), lower(schedule)):
        assert type(value).from_dict(json.loads(json.dumps(value.to_dict()))) == value


@pytest.mark.parametrize("axis", ["workload", "sharded", "recomputation", "head", "host", "cut"])
@pytest.mark.parametrize("junk", [False, 0, "x", [], [1]], ids=str)
def test_an_axis_of_a_plan_that_is_no_object_is_refused(axis: str, junk: object) -> None:
    with pytest.raises(InputError):
        Plan.from_dict(FORMS[Plan] | {axis: junk})


def test_columns_of_costs_and_axes_of_plans_may_be_left_out() -> None:
    costs = {key: value for key, value in FORMS[Costs].items() if key != "placement"}
    assert Costs.from_dict(costs) == Costs.uniform(4)
    with raises(InputError, "'zerobubble costs 1'", "'zerobubble costs 2'"):
        Costs.from_dict(costs | {"format": "zerobubble costs 2"})
    form = {key: value for key, value in FORMS[Plan].items() if key not in ("workload", "layers_per_stage", "layer_names")}
    form |= {"costs": Costs.uniform(4).to_dict()}
    assert Plan.from_dict(form | {"limits": [4_000_000, 4_000_000]}).schedule == SAMPLE
