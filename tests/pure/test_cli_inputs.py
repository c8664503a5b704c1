"""Every command takes a known schedule, a schedule file, a plan or PyTorch's CSV, and uses its costs unless options override them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.pure.test_cli import refused, run
from tests.refusals import states
from zerobubble import Costs, Limits, Placement, Workload
from zerobubble.cli import main
from zerobubble.export import dumps, loads, to_torch_csv
from zerobubble.io import load_plan, save_plan
from zerobubble.planning import plan

WORK = Workload.uniform(4, (18.522, 18.086, 9.337), 0.601, 0.941)
MEASURED = Costs((3, 5, 4, 6), (6, 9, 8, 12), (3, 4, 4, 7), (1, 0, 1), (100, 200, 150, 120), (60, 100, 80, 50), placement=Placement.vee(2))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the same schedule in every form, a plan of it, a run, and measured costs."""
    monkeypatch.chdir(tmp_path)
    found = plan(WORK, 8, 2.5, placements="vee", evaluations=0)
    save_plan(found, "plan.json")
    schedule = found.schedule
    Path("mine.txt").write_text(schedule.to_text())
    Path("mine.json").write_text(dumps(schedule))
    Path("mine.csv").write_text(to_torch_csv(schedule))
    Path("costs.json").write_text(dumps(MEASURED))
    Path("run.json").write_text(dumps(zb.simulate(schedule, WORK.costs(schedule.placement))))
    save_plan(plan(MEASURED, 6, Limits((700, 700)), evaluations=0), "measured.json")
    return tmp_path


def printed(command: str) -> str:
    result = run(*command.split())
    assert result.exit_code == 0, result.output
    return result.stdout


def output(command: str) -> Any:
    return json.loads(printed(f"{command} --json"))


SHAPED = "v-min --ranks 4 --microbatches 8"
ALL = (SHAPED, "mine.txt", "mine.json", "mine.csv", "plan.json")


@pytest.mark.parametrize("given", ALL)
def test_every_verb_takes_a_name_a_schedule_a_plan_or_a_csv(given: str) -> None:
    rows = load_plan("plan.json").schedule.rows
    assert output(f"show {given}")["num_stages"] == 8
    assert loads(printed(f"make {given} --format torch-csv")).rows == rows
    assert output(f"check {given}")["recognition"]["name"] == "v-min"
    assert [line["num_stages"] for line in output(f"compare {given}")] == [8]
    assert [line["num_stages"] for line in output(f"table {given}")] == [8]
    name = given.split()[0]
    compared = output(f"diff {name} run.json --times 18.522,18.086,9.337 --comm 0.601")
    assert compared["planned"] == compared["measured"] > 0


def test_show_draws_a_plan_with_its_own_costs() -> None:
    planned = load_plan("plan.json").timeline
    assert planned is not None
    shown = output("show plan.json")
    assert (shown["bubble_span"], shown["costs"]) == (planned.bubble_span, "costs of plan.json")
    assert shown["bubble_span"] != output("show mine.json")["bubble_span"]
    assert output("show plan.json --times 1,1,1")["bubble_span"] == output("show mine.json")["bubble_span"]
    assert f"bubble {100 * planned.bubble_span:.2f} %" in printed("show plan.json")


def test_a_plan_is_compared_and_drawn_by_the_work_it_was_made_for() -> None:
    ours, linear, copies = output("compare plan.json zb-h1 chimera")
    planned = load_plan("plan.json").timeline
    assert planned is not None
    assert ours["bubble_span"] == planned.bubble_span
    for line, name in ((linear, "zb-h1"), (copies, "chimera")):
        schedule = zb.make(name, 4, 8)
        assert line["bubble_span"] == zb.simulate(schedule, WORK.costs(schedule.placement)).bubble_span
    assert f"makespan {planned.makespan / 1e6:.4g} ms" in printed("make plan.json --format svg")
    assert max(event.get("ts", 0) for event in json.loads(printed("make plan.json --format perfetto"))["traceEvents"]) > 400_000


@pytest.mark.long
def test_a_table_has_the_times_of_a_plan() -> None:
    planned, named = output("table plan.json zb-h1")
    assert named["bubble"]["closed"] == pytest.approx(3 * (18.522 + 18.086 - 9.337 + 4 * 0.601))
    assert (planned["name"], planned["bubble_span"]) == ("plan.json", load_plan("plan.json").timeline.bubble_span)  # type: ignore[union-attr]
    states(refused("table", "measured.json"), "measured.json", "--times")


def test_measured_costs_come_from_a_costs_file_or_a_plan() -> None:
    schedule = load_plan("measured.json").schedule
    assert schedule is not None
    peaks = list(zb.simulation.peak_memory(schedule, MEASURED))
    for command in ("compare measured.json", "compare measured.json --costs costs.json", "compare measured.json --costs measured.json"):
        assert output(command)[0]["peak_bytes_per_rank"] == peaks
    assert [rank["peak_bytes"] for rank in output("show measured.json")["ranks"]] == peaks
    assert " B\n" in printed("show measured.json")
    states(refused(*["show", "interleaved-1f1b", "--ranks", "2", "--microbatches", "6", "--costs", "costs.json"]), "rank 1", "costs")


def test_plans_for_different_work_are_not_compared_by_either() -> None:
    save_plan(plan(Workload.uniform(4, (1, 2, 1)), 8, 3, placements="linear", evaluations=0), "other.json")
    said = "plan.json and other.json were planned for different work"
    assert said in refused("compare", "plan.json", "other.json")
    assert len(output("compare plan.json other.json --times 1,1,1")) == 2


def test_a_schedule_with_copies_needs_equal_ranks() -> None:
    save_plan(plan(Workload.from_ms([1, 2], [1, 2], [1, 2], [0, 0]), 4, placements="linear", evaluations=0), "uneven.json")
    said = "chimera has each stage on two ranks, but in uneven.json the work of ranks differs: give --times"
    assert said in refused("compare", "uneven.json", "chimera")


def test_costs_measured_on_a_placement_are_planned_on_it() -> None:
    command = "plan --costs costs.json --microbatches 6 --evaluations 0"
    assert [choice["placement"] for choice in output(command)["choices"]] == ["vee"]
    assert loads(output(command)["csv"]).placement == Placement.vee(2)
    assert output(f"{command} --placement vee --ranks 2")["csv"] == output(command)["csv"]
    for wrong in ("--placement linear", "--ranks 4"):
        said = f"{wrong} does not fit costs.json, which was measured on a vee placement over 2 ranks: leave the option out"
        assert said in refused(*f"{command} {wrong}".split())


def test_a_plan_is_made_anew_from_what_it_was_made_for() -> None:
    again = output("plan --costs plan.json --placement vee --evaluations 0")
    best = load_plan("plan.json")
    assert best.timeline is not None
    assert (again["bubble_span"], again["peak_microbatches"]) == (best.timeline.bubble_span, best.peak_microbatches)
    assert len(output("plan --costs plan.json --evaluations 0")["choices"]) == 7, "its work fits every placement"
    assert output("plan --costs plan.json --placement vee --evaluations 0 --memory 4")["bubble_span"] < again["bubble_span"]
    printed("plan --costs measured.json --microbatches 12 --evaluations 0 -o again.json")
    loaded = load_plan("again.json").problem
    assert (loaded.costs, loaded.limits, loaded.num_microbatches) == (MEASURED, Limits((700, 700)), 12)
    states(refused("plan", "--costs", "measured.json", "--placement", "linear"), "--placement", "measured.json")
    states(refused("plan", "--costs", "plan.json", "--ranks", "3"), "--ranks", 3, "plan.json", 4)
    states(refused("plan", "--costs", "run.json"), "run.json", "timeline", "costs")


@pytest.mark.parametrize("file", ["plan.json", "measured.json", "costs.json"])
def test_a_front_is_drawn_for_costs_and_plans(file: str) -> None:
    microbatches = "--microbatches 6" if file == "costs.json" else ""
    points = output(f"pareto --costs {file} {microbatches} --placement vee --memory 1:3:1 --budget 0")
    assert [point["best"] is not None for point in points] == [True, True, True]
    assert all(point["best"]["peak_microbatches"] <= point["memory"] + 0.01 for point in points)


def test_a_plan_without_a_limit_is_made_anew_without_one() -> None:
    save_plan(plan(WORK, 4, placements="linear", evaluations=0), "roomy.json")
    printed("plan --costs roomy.json --microbatches 24 --placement linear --evaluations 0 -o again.json")
    assert load_plan("again.json").problem.limits.memory[0] > 24 * WORK.held_after_f[0]


def test_no_bytes_are_drawn_where_none_were_given() -> None:
    for command in ("show zb-h1 --ranks 4 --microbatches 8", "show plan.json"):
        printed(f"{command} --svg picture.svg")
        picture = Path("picture.svg").read_text()
        assert re.findall(r">([0-9.]+ microbatch(?:es)?)<", picture)
        assert not re.findall(r">[0-9.]+ [kMG]?B<", picture)
    printed("show measured.json --svg picture.svg")
    assert re.findall(r">[0-9.]+ B<", Path("picture.svg").read_text())


def test_times_do_not_belong_to_a_form_without_them() -> None:
    states(refused("make", "plan.json", "--times", "1,1,1"), "--times", "--format")


def test_what_holds_no_schedule_says_what_it_holds() -> None:
    for verb in ("show", "make", "check", "compare", "table"):
        states(refused(verb, "costs.json"), "costs", "stages")
    states(refused("block", "v-haff", "--ranks", "4"), "v-haff", "v-half")


def test_a_plan_for_layers_is_not_written_as_even_layers() -> None:
    layers = [zb.partition.Layer(2, 2, 1, 10, 5)] * 6 + [zb.partition.Layer(9, 9, 4, 10, 5)]
    save_plan(zb.plan(layers, 4, placements=Placement.linear(2), evaluations=100), "layers.json")
    said = refused("make", "layers.json", "--format", "megatron-layout", "--layers", "7")
    assert re.search(r"layers.json has stages of \d \d layers, and --format megatron-layout divides layers evenly", said)


def test_measured_costs_without_bytes_are_reported_in_microbatches() -> None:
    Path("times.json").write_text(dumps(replace(Costs.from_ms((1, 2), (1, 2), (1, 1)), placement=Placement.linear(2))))
    (line,) = output("compare 1f1b --ranks 2 --microbatches 4 --costs times.json")
    assert "peak_bytes" not in line
    assert line["peak_microbatches_per_rank"] == [2, 1]


def test_costs_of_a_schedule_with_copies_are_planned_on_its_first_route() -> None:
    costs = replace(Costs.uniform(4), placement=Placement.bidirectional(4))
    Path("copies.json").write_text(dumps(costs))
    found = output("plan --costs copies.json --placement linear --microbatches 4 --evaluations 0")
    assert loads(found["csv"]).placement == Placement.linear(4)
    said = "a placement of 1 route, 'bidirectional' has 2"
    assert said in refused("plan", "--costs", "copies.json", "--microbatches", "4")


@pytest.mark.parametrize(("given", "meant"), [("--seconds", "--budget"), ("--pp-size", "--ranks"), ("--memroy", "--memory")])
def test_an_unknown_option_names_the_one_that_was_meant(given: str, meant: str) -> None:
    states(refused("plan", given, "3"), given, meant)


@pytest.mark.parametrize("arguments", ["plan -p 4 -m 8 -o", "pareto -p 4 -m 8 --svg", "doctor --measure"])
def test_an_output_that_cannot_be_written_is_refused_first(arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = arguments.split()[0]
    work = {"doctor": "examine"}.get(command, command)
    monkeypatch.setattr(import_module(f"zerobubble.cli.{command}"), work, lambda *_, **__: pytest.fail("it computes"))
    result = CliRunner().invoke(main, [*arguments.split(), str(tmp_path / "none" / ("x.svg" if "svg" in arguments else "x.json"))])
    assert result.exit_code == 2
    assert "none" in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--held", "nan"], "--held"),
        (["--what-if", "nan"], "--what-if"),
        (["--head", "1,1,1", "--head-slowdown", "nan"], "--head-slowdown"),
        (["--weights", "1GB", "--within", "nan"], "--within"),
        (["--microbatch-costs", ""], "--microbatch-costs"),
        (["--links", ""], "--links"),
        (["--layers", ""], "path"),
        (["--costs", ""], "path"),
        (["--layers", "none.json"], "none.json"),
    ],
)
def test_an_option_without_a_usable_value_is_named(arguments: list[str], named: str) -> None:
    Path("none.json").write_text('{"format": "zerobubble layers 1", "layers": []}')
    states(refused("plan", "-p", "2", "-m", "4", "--evaluations", "0", *arguments, "-o", "new.json"), named)
    assert not Path("new.json").exists()


def test_a_front_ignores_nothing_that_costs_time() -> None:
    save_plan(zb.plan(WORK, 4, placements="linear", shares=(1, 2, 1, 4), evaluations=0), "unequal.json")
    Path("head.json").write_text(dumps(MEASURED.with_divided_head((1, 1, 1))))
    Path("shares.json").write_text(dumps(replace(MEASURED, shares=(1, 2, 1))))
    states(refused("pareto", "--costs", "unequal.json"), "unequal.json", "pareto", "microbatches")
    states(refused("pareto", "-m", "3", "--costs", "head.json"), "head.json", "pareto", "head")
    states(refused("pareto", "-m", "3", "--costs", "shares.json"), "shares.json", "pareto", "microbatches")


def test_a_block_needs_a_microbatch() -> None:
    states(refused("block", "v-half", "--ranks", "2", "--microbatches", "0"), "--microbatches", 0)
