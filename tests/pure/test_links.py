"""Links of unequal speed: messages of layers, stages and ranks take longer over slow ones, in the costs, the bound and the plan file."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from benchmarks.axes.judge import judged
from tests.refusals import Stated, raises
from tests.thinned import every_of
from zerobubble import InputError, Limits, Placement
from zerobubble.cli import main
from zerobubble.partition import Layer, layers_to_dict, stage_costs
from zerobubble.planning import Plan

MS = 1_000_000
RNG = random.Random(7)
LAYERS = [Layer(*(RNG.randint(2, 5) * MS for _ in range(3)), 1000, 900, 200, RNG.randint(1, 5) * MS // 5) for _ in range(12)]
LINKS = (1, 0.1, 0.7)
PLACES = [Placement.linear(3), Placement.vee(3), Placement.looped(3, 2)]
ALONG = {(0, 1): 0, (1, 0): 0, (1, 2): 1, (2, 1): 1, (0, 2): 2, (2, 0): 2}
"""The link between each two of three ranks."""


def over_links(placement: Placement, times: list[int], links: tuple[float, ...] = LINKS) -> tuple[int, ...]:
    """Recomputes the times of the messages between stages; messages within a rank take no time."""
    hops = zip(times, pairwise(placement.routes[0]), strict=True)
    return tuple(0 if here == there else round(time / links[ALONG[here, there]]) for time, (here, there) in hops)


def between_ranks(found: Plan) -> tuple[int, ...]:
    hops = zip(found.costs.comm, pairwise(found.placement.routes[0]), strict=True)
    return tuple(0 if here == there else time for time, (here, there) in hops)


def assert_sound(found: Plan, messages: tuple[int, ...]) -> None:
    """The costs have these messages, and what plays them alone gives the figures of the plan, above its bound."""
    assert between_ranks(found) == messages
    reported = judged(found)
    assert (reported.makespan, reported.peaks) == (found.makespan, found.peaks)
    assert found.time is not None
    assert found.bound.time <= found.time == reported.makespan
    read = Plan.from_dict(json.loads(json.dumps(found.to_dict())))
    assert (read.problem, read.schedule, read.time) == (found.problem, found.schedule, found.time)


def plan(work: Any, **more: Any) -> Plan:
    return zb.plan(work, 4, **{"evaluations": 40, "objective": "makespan", "links": LINKS} | more)


AXES: list[dict[str, Any]] = [{}, {"recompute": "auto", "memory": Limits((9000,) * 3)}, {"speeds": (1, 0.8, 1)}]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("more", "placement"), every_of(4, AXES, PLACES), ids=lambda value: " ".join(value) if isinstance(value, dict) else value.name
)
def test_layers_send_over_their_links(more: dict[str, Any], placement: Placement) -> None:
    found = plan(LAYERS, placements=placement, **more)
    assert found.cut is not None
    sent = [LAYERS[first - 1].output_comm for first in found.cut.cuts]
    assert_sound(found, over_links(placement, sent))
    assert found.cut.links == LINKS


@pytest.mark.sweep
@pytest.mark.parametrize("placement", PLACES, ids=lambda placement: placement.name)
def test_no_plan_for_links_that_are_alike_is_shorter_over_these(placement: Placement) -> None:
    alike, found = (plan(LAYERS, placements=placement, evaluations=100, links=links) for links in ((), LINKS))
    assert alike.cut is not None
    assert found.time is not None
    assert found.time <= zb.simulate(alike.schedule, stage_costs(LAYERS, alike.cut.cuts, placement, links=LINKS)).makespan


@pytest.mark.parametrize("placement", PLACES, ids=lambda placement: placement.name)
def test_stages_send_over_their_links(placement: Placement) -> None:
    stages = placement.num_stages
    costs = zb.Costs.from_ms([4] * stages, [4] * stages, [3] * stages, [0.2 + 0.1 * stage for stage in range(stages - 1)])
    found = plan(costs, placements=placement)
    assert_sound(found, over_links(placement, list(costs.comm)))
    assert found.bound.time >= plan(costs, placements=placement, links=()).bound.time
    with raises(InputError, "costs", "measured", "rank"):
        found.costs.require_fit(Placement.custom([2 - rank for rank in placement.routes[0]]), "the other way round")


@pytest.mark.parametrize("placement", PLACES, ids=lambda placement: placement.name)
def test_ranks_send_over_their_links(placement: Placement) -> None:
    work = zb.Workload.from_ms([8] * 3, [8] * 3, [6] * 3, comm=(0.3, 0.4, 0.5))
    found = plan(work, placements=placement)
    sent = [work.comm[ALONG[hop]] if len({*hop}) == 2 else 0 for hop in pairwise(placement.routes[0])]
    assert_sound(found, over_links(placement, sent))


def test_the_bound_knows_the_slow_link() -> None:
    layers = [Layer(MS, MS, MS, 1, 1, output_comm=MS) for _ in range(6)]
    slow, fast = (plan(layers, placements=PLACES[0], links=links) for links in ((1, 0.05, 1), ()))
    assert slow.bound.time >= fast.bound.time + 2 * 19 * MS


def test_links_that_are_alike_are_those_that_are_left_out() -> None:
    for work in (LAYERS, zb.Workload.uniform(3, (3, 3, 2), comm=1)):
        alike, without = (plan(work, placements=PLACES[0], links=links) for links in ((1, 1.0, 1), ()))
        assert (alike.problem, alike.schedule) == (without.problem, without.schedule)


def test_links_say_how_many_ranks_there_are() -> None:
    assert zb.plan(LAYERS, 4, placements="linear", evaluations=0, links=LINKS).placement.num_ranks == 3


BAD: list[tuple[Any, Stated]] = [
    ((1, 0.5), (3, 2, "(1, 0.5)")),
    ((1, 0, 1), ("rank 1", "0.000001", "1,000,000", 0)),
    ((1, float("nan"), 1), ("rank 1",)),
    ((1, "2", 1), ("2",)),
    (0.5, ("links", 0.5)),
]


@pytest.mark.parametrize(("links", "stated"), BAD, ids=[str(links) for links, _ in BAD])
@pytest.mark.parametrize("work", [LAYERS, zb.Costs.uniform(3, comm=1), zb.Workload.uniform(3, (1, 1, 1), comm=1)], ids=type)
def test_bad_links_are_named_with_the_remedy(work: Any, links: Any, stated: Stated) -> None:
    with raises(InputError, *stated):
        plan(work, placements=PLACES[0], links=links)


@pytest.mark.parametrize("work", [[Layer(3, 3, 2, 1, 1)] * 4, zb.Costs.uniform(3), zb.Workload.uniform(3, (1, 1, 1))], ids=type)
def test_links_of_messages_that_take_no_time_are_refused(work: Any) -> None:
    with raises(InputError, 0, "links"):
        plan(work, placements=PLACES[0])
    with raises(InputError, "(1, 2)", "placement"):
        stage_costs(LAYERS, (4,), links=(1, 2))


def test_a_plan_for_other_links_is_refused_with_both_times() -> None:
    data = plan(LAYERS, placements=PLACES[0]).to_dict()
    data["cut"]["links"] = [1, 0.2, 1]
    with raises(InputError, "stage 1", "problem"):
        Plan.from_dict(data)


def run(*words: str) -> Any:
    done = CliRunner().invoke(main, ["plan", "-m", "4", "--evaluations", "20", "--objective", "makespan", "--placement", "linear", *words])
    assert done.exit_code == 0, done.output
    return done


def test_the_command_line_takes_links_with_layers_costs_times_and_a_plan(tmp_path: Path) -> None:
    files = {name: str(tmp_path / f"{name}.json") for name in ("layers", "costs", "plan", "again")}
    costs = zb.Costs.from_ms([4] * 3, [4] * 3, [3] * 3, [0.2, 0.3])
    Path(files["layers"]).write_text(json.dumps(layers_to_dict(LAYERS)), encoding="utf-8")
    Path(files["costs"]).write_text(json.dumps(costs.to_dict()), encoding="utf-8")
    asked = ("--links", "1,0.1,0.7", "-o", files["plan"])
    run("-p", "3", "--layers", files["layers"], *asked)
    found = zb.io.load_plan(files["plan"])
    assert_sound(found, over_links(PLACES[0], [LAYERS[first - 1].output_comm for first in found.cut.cuts]))  # type: ignore[union-attr]
    run("--costs", files["costs"], *asked)
    found = zb.io.load_plan(files["plan"])
    assert_sound(found, over_links(PLACES[0], list(costs.comm)))
    again = run("--costs", files["plan"], "--links", "0.5,1,1", "-o", files["again"])
    assert again.exit_code == 0
    assert_sound(zb.io.load_plan(files["again"]), (2 * found.costs.comm[0], found.costs.comm[1]))
    run("-p", "3", "--times", "4,4,3", "--comm", "0.5", *asked)
    assert zb.io.load_plan(files["plan"]).costs.comm == (MS // 2, 5 * MS)
