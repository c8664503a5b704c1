"""Plans with offload: legal, within memory, never slower than without, never below the bound, and shown by the command line.

A plan survives its file.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.refusals import Stated, raises, states
from zerobubble.cli import main
from zerobubble.export.perfetto import perfetto_json
from zerobubble.export.svg import timeline_svg
from zerobubble.offload import HostLink, offload_faults
from zerobubble.planning import Plan
from zerobubble.planning.axes.host import OffloadSavings

MB = 10**6
LINK = HostLink(4e9, 4e9)


def savings_of(found: Plan) -> OffloadSavings:
    savings = found.saving(OffloadSavings)
    assert savings is not None
    return savings


def require_sound(found: Plan, limits: zb.Limits) -> None:
    """Raise unless the plan is legal, within the limits, no slower than without and no quicker than the bound, and what it says is so."""
    schedule, costs, savings = found.schedule, found.costs, savings_of(found)
    assert found.timeline is not None
    assert not zb.schedule_faults(schedule)
    assert schedule.num_microbatches == found.problem.num_microbatches
    assert not offload_faults(schedule, costs, found.offloads, limits)
    assert all((peak or 0) <= limit for peak, limit in zip((rank.peak_bytes for rank in found.timeline.ranks), limits.memory, strict=True))
    assert found.timeline.makespan == found.makespan
    assert found.timeline.makespan >= found.bound.time >= savings.bound.time
    assert found.timeline.makespan >= zb.simulate(schedule, costs).makespan
    assert all(rank.bound <= rank.bytes for rank in found.offloads)
    without = found.choices[0].plan.makespan
    if without is not None:
        assert savings.without is not None
        assert found.timeline.makespan <= savings.without <= without
        assert savings.gain == 1 - found.timeline.makespan / savings.without
    if not any(rank.offloads for rank in found.offloads):
        assert savings.without == found.timeline.makespan


@pytest.mark.long
def test_random_small_plans_are_sound() -> None:
    quicker = 0
    for seed in range(8):
        draw = random.Random(f"plan with offload {seed}")
        ranks, microbatches = draw.randint(2, 3), draw.randint(2, 5)
        placement = draw.choice((zb.Placement.linear(ranks), zb.Placement.vee(ranks)))
        stages = placement.num_stages
        forward, backward, weight = ([draw.randint(2, 9) / 2 for _ in range(stages)] for _ in range(3))
        held = [draw.randint(1, 6) * MB for _ in range(stages)]
        left, comm = [size // 2 for size in held], draw.choice((0.0, 0.25))
        costs = zb.Costs.from_ms(forward, backward, weight, comm, held_after_f=held, held_after_b=left)
        one = [sum(size for size, home in zip(held, placement.routes[0], strict=True) if home == rank) for rank in range(ranks)]
        limits = zb.Limits(tuple(round(draw.uniform(1, 2) * size) for size in one))
        link = HostLink(draw.choice((1e9, 4e9, 1e11)), draw.choice((1e9, 4e9)), draw.choice((0, 10_000)))
        found = zb.plan(costs, microbatches, limits, host=link, placements=placement, seconds=0)
        require_sound(found, limits)
        quicker += (savings_of(found).gain or 0) > 0
    assert quicker >= 4  # offload is of use on most of these, so a planner that tries none fails here


def test_a_budget_in_evaluations_gives_the_same_plan_again_and_a_better_one_than_none() -> None:
    work, slow = zb.Workload.uniform(4, times=(10, 10, 10)), HostLink(12e9 / 9, 12e9 / 9)  # a microbatch of a rank takes 9 ms
    least = zb.plan(work, 6, 2, host=slow, placements="vee", seconds=0)
    again = [zb.plan(work, 6, 2, host=slow, placements="vee", evaluations=100) for _ in range(2)]
    assert again[0].schedule == again[1].schedule
    assert again[0].offloads == again[1].offloads
    assert (again[0].makespan or 0) < (least.makespan or 0)
    for found in (least, again[0]):
        require_sound(found, zb.Limits((24 * MB,) * 4))
    states(str(least.savings[0]), f"{savings_of(least).bound.time / MB:g} ms", "schedule")


def test_an_order_that_is_slow_with_what_it_must_move_may_be_the_quickest_with_other_offloads() -> None:
    """Of the orders that are quick with what they must move none comes below 200 ms here."""
    link = HostLink(24e9 / 21, 24e9 / 21)  # a microbatch of a rank, whose passes take 30 ms, is there and back in 21 ms
    found = zb.plan(zb.Workload.uniform(3, times=(10, 10, 10)), 6, 1.5, host=link, placements="vee", evaluations=200)
    require_sound(found, zb.Limits((18 * MB,) * 3))
    assert (found.makespan or 0) < 195 * MB


def test_what_fits_in_no_other_way_fits_with_offload() -> None:
    """Three quarters of a microbatch hold one of the two stages of a rank at a time."""
    found = zb.plan(zb.Workload.uniform(2, times=(10, 10, 10)), 2, 0.75, host=LINK, placements="vee", seconds=0)
    require_sound(found, zb.Limits((9 * MB,) * 2))
    savings = savings_of(found)
    assert found.choices[0].plan.order is None
    assert savings.without is savings.gain is None
    states(str(savings), "nothing")
    assert savings.to_dict()["without_ms"] is None


def test_nothing_moves_where_there_is_room() -> None:
    found = zb.plan(zb.Workload.uniform(2, times=(10, 10, 10)), 2, 9, host=LINK, placements="linear", seconds=0)
    assert found.makespan == savings_of(found).without == found.choices[0].plan.makespan
    assert not any(rank.offloads for rank in found.offloads)
    states(str(savings_of(found)), "no", "Offload")


def test_what_cannot_be_planned_is_reported() -> None:
    work = zb.Workload.uniform(2, times=(10, 10, 10))
    with raises(zb.InputError, "schedule", "offloaded", "fits"):
        zb.plan(work, 2, 0.5, host=LINK, placements="linear", seconds=0)
    with raises(zb.InputError, "20,000", "24,000"):
        zb.plan(work, 4000, 2, host=LINK, placements="linear")
    with raises(zb.InputError, "host", "memory"):
        zb.plan(work, 2, host=LINK)


PAGE = (Path(__file__).parents[2] / "docs/offload.md").read_text(encoding="utf-8")
VERB = ("plan", "--ranks", "2", "--microbatches", "4", "--times", "10,10,10", "--placement", "linear", "--memory", "1", "--budget", "0")


def output(*words: str) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_of_the_page_says_what_the_page_says() -> None:
    (command,) = re.findall(r"^    zerobubble (plan .*)$", PAGE, re.MULTILINE)
    (answer,) = re.findall(r"^> (Savings of offload.*(?:\n> .*)*)$", PAGE, re.MULTILINE)
    assert " ".join(answer.replace("\n> ", " ").split()) in " ".join(output(*shlex.split(command)).split())


def small_plan() -> Plan:
    return zb.plan(zb.Workload.uniform(3, (10, 10, 10)), 6, 1.5, host=LINK, placements=["linear", "vee"], seconds=0)


def test_a_plan_with_offload_survives_its_file(tmp_path: Path) -> None:
    found, file = small_plan(), tmp_path / "plan.json"
    zb.io.save_plan(found, file)
    loaded = zb.io.load_plan(file)
    assert loaded.offloads == found.offloads
    assert any(rank.offloads for rank in loaded.offloads)
    assert (loaded.problem, loaded.schedule, loaded.bound) == (found.problem, found.schedule, found.bound)
    assert loaded.timeline == found.timeline
    assert loaded.makespan == found.makespan
    assert loaded.peaks == tuple(rank.peak_bytes for rank in found.offloads)
    assert zb.io.loads(zb.io.dumps(loaded)) == loaded


def test_a_saved_plan_with_offload_is_shown_compared_and_made_anew(tmp_path: Path) -> None:
    file, again = tmp_path / "plan.json", tmp_path / "again.json"
    shape = "plan -p 3 -m 6 --times 10,10,10 --memory 1.5 --offload 3 --placement linear,vee --evaluations 0"
    answer = output(*shape.split(), "-o", str(file))
    loaded = zb.io.load_plan(file)
    assert loaded.offloads == small_plan().offloads
    shown = json.loads(output("show", str(file), "--json"))
    assert shown["makespan_ms"] == (loaded.makespan or 0) / 1e6
    assert [rank["bytes"] for rank in shown["offload"]["ranks"]] == [rank.bytes for rank in loaded.offloads]
    assert "copies: > to the host, < back" in output("show", str(file))
    assert loaded.timeline is not None
    assert output("make", str(file), "--format", "perfetto") == perfetto_json(loaded.timeline)
    drawn = output("make", str(file), "--format", "svg")
    assert drawn == timeline_svg(loaded.timeline, title=ElementTree.fromstring(drawn).findtext("{*}title") or "")
    with_copies, plain = json.loads(output("compare", str(file), "1f1b", "--json"))
    assert with_copies["makespan_ms"] == shown["makespan_ms"]
    idle = 3 * with_copies["makespan_ms"] - 3 * 6 * 30
    assert sum(with_copies["idle_ms"].values()) == pytest.approx(idle)
    assert sum(sum(rank.values()) for rank in with_copies["idle_ms_per_rank"]) == pytest.approx(idle)
    assert "copies" not in plain["idle_ms"]
    assert with_copies["peak_microbatches"] <= 1.5
    states(output("compare", str(file), "1f1b"), "copies")
    anew = output("plan", "--costs", str(file), "--placement", "linear,vee", "--evaluations", "0", "-o", str(again))
    assert anew.split("Savings of offload")[1] == answer.split("Savings of offload")[1]
    assert zb.io.load_plan(again).problem == loaded.problem
    assert zb.io.load_plan(again).offloads == loaded.offloads
    refused = CliRunner().invoke(main, ["pareto", "--costs", str(file)])
    states(" ".join(refused.output.split()), "offload", "pareto")


def test_a_saved_plan_keeps_its_offloads_with_other_costs_or_is_refused(tmp_path: Path) -> None:
    file, costs = tmp_path / "plan.json", tmp_path / "costs.json"
    found = small_plan()
    zb.io.save_plan(found, file)
    planned, *_ = json.loads(output("compare", str(file), "1f1b", "--json"))
    shown = json.loads(output("show", str(file), "--times", "20,20,20", "--json"))
    moved = [[one._asdict() for one in rank.offloads] for rank in found.offloads]
    assert [rank["offloads"] for rank in shown["offload"]["ranks"]] == moved
    microbatches = [rank.bytes / 12e6 for rank in found.offloads]
    assert [rank["bytes"] / shown_bytes(found) for rank in shown["offload"]["ranks"]] == pytest.approx(microbatches)
    copied = {copy["end"] - copy["start"] for rank in shown["offload"]["ranks"] for copy in rank["copies"]}
    assert copied == {3_000_000 // found.schedule.placement.stages_per_rank}  # as in the plan, where 12 MB take 3 ms
    compared, _ = json.loads(output("compare", str(file), "1f1b", "--times", "20,20,20", "--json"))
    assert compared["makespan_ms"] == shown["makespan_ms"] > planned["makespan_ms"]
    assert compared["peak_microbatches"] == planned["peak_microbatches"] <= 1.5
    assert "offload" in json.loads(output("show", str(file), "--times", "20,20,20", "--offload", "3", "--memory", "1.5", "--json"))
    costs.write_text(zb.io.dumps(zb.Costs.from_ms(*[[10.0] * found.schedule.num_stages] * 3, held_after_f=[5] * found.schedule.num_stages)))
    for words in (["show", str(file)], ["compare", str(file)]):
        refused = CliRunner().invoke(main, [*words, "--costs", str(costs)])
        states(" ".join(refused.output.split()), "memory", "microbatches")
        assert refused.exit_code == 2


def test_a_plan_whose_offloads_do_not_fit_with_other_costs_is_refused(tmp_path: Path) -> None:
    work = zb.Costs.from_ms(*[[10.0] * 3] * 3, held_after_f=[4_000_000] * 3)
    found = zb.plan(work, 6, zb.Limits((6_000_000, 8_000_000, 8_000_000)), host=LINK, placements=zb.Placement.linear(3), seconds=0)
    assert any(rank.offloads for rank in found.offloads)
    file, lean, heavy = tmp_path / "plan.json", tmp_path / "lean.json", tmp_path / "heavy.json"
    zb.io.save_plan(found, file)
    lean.write_text(zb.io.dumps(zb.Costs.from_ms(*[[10.0] * 3] * 3, held_after_f=[2_000_000] * 3)))
    heavy.write_text(zb.io.dumps(zb.Costs.from_ms(*[[10.0] * 3] * 3, held_after_f=[8_000_000] * 3)))
    ranks = json.loads(output("show", str(file), "--costs", str(lean), "--json"))["offload"]["ranks"]
    assert [2 * rank["bytes"] for rank in ranks] == [rank.bytes for rank in found.offloads]
    assert ranks[0]["bound"] < found.offloads[0].bound
    refused = CliRunner().invoke(main, ["show", str(file), "--costs", str(heavy)])
    assert refused.exit_code == 2
    states(" ".join(refused.output.split()), 6000000, "limit")
    states(refused.output, "--costs")


def shown_bytes(found: Plan) -> int:
    """What costs from times count for a microbatch of a rank."""
    return 1_000_000 * found.schedule.placement.stages_per_rank


def test_a_file_whose_offloads_cannot_be_is_refused() -> None:
    data = json.loads(zb.io.dumps(small_plan()))
    rank, moved = next((rank, one["offloads"]) for rank, one in enumerate(data["offloads"]) if one["offloads"])

    def changed(**parts: object) -> list[dict[str, object]]:
        return [one | (parts if place == rank else {}) for place, one in enumerate(data["offloads"])]

    cases: list[tuple[dict[str, object], Stated]] = [
        ({"offloads": data["offloads"][1:]}, ("3 ranks", "offloads", 2)),
        ({"offloads": changed(offloads=[moved[0], *moved])}, ("2 times",)),
        ({"offloads": changed(offloads=[[*moved[0][:2], 10**6, *moved[0][3:]]])}, ("made=1000000",)),
        ({"offloads": changed(offloads=[moved[0][:5]])}, ("list", "offloads", "needed")),
        ({"offloads": changed(offloads=[], bound=0)}, (f"rank {rank}", "limit")),
        ({"offloads": changed(bound=10**15)}, ("offloads", 10**15)),
        ({"offloads": 3}, ("list", "offloads", "int")),
        ({"host": None}, ("limit", "bytes")),
        ({"host": data["host"] | {"to_host": 0}}, ("to", "host", "bytes", 0)),
        ({"host": 3}, ("host", "JSON", "int")),
    ]
    for change, stated in cases:
        with raises(zb.InputError, *stated):
            zb.io.loads(json.dumps(data | change))


def test_the_search_refuses_a_link_to_the_host() -> None:
    with raises(zb.InputError, "zb.plan"):
        zb.planning.solve(small_plan().problem, seconds=0)


def test_the_verb_shows_all_in_json_and_gives_the_order(tmp_path: Path) -> None:
    picture = tmp_path / "offload.svg"
    data = json.loads(output(*VERB, "--offload", "2,3", "--json", "--svg", str(picture)))
    offload = data["offload"]
    assert offload["makespan_ms"] == data["makespan_ms"]
    assert offload["lower_bound_ms"] <= offload["makespan_ms"] < offload["without_ms"] <= data["choices"][0]["makespan_ms"]
    assert offload["gain"] == pytest.approx(1 - offload["makespan_ms"] / offload["without_ms"])
    (first, *_) = offload["ranks"]
    assert first["bound"] <= first["bytes"]
    assert {copy["copying"]: copy["end"] - copy["start"] for copy in first["copies"]} == {"to host": 2_000_000, "from host": 3_000_000}
    assert "to host" in picture.read_text(encoding="utf-8")
    assert output(*VERB, "--offload", "2,3", "--format", "text") == offload["schedule"]
    in_bytes = ("--offload", "6GB,4GB", "--microbatch-bytes", "12MB")
    assert json.loads(output(*VERB, *in_bytes, "--json"))["offload"] == offload
    assert re.search(r"rank 0: \d offloads? of [\d.]+ microbatch", output(*VERB, *in_bytes))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--offload", "25GB"), "needs costs in bytes, which times lack: give --microbatch-bytes"),
        (("--offload", "fast"), "'fast' is neither bytes per second with a unit"),
    ],
)
def test_what_is_not_planned_with_offload_is_refused(words: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(main, [*VERB, *words])
    assert done.exit_code != 0
    assert says in " ".join(done.output.split()), done.output


def test_offload_needs_a_memory() -> None:
    done = CliRunner().invoke(main, ["plan", "--ranks", "2", "--microbatches", "2", "--offload", "1"])
    assert done.exit_code != 0
    assert "--offload needs --memory" in " ".join(done.output.split())


def test_the_period_of_a_plan_without_offloads_is_that_of_its_schedule() -> None:
    """The longest span of a rank is 269.15 ms."""
    work = zb.Workload.from_ms((15.6, 10.6, 7.6), (11.4, 5.9, 16.7), (17.8, 8.3, 17.3), (1.9, 1.9, 1.9))
    found = zb.plan(work, 6, 6, placements="vee", host=HostLink(1e12, 1e12), objective="period", evaluations=300)
    assert found.offloads == ()
    assert found.time == zb.simulation.period(found.schedule, found.costs) == 268_800_000
    assert zb.simulation.metrics(found.schedule, found.costs).span == 269_150_000
