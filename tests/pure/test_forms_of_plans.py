"""Files are self-contained: costs include their placement, and a plan includes everything it was made from.

A plan and its costs survive their file with everything they were made from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zerobubble as zb
from tests.refusals import Stated, raises
from zerobubble import Costs, InputError, Limits, Placement
from zerobubble.partition import Layer
from zerobubble.planning import Plan, Problem, Status

VEE = Placement.vee(2)
MEASURED = Costs((3, 5, 4, 6), (6, 9, 8, 12), (3, 4, 4, 7), (1, 0, 1), (100, 200, 150, 120), (60, 100, 80, 50), placement=VEE)


def saved(plan: Plan, tmp_path: Path) -> Plan:
    zb.io.save_plan(plan, tmp_path / "plan.json")
    return zb.io.load_plan(tmp_path / "plan.json")


def test_measured_costs_are_planned_on_the_placement_they_know() -> None:
    assert zb.plan(MEASURED, 4, evaluations=0).schedule.placement == VEE
    assert zb.plan(MEASURED, 4, placements="vee", evaluations=0).schedule.placement == VEE


@pytest.mark.parametrize(
    ("placements", "stated"),
    [
        ("linear", (2, 4, "placement", "stages")),
        (Placement.linear(4), ("stage 2", "rank 2", "rank 1", 2)),
        (Placement.looped(2, 2), ("stage 2", "rank 0", "rank 1")),
        (["vee", "linear"], ("costs", "placement", "Workload")),
    ],
)
def test_measured_costs_are_planned_nowhere_else(placements: str, stated: Stated) -> None:
    with raises(InputError, *stated):
        zb.plan(MEASURED, 4, placements=placements, evaluations=0)


def test_a_schedule_on_another_placement_is_not_timed() -> None:
    for judge in (zb.simulate, zb.explain.attribute):
        with raises(InputError, "interleaved-1f1b", "stage 2", "rank 0", "rank 1"):
            judge(zb.make("interleaved-1f1b", 2, 4), MEASURED)
    copies = replace(Costs.uniform(2), placement=Placement.linear(2))
    assert zb.simulate(zb.make("chimera", 2, 4), copies).makespan, "the first of two routes lies as measured"


def test_costs_of_other_stages_than_their_placement_has_are_refused() -> None:
    with raises(InputError, 4, 6, "costs", "stages"):
        replace(MEASURED, placement=Placement.vee(3))


def test_a_plan_for_ranks_keeps_their_work_and_objective(tmp_path: Path) -> None:
    work = zb.Workload.from_ms([3, 2], [3, 3], [1, 2], [0.5, 0.25])
    plan = zb.plan(work, 4, 1.5, placements=["vee", "linear"], objective="makespan", evaluations=0)
    loaded = saved(plan, tmp_path)
    assert loaded.to_dict() == plan.to_dict()
    assert (loaded.problem.workload, loaded.problem.objective, loaded.bound) == (work, "makespan", plan.bound)
    assert loaded.problem.limits == work.limits(1.5)


def test_a_plan_for_stages_keeps_their_placement(tmp_path: Path) -> None:
    loaded = saved(zb.plan(MEASURED, 4, Limits((500, 600)), evaluations=0), tmp_path)
    assert loaded.problem.costs == MEASURED
    assert (loaded.problem.limits, loaded.problem.workload) == (Limits((500, 600)), None)


def test_a_plan_for_layers_keeps_the_layers_of_each_stage(tmp_path: Path) -> None:
    layers = [Layer(2, 2, 1, 10, 5)] * 6 + [Layer(9, 9, 4, 10, 5)]
    found = zb.plan(layers, 4, placements=Placement.linear(2), evaluations=200)
    loaded = saved(found, tmp_path)
    assert loaded.cut == found.cut
    assert loaded.to_dict() == found.to_dict()


def test_a_workload_that_gives_other_costs_is_refused() -> None:
    work, limits = zb.Workload.uniform(2, (1, 1, 1)), Limits((10**9,) * 2)
    with raises(InputError, "workload", "other", "costs", "problem"):
        Problem(VEE, 4, MEASURED, limits, workload=work)
    with raises(InputError, 4, 3, "placement", "stages"):
        Problem(VEE, 4, MEASURED, limits, layers_per_stage=(1, 1, 1))


@pytest.mark.parametrize("held_after_f", [(0, 0, 0, 0), (0, 100, 100, 100)])
def test_a_stage_that_saves_nothing_in_f_counts_with_what_its_b_leaves(held_after_f: tuple[int, ...]) -> None:
    costs = replace(MEASURED, held_after_f=held_after_f, held_after_b=(1024, 50, 50, 50))
    for name in ("v-half", "zb-v"):
        problem = Problem(VEE, 8, costs, Limits((10**6,) * 2))
        peak = Plan.from_schedule(problem, problem.bound(), zb.make(name, 2, 8), 0.0, name).peak_microbatches
        assert peak is not None
        assert 0 < peak <= 8, "8 microbatches cannot hold more than 8"


WORK = zb.Workload.uniform(3, (10, 12, 8), comm=0.5)


def test_a_bound_by_windows_survives_its_file(tmp_path: Path) -> None:
    found = zb.plan(WORK, 6, placements="linear", evaluations=500)
    assert found.bound.time > found.problem.bound().time
    read = saved(found, tmp_path)
    assert (read.bound.time, read.status) == (found.bound.time, found.status)
    assert saved(read, tmp_path).bound == read.bound


def edited_bound(data: dict[str, Any]) -> None:
    data["bound"]["time"] = data["figures"]["period"]


def edited_costs(data: dict[str, Any]) -> None:
    data["workload"] = None
    data["costs"]["comm"] = [2 * time for time in data["costs"]["comm"]]


@pytest.mark.parametrize("edit", [edited_bound, edited_costs])
def test_a_bound_that_was_not_proved_for_a_file_does_not_count(edit: Callable[[dict[str, Any]], None]) -> None:
    data = zb.plan(WORK, 6, placements="linear", seconds=0).to_dict()
    edit(data)
    read = Plan.from_dict(data)
    assert read.bound.time == read.problem.bound().time
    assert (read.status is Status.OPTIMAL) == (read.time == read.bound.time)
