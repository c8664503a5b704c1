"""Boundaries and schedule chosen together: never worse than one after the other, and better where layers are unequal."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from tests.refusals import raises, states
from tests.thinned import every
from zerobubble import InputError, Limits, Placement, schedule_faults, simulate
from zerobubble.io import loads
from zerobubble.offload import HostLink
from zerobubble.partition import Layer, activation_limits, balance_placement, parameter_bytes, stage_costs
from zerobubble.planning import search as engine
from zerobubble.planning.answer import Plan
from zerobubble.planning.axes.layers import CutSavings
from zerobubble.planning.competition import solve
from zerobubble.planning.front import plan
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.simulation import memory_faults

MS = 1_000_000


def layer(forward: float, backward: float, weight: float, parameters: int = 0) -> Layer:
    return Layer(round(forward * MS), round(backward * MS), round(weight * MS), 1000, 900, parameters, MS // 2)


HEADED = [layer(3, 3, 1.6)] * 22 + [layer(8, 9, 4)]
"""A model with a heavy head; on 4 ranks of 6 layers the head's rank is not the slowest, and yet in everybody's way."""


def one_after_the_other(layers: list[Layer], placement: Placement, microbatches: int, limits: Limits, objective: Objective) -> Plan:
    """The plan for the balanced cuts, with the budget of the tests."""
    cuts = balance_placement(layers, placement, limits)
    room = activation_limits(layers, cuts, placement, limits)
    problem = Problem(placement, microbatches, stage_costs(layers, cuts), room, objective)
    return solve(problem, evaluations=100)


def together(layers: list[Layer], placement: Placement, microbatches: int, limits: Limits, objective: Objective) -> Plan:
    return plan(layers, microbatches, limits, placements=placement, objective=objective, evaluations=100)


def savings_of(found: Plan) -> CutSavings:
    savings = found.saving(CutSavings)
    assert savings is not None
    return savings


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("placement", [Placement.linear(3), Placement.vee(2), Placement.looped(2, 2)], ids=lambda placement: placement.name)
def test_never_worse_than_balanced_cuts_and_then_a_plan(placement: Placement, objective: Objective) -> None:
    dice = random.Random(placement.num_stages)
    for _ in range(2):
        times = [[dice.uniform(0.2, 3) for _ in range(3)] for _ in range(placement.num_stages + 4)]
        layers = [layer(*three, parameters=dice.randint(0, 2000)) for three in times]
        limits = Limits((60_000,) * placement.num_ranks)
        found = together(layers, placement, 5, limits, objective)
        apart = one_after_the_other(layers, placement, 5, limits, objective)
        savings = savings_of(found)
        assert found.time is not None
        assert apart.time is not None
        assert savings.balanced.time is not None
        assert found.time <= apart.time
        assert savings.gain == 1 - found.time / savings.balanced.time


def test_a_heavy_head_is_planned_shorter_with_other_cuts() -> None:
    found = savings_of(plan(HEADED, 12, Limits((22_000,) * 4), placements=Placement.linear(4), evaluations=400))
    assert found.cut.cuts != found.balanced_cut.cuts
    assert found.gain > 0.03
    assert found.cuts_planned > 1


def test_the_plan_runs_on_its_cuts_within_all_memory() -> None:
    placement, limits = Placement.vee(2), Limits((30_000, 26_000))
    layers = [layer(3, 3, 1.6, parameters=1500)] * 9 + [layer(8, 9, 4, parameters=6000)]
    found = together(layers, placement, 6, limits, Objective.PERIOD)
    schedule, cuts = found.schedule, savings_of(found).cut.cuts
    costs = stage_costs(layers, cuts)
    kept = parameter_bytes(layers, cuts, placement)
    left = Limits(tuple(limit - held for limit, held in zip(limits.memory, kept, strict=True)))
    assert schedule_faults(schedule) == ()
    assert memory_faults(schedule, costs, left) == ()
    assert simulate(schedule, costs).span == found.time


def test_small_models_come_near_the_best_of_all_cuts() -> None:
    placement, limits = Placement.linear(3), Limits((9_000,) * 3)
    layers = [layer(1, 1, 1), layer(4, 3, 1), layer(1, 2, 2), layer(2, 2, 2), layer(5, 5, 2), layer(1, 1, 0)]
    found = together(layers, placement, 6, limits, Objective.PERIOD)
    times = []
    for cuts in combinations(range(1, len(layers)), 2):
        problem = Problem(placement, 6, stage_costs(layers, cuts), limits)
        times.append(solve(problem, evaluations=100).time or 0)
    assert found.time is not None
    assert found.time <= 1.03 * min(times)


def test_the_same_budget_and_seed_give_the_same_plan() -> None:
    one, other = (together(HEADED, Placement.vee(2), 4, Limits((60_000,) * 2), Objective.PERIOD) for _ in range(2))
    assert (one.cut, one.schedule, savings_of(one).cuts_planned) == (other.cut, other.schedule, savings_of(other).cuts_planned)


def test_without_limits_there_is_room_for_every_microbatch() -> None:
    found = plan(HEADED, 3, placements=Placement.linear(2), evaluations=50)
    assert found.cut is not None
    assert found.problem.limits.memory == tuple(3 * held + 1 for held in found.cut.rank_held)


def test_parameters_that_fill_every_rank_are_an_input_error() -> None:
    with raises(InputError, "cuts", "memory"):
        plan([layer(1, 1, 1, parameters=500)] * 4, 3, Limits((900, 900)), placements="linear", evaluations=10)


def test_the_json_form_names_both_cuts_and_the_gain() -> None:
    found = together(HEADED, Placement.linear(4), 6, Limits((22_000,) * 4), Objective.PERIOD)
    savings = savings_of(found)
    data = savings.to_dict()
    assert (data["cuts"], data["balanced_cuts"]) == (list(savings.cut.cuts), list(savings.balanced_cut.cuts))
    assert data["gain"] == savings.gain


def test_the_file_of_a_plan_keeps_its_cut() -> None:
    found = together(HEADED, Placement.linear(4), 6, Limits((22_000,) * 4), Objective.PERIOD)
    data = json.loads(json.dumps(found.to_dict()))
    read = loads(json.dumps(data))
    assert isinstance(read, Plan)
    assert (read.cut, read.schedule, read.time) == (found.cut, found.schedule, found.time)


def test_a_cut_with_other_costs_is_refused() -> None:
    found = together(HEADED, Placement.linear(2), 3, Limits((60_000,) * 2), Objective.PERIOD)
    with raises(InputError, "costs", "stages"):
        replace(found.problem, costs=found.problem.costs.scaled(2))


def test_layers_do_not_say_how_many_ranks_there_are() -> None:
    with raises(InputError, "vee", "ranks"):
        plan(HEADED, 3, placements="vee", seconds=0)
    assert plan(HEADED, 3, Limits((90_000,) * 2), placements="vee", seconds=0).placement == Placement.vee(2)
    assert plan(HEADED, 3, 3.0, placements=Placement.linear(2), seconds=0).peaks[0] <= 3 * 23 * 1000 // 2 + 1


def test_placements_compete_and_the_winner_moves_its_cuts() -> None:
    placements = {"line": Placement.linear(2), "vee": Placement.vee(2), "fine": Placement.looped(2, 12)}
    found = plan(HEADED, 6, Limits((60_000,) * 2), placements=placements, evaluations=200)
    names = [choice.name for choice in found.choices]
    assert sorted(names) == ["line", "vee"]
    (left_out,) = savings_of(found).left_out
    states(left_out, "fine", 23, 24, 1)
    apart = {name: one_after_the_other(HEADED, placements[name], 6, Limits((60_000,) * 2), Objective.PERIOD) for name in names}
    assert found.problem.placement == placements[names[0]]
    assert found.problem.costs == stage_costs(HEADED, savings_of(found).cut.cuts)
    assert found.time is not None
    assert found.time <= min(solved.time or 0 for solved in apart.values())
    (other,) = found.choices[1:]
    assert other.plan.problem.costs == apart[other.name].problem.costs


def test_an_interrupted_search_ends_the_part_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    search, times = engine.search, [0]

    def interrupted(*parts: Any, **options: Any) -> engine.SearchResult:
        times[0] += 1
        return replace(search(*parts, **options), interrupted=True)

    monkeypatch.setattr(engine, "search", interrupted)
    found = together(HEADED, Placement.linear(4), 12, Limits((22_000,) * 4), Objective.PERIOD)
    assert times == [1]
    assert found.interrupted
    assert savings_of(found).gain >= 0


@pytest.mark.parametrize(
    ("memory", "further"),
    every(2, [(14_000, {"recompute": "full"}), (14_000, {}), (9_000, {"host": HostLink(1e6, 1e6), "evaluations": 100})]),
)
def test_news_of_a_search_over_cuts_and_offloads_count_what_was_tried(memory: int, further: dict[str, Any]) -> None:
    news: list[Any] = []
    layers = [Layer(2_000_000 + 100_000 * i, 2_000_000, 2_000_000 - 50_000 * i, 1000, 500) for i in range(10)]
    made = plan(layers, 4, Limits((memory,) * 3), placements="vee", progress=news.append, **{"evaluations": 0, **further})
    over_cuts = [message for message in news if message.how.endswith("of the layers")]
    assert len(over_cuts) > 1
    assert news[-1] == over_cuts[-1]
    assert news[-1].bubble == pytest.approx(made.bubble)
    savings = made.saving(CutSavings)
    assert savings is not None
    assert f" {savings.cuts_planned} cuts " in news[-1].how
    assert {level.name for level in savings.balanced.levels} == {level.name for level in made.levels}
    assert any(message.how.endswith("offloads") for message in news) == ("host" in further)
