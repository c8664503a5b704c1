"""Ranks of unequal speed: cuts against every other cut of small models, bounds, and plans with them.

With speeds of 1, cuts equal those without speeds. No plan beats its bound.
"""

from __future__ import annotations

import json
import random
import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import zerobubble as zb
from tests.refusals import Stated, raises, states
from zerobubble import InputError, Limits, Placement
from zerobubble.cli import main
from zerobubble.partition import Layer, cut_layers, layers_to_dict, stage_costs
from zerobubble.partition.layers import Cuts

EXACT = [Placement.linear(2), Placement.linear(3), Placement.custom((2, 0, 1)), Placement.vee(2), Placement.vee(3), Placement.looped(2, 2)]
FEW_CUTS = [Placement.wave(2, 3), Placement.custom((0, 1, 0)), Placement.looped(2, 3)]
SPEEDS = (0.5, 1.0, 0.3, 2.0, 1.7)


def random_layers(dice: random.Random, count: int, most: int = 20) -> list[Layer]:
    """Layers whose times are rounded at most speeds."""
    return [Layer(*(dice.randint(0, most) for _ in range(3)), dice.randint(1, 6), 1, dice.randint(0, 9)) for _ in range(count)]


def random_problem(dice: random.Random, placement: Placement) -> tuple[list[Layer], tuple[float, ...]]:
    layers = random_layers(dice, placement.num_stages + dice.randint(0, max(0, 8 - placement.num_stages)))
    return layers, tuple(dice.choice(SPEEDS) for _ in range(placement.num_ranks))


def slowest(layers: list[Layer], placement: Placement, speeds: tuple[float, ...], cuts: Cuts) -> int:
    """What the slowest rank takes, pass by pass and layer by layer."""
    busy = [0] * placement.num_ranks
    for rank, (begin, end) in zip(placement.routes[0], pairwise((0, *cuts, len(layers))), strict=True):
        for layer in layers[begin:end]:
            busy[rank] += sum(round(time / speeds[rank]) for time in (layer.forward, layer.backward, layer.weight))
    return max(busy)


def every_cut(layers: list[Layer], placement: Placement) -> list[Cuts]:
    return list(combinations(range(1, len(layers)), placement.num_stages - 1))


def held(layers: list[Layer], placement: Placement, cuts: Cuts) -> list[int]:
    """The bytes that each rank holds with one microbatch in each stage."""
    found = [0] * placement.num_ranks
    for rank, (begin, end) in zip(placement.routes[0], pairwise((0, *cuts, len(layers))), strict=True):
        found[rank] += sum(layer.parameters_bytes + layer.held_after_f for layer in layers[begin:end])
    return found


@pytest.mark.parametrize("placement", [*EXACT, *FEW_CUTS], ids=lambda placement: f"{placement.name}-{placement.num_ranks}")
def test_no_cut_has_a_faster_slowest_rank(placement: Placement) -> None:
    dice = random.Random(placement.num_stages)
    for _ in range(60):
        layers, speeds = random_problem(dice, placement)
        cut = cut_layers(layers, placement, speeds=speeds)
        best = min(slowest(layers, placement, speeds, cuts) for cuts in every_cut(layers, placement))
        assert cut.slowest == slowest(layers, placement, speeds, cut.cuts) == best
        assert cut.bound == best


@pytest.mark.parametrize("placement", EXACT, ids=lambda placement: f"{placement.name}-{placement.num_ranks}")
def test_no_cut_within_the_memory_has_a_faster_slowest_rank(placement: Placement) -> None:
    dice = random.Random(placement.num_stages)
    refused = 0
    for _ in range(60):
        layers, speeds = random_problem(dice, placement)
        limits = Limits(tuple(dice.randint(15, 60) for _ in range(placement.num_ranks)))
        fitting = [cuts for cuts in every_cut(layers, placement) if all(map(int.__le__, held(layers, placement, cuts), limits.memory))]
        if not fitting:
            refused += 1
            with raises(InputError, "cuts"):
                cut_layers(layers, placement, limits, speeds=speeds)
            continue
        best = min(slowest(layers, placement, speeds, cuts) for cuts in fitting)
        assert cut_layers(layers, placement, limits, speeds=speeds).slowest == best
    assert refused < 55


@pytest.mark.sweep
@pytest.mark.parametrize("placement", [Placement.wave(3, 3), Placement.looped(4, 3)], ids=lambda placement: placement.name)
def test_the_search_is_near_its_bound(placement: Placement) -> None:
    dice = random.Random(3)
    for _ in range(2):
        layers = random_layers(dice, 40, 2000)
        speeds = tuple(dice.choice((0.5, 1.0)) for _ in range(placement.num_ranks))
        cut = cut_layers(layers, placement, speeds=speeds)
        assert cut.bound <= cut.slowest <= 1.1 * cut.bound


MS = 1_000_000
DICE = random.Random(5)
LAYERS = [Layer(*(DICE.randint(1, 4) * MS for _ in range(3)), 1000, 900, 200) for _ in range(8)]
PLACES = [Placement.linear(2), Placement.vee(2)]
GIVEN: dict[str, Any] = {"num_microbatches": 4, "memory": Limits((9000, 9000)), "placements": PLACES, "evaluations": 20}


def as_data(found: zb.planning.Plan) -> dict[str, Any]:
    """The plan file without the time that the search took."""
    return {key: value for key, value in json.loads(json.dumps(found.to_dict())).items() if key != "seconds"}


def test_speeds_of_one_are_those_that_are_left_out() -> None:
    assert as_data(zb.plan(LAYERS, **GIVEN, speeds=(1, 1.0))) == as_data(zb.plan(LAYERS, **GIVEN))
    assert cut_layers(LAYERS, PLACES[1], speeds=(1, 1.0)) == cut_layers(LAYERS, PLACES[1])
    assert stage_costs(LAYERS, (4,), PLACES[0], (1, 1.0)) == stage_costs(LAYERS, (4,))


@pytest.mark.parametrize("placement", PLACES, ids=lambda placement: placement.name)
def test_half_the_speed_of_all_ranks_doubles_all_times(placement: Placement) -> None:
    given = GIVEN | {"placements": placement}
    whole, half = zb.plan(LAYERS, **given), zb.plan(LAYERS, **given, speeds=(0.5, 0.5))
    assert whole.cut is not None
    assert half.cut is not None
    assert (half.cut.cuts, half.schedule.rows) == (whole.cut.cuts, whole.schedule.rows)
    assert half.cut.rank_times == tuple(2 * time for time in whole.cut.rank_times)
    assert (half.cut.excess, half.cut.bound) == (whole.cut.excess, 2 * whole.cut.bound)
    assert whole.time is not None
    assert (half.time, half.bound.time) == (2 * whole.time, 2 * whole.bound.time)


@pytest.mark.parametrize("seed", range(6))
def test_plans_are_above_their_bounds_and_no_longer_than_on_cuts_for_equal_ranks(seed: int) -> None:
    dice = random.Random(seed)
    placement = dice.choice([Placement.linear(3), Placement.vee(2)])
    layers = [Layer(*(dice.randint(1, 20) for _ in range(3)), 1, 1, output_comm=dice.randint(0, 3)) for _ in range(8)]
    speeds = tuple(dice.choice((0.4, 0.7, 1.0, 1.5)) for _ in range(placement.num_ranks))
    found = zb.plan(layers, 4, placements=placement, evaluations=60, speeds=speeds, objective="makespan")
    assert found.time is not None
    assert found.cut is not None
    assert found.bound.time <= found.time == zb.simulate(found.schedule, found.costs).makespan
    assert found.costs == stage_costs(layers, found.cut.cuts, placement, speeds)
    even = stage_costs(layers, cut_layers(layers, placement).cuts, placement, speeds)
    later = zb.plan(even, 4, placements=placement, evaluations=60, objective="makespan")
    assert later.time is not None
    assert found.time <= later.time
    # no rank does its work in less than the bound on the slowest one, whatever the cut
    assert 4 * found.cut.bound <= found.time


def test_slow_ranks_get_fewer_layers() -> None:
    layers = [Layer(MS, MS, MS, 0, 0)] * 24
    found = zb.plan(layers, 8, placements=["linear", "vee"], evaluations=20, speeds=(1, 1, 0.5, 0.5))
    assert found.cut is not None
    assert found.cut.rank_layers == (8, 8, 4, 4)
    states(str(found), 8, 1, 4, "0.5")
    if found.placement.name != "vee":
        states(str(found.cut), "stage 2", "rank 2", "0.5")


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 0, 1, 3])
def test_placements_are_ranked_by_time(seed: int) -> None:
    """A cut that gives slow ranks more layers has more work, and so perhaps less idle time in a longer step."""
    dice = random.Random(seed)
    layers = [Layer(*(dice.randint(1, 9) * MS for _ in range(3)), 1, 1, output_comm=MS // 2) for _ in range(14)]
    found = zb.plan(layers, 6, evaluations=20, speeds=(1, 0.4, 0.7))
    times = [choice.plan.time for choice in found.choices if choice.plan.time is not None]
    assert len(times) > 2
    assert times == sorted(times)
    assert found.time == times[0]
    for choice in found.choices[1:]:
        claims = re.match(r"cannot take less than", choice.note)
        assert (claims is not None) == (choice.plan.bound.time >= times[0] and choice.plan.status is zb.planning.Status.FEASIBLE)


def test_a_plan_file_keeps_the_speeds() -> None:
    found = zb.plan(LAYERS, **GIVEN, speeds=(1, 0.6))
    data = as_data(found) | {"seconds": 0.0}
    read = zb.planning.Plan.from_dict(data)
    assert (read.problem, read.schedule, read.time) == (found.problem, found.schedule, found.time)
    assert read.cut is not None
    assert read.cut.speeds == (1.0, 0.6)
    without = zb.plan(LAYERS, **GIVEN).to_dict()
    assert "speeds" not in without["cut"]


def test_a_plan_for_other_speeds_is_refused_with_both_times() -> None:
    found = zb.plan(LAYERS, **GIVEN, speeds=(1, 0.5))
    data = found.to_dict()
    data["cut"]["speeds"] = [1, 0.25]
    assert found.cut is not None
    stage = found.placement.routes[0].index(1)
    kept = found.costs.forward[stage]
    with raises(InputError, f"stage {stage}", "rank 1", "0.25", 2 * kept, kept):
        zb.planning.Plan.from_dict(data)
    costs = found.costs
    with raises(InputError, "costs", "measured", "rank"):
        zb.planning.Problem(Placement.custom((1, 0) if costs.num_stages == 2 else (1, 0, 0, 1)), 4, costs, Limits((9000, 9000)))


BAD = [
    ((1, 0.5, 0.5), (2, 3, "(1, 0.5, 0.5)")),
    ((1,), (2, 1, "ranks", "speeds")),
    ((1, 0), ("rank 1", "0.000001", "1,000,000", 0, 1)),
    ((1, -0.5), ("-0.5", 1)),
    ((float("nan"), 1), ("rank 0", "speed")),
    ((1, float("inf")), ("inf",)),
    ((1, 1e-300), ("rank 1", "1e-300")),
    ((1, True), ("True",)),
    ((1, "2"), ("2",)),
    ((1, 10**400), ("rank 1", "speed")),
    (0.5, ("speeds", 0.5)),
    ("11", ("speeds", "tuple")),
]


@pytest.mark.parametrize(("speeds", "stated"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_bad_speeds_are_named_with_the_remedy(speeds: Any, stated: Stated) -> None:
    for call in (
        lambda: zb.plan(LAYERS, **GIVEN, speeds=speeds),
        lambda: cut_layers(LAYERS, PLACES[0], speeds=speeds),
        lambda: stage_costs(LAYERS, (4,), PLACES[0], speeds),
    ):
        with raises(InputError, *stated) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_speeds_without_ranks_and_for_other_work_are_refused() -> None:
    with raises(InputError, "(1, 2)", "placement"):
        stage_costs(LAYERS, (4,), speeds=(1, 2))
    for work in (zb.Workload.uniform(2, (1, 1, 1)), zb.Costs.uniform(2)):
        with raises(InputError, "(1, 0.5)", type(work).__name__):
            zb.plan(work, 4, placements=PLACES[0], speeds=(1, 0.5))


def test_speeds_say_how_many_ranks_there_are() -> None:
    assert zb.plan(LAYERS, 4, placements="linear", evaluations=0, speeds=(1, 0.5, 1)).placement.num_ranks == 3


def test_extreme_speeds_are_planned() -> None:
    found = zb.plan(LAYERS, 4, placements=PLACES[0], evaluations=0, speeds=(1, 1e-6))
    assert found.cut is not None
    assert found.cut.rank_layers == (7, 1)
    assert cut_layers([Layer(10**15, 10**15, 10**15, 0, 0)] * 4, PLACES[0], speeds=(1e-6, 1e6)).rank_layers == (1, 3)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", "-p", "2", "-m", "4", *words])


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(layers_to_dict(LAYERS)), encoding="utf-8")
    return str(path)


def test_the_command_line_takes_speeds(file: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    done = run("--layers", file, "--placement", "linear,vee", "--evaluations", "20", "--speeds", "1,0.5", "--json", "-o", saved)
    assert done.exit_code == 0, done.output
    layers = json.loads(done.output)["layers"]
    assert layers["speeds"] == [1, 0.5]
    assert sum(layers["layers_per_rank"]) == 8
    assert layers["layers_per_rank"][0] > layers["layers_per_rank"][1]
    read = zb.io.load_plan(saved)
    assert read.cut is not None
    assert read.cut.speeds == (1, 0.5)
    assert run("--layers", file, "--evaluations", "0", "--speeds", "1,0.5").exit_code == 0
    again = CliRunner().invoke(main, ["plan", "--costs", saved, "--evaluations", "20", "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.output)["placement"] == read.placement.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--speeds", "1,0.5,1"], "there are 2 ranks, but 3 speeds were given"),
        (["--speeds", "1,0"], "the speed of rank 1 must be a number"),
        (["--speeds", "1,-1"], "got -1.0"),
        (["--speeds", "nan,1"], "got nan"),
        (["--speeds", "1,inf"], "got inf"),
        (["--speeds", "1,fast"], "is not a list of numbers"),
        (["--speeds", "1,0.5", "--head", "1,1,1"], "--speeds cannot be planned with --head"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_the_command_line_refuses_bad_speeds(file: str, words: list[str], message: str) -> None:
    done = run("--layers", file, "--evaluations", "0", *words)
    assert done.exit_code == 2
    assert message in done.output


def test_the_command_line_refuses_speeds_without_layers() -> None:
    done = run("--speeds", "1,0.5")
    assert done.exit_code == 2
    states(done.output, "--speeds", "--layers")
