"""Frozen parts: encoders without B and W, decoders without W, and forward-only work."""

from __future__ import annotations

import json
import random
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from benchmarks.axes.judge import judged, least_time
from tests.refusals import raises
from tests.thinned import every_of
from zerobubble import Costs, InputError, Limits, Placement
from zerobubble.cli import main
from zerobubble.partition import Layer, layers_to_dict
from zerobubble.planning import Head, Plan, Sharded

MS = 1_000_000
ENCODER = [Layer(3 * MS, 0, 0, 0, 0, 100, MS // 5) for _ in range(4)]
LLM = [Layer(4 * MS, 4 * MS, 4 * MS, 1000, 900, 300, MS // 5) for _ in range(6)]
DECODER = [Layer(2 * MS, 2 * MS, 0, 500, 0, 100, MS // 5) for _ in range(4)]
CHAIN = [*ENCODER, *LLM, *DECODER]
MTP = [*LLM, Layer(5 * MS, 5 * MS, 4 * MS, 1200, 1000, 350, MS // 5)]
"""Blocks, and one of multi-token prediction, which the head follows as well."""


def assert_sound(found: Plan) -> None:
    reported = judged(found)
    assert (reported.makespan, reported.peaks) == (found.makespan, found.peaks)
    assert all(map(int.__le__, reported.peaks, found.problem.limits.memory))
    assert found.time is not None
    assert found.bound.time <= found.time <= (reported.span if found.problem.objective == "period" else reported.makespan)
    read = Plan.from_dict(json.loads(json.dumps(found.to_dict())))
    assert (read.problem, read.schedule, read.time) == (found.problem, found.schedule, found.time)
    assert str(found)


AXES: list[dict[str, Any]] = [
    {},
    {"recompute": "auto"},
    {"shares": (1, 2, 1, 1)},
    {"sharded": Sharded(4000, 5000, 1e9)},
    {"head": Head((4, 4, 4), held=200)},
    {"speeds": (1, 1, 0.5, 1)},
]


@pytest.mark.parametrize(("layers", "more", "objective"), every_of(3, [CHAIN, MTP], AXES, ["period", "makespan"]))
def test_chains_with_frozen_ends_are_planned_with_other_axes(layers: list[Layer], more: dict[str, Any], objective: str) -> None:
    given = {"placements": "linear", "evaluations": 0, "objective": objective}
    found = zb.plan(layers, 4, Limits((8000,) * 4), **given | more)
    assert_sound(found)
    assert found.cut is not None
    if layers is CHAIN and not more:  # the work is shared out by what trains, so the encoder has more layers a rank
        assert found.cut.rank_layers[0] > found.cut.rank_layers[1]


PATTERNS = {"frozen encoder": ((0, 1), (0, 1)), "frozen decoder": ((1, 1), (1, 0)), "both": ((0, 1), (0, 0)), "forwards": ((0, 0), (0, 0))}


@pytest.mark.parametrize(("seed", "pattern"), every_of(3, range(3), PATTERNS))
def test_no_order_beats_plans_of_stages_that_do_not_train(pattern: str, seed: int) -> None:
    """Of all orders of two microbatches on two ranks, with passes that take no time."""
    dice, (trains, has_weights) = random.Random(seed), PATTERNS[pattern]
    forward, backward, weight = ([dice.randint(1, 9) for _ in range(2)] for _ in range(3))
    backward, weight = ([time * on for time, on in zip(*pair, strict=True)] for pair in ((backward, trains), (weight, has_weights)))
    held = [5 * on for on in trains]
    pending = [3 * on for on in has_weights]
    costs = Costs(forward, backward, weight, [dice.randint(0, 2)], held, pending)  # type: ignore[arg-type]
    for limit, objective in product((99, 5), ("makespan", "period")):
        found = zb.plan(costs, 2, Limits((limit,) * 2), placements=Placement.linear(2), objective=objective, evaluations=100)
        assert_sound(found)
        if pattern == "forwards":
            continue
        best = least_time(found)
        assert found.bound.time <= best
        assert objective == "period" or found.time == best


def forwards(dice: random.Random, count: int) -> list[Layer]:
    return [Layer(dice.randint(1, 9), 0, 0, 500, 0, 100, dice.randint(0, 2)) for _ in range(count)]


@pytest.mark.parametrize(
    ("placement", "shares"), every_of(2, [Placement.linear(2), Placement.vee(2), Placement.looped(2, 2)], [(), (1.0, 2.5)])[::-1], ids=str
)
def test_forwards_alone_hold_nothing_and_no_order_beats_their_bound(placement: Placement, shares: tuple[float, ...]) -> None:
    for seed in range(2):
        layers = forwards(random.Random(seed), 6)
        for objective in ("makespan", "period"):
            found = zb.plan(layers, 2, Limits((500, 500)), placements=placement, objective=objective, shares=shares, evaluations=20)
            assert_sound(found)
            assert found.schedule.is_forward_only
            assert found.peaks == (0, 0)
            every = [[tuple(row) for row in permutations(ops)] for ops in found.schedule.rows]
            times = []
            for rows in product(*every):
                order = zb.Schedule("tried", placement, 2, rows)
                if not zb.schedule_faults(order):
                    played = zb.simulate(order, found.costs)
                    times.append(played.makespan if objective == "makespan" else played.span)
            assert found.bound.time <= min(times)
            assert found.time is not None
            assert found.time <= 1.15 * min(times)


@pytest.mark.parametrize("work", [zb.Workload.uniform(4, (3, 0, 0), comm=0.2), [Layer(3 * MS, 0, 0, 10**9, 0, 100, MS // 5)] * 8], ids=type)
def test_forwards_alone_keep_the_busiest_rank_busy(work: Any) -> None:
    found = zb.plan(work, 12, 2, placements=[Placement.linear(4), Placement.vee(4)], evaluations=50)
    assert_sound(found)
    assert found.schedule.is_forward_only
    assert found.time == found.bound.time


def test_what_has_no_meaning_for_forwards_alone_is_refused_at_once() -> None:
    work = zb.Workload.uniform(2, (3, 0, 0))
    with raises(InputError, "recompute", "sharded", "baseline"):
        zb.plan(work, 4, 2, recompute="auto", sharded=Sharded(4, 4), baseline="zb-heuristic")


def test_the_command_line_plans_forwards_alone(tmp_path: Path) -> None:
    file, saved = tmp_path / "layers.json", str(tmp_path / "plan.json")
    file.write_text(json.dumps(layers_to_dict(forwards(random.Random(1), 9))), encoding="utf-8")
    for asked in (["--layers", str(file), "--memory", "500B"], ["--times", "3,0,0", "--memory", "2"]):
        done = CliRunner().invoke(main, ["plan", "-p", "3", "-m", "6", *asked, "--evaluations", "10", "--json", "-o", saved])
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["peak_microbatches"] == 0
        assert zb.io.load_plan(saved).schedule.is_forward_only
        for verb in (["show", saved, "--json"], ["check", saved], ["plan", "--costs", saved, "--evaluations", "0"]):
            again = CliRunner().invoke(main, verb)
            assert again.exit_code == 0, again.output


NO_TIME: dict[str, dict[str, Any]] = {
    "BW": {"work": zb.Workload.uniform(2, (10, 10, 8), fused=0), "shares": (1, 2, 1, 1)},
    "BW, recomputed": {"work": zb.Workload.uniform(2, (10, 10, 8), fused=0), "recompute": "auto"},
    "a share of 1 ns": {"work": zb.Workload.uniform(2, (1e-5, 1e-6, 1e-6)), "placements": "vee"},
    "short microbatches": {"work": zb.Workload.uniform(2, (1e-5, 1e-6, 1e-6)), "shares": (0.3, 0.4, 0.2, 1)},
    "fast ranks": {"work": [Layer(MS, 100, 100, 10, 5)] * 6, "placements": Placement.linear(2), "speeds": (1e6, 1e6)},
    "stages below a head": {"work": zb.Workload.uniform(2, (10, 0, 0)), "head": Head((1, 1, 1))},
    "layers below a head": {"work": ENCODER, "placements": Placement.linear(2), "head": Head((1, 1, 1))},
}


@pytest.mark.parametrize("what", NO_TIME)
def test_training_has_backward_passes_even_if_they_take_no_time(what: str) -> None:
    asked = NO_TIME[what] | {"evaluations": 20}
    found = zb.plan(num_microbatches=4, memory=None, **({"placements": "linear"} | asked))
    assert not found.schedule.is_forward_only
    assert not zb.schedule_faults(found.schedule)
    assert found.time is not None
    assert found.bound.time <= found.time
    read = Plan.from_dict(json.loads(json.dumps(found.to_dict())))
    assert (read.problem, read.time) == (found.problem, found.time)
