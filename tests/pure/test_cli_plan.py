"""`zerobubble plan` and `zerobubble pareto`: what they print, save and draw, and what they say of wrong input."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import zerobubble as zb
from zerobubble.cli import main
from zerobubble.cli import plan as verb
from zerobubble.export.schedule_file import load_schedule
from zerobubble.plan.attempt import News
from zerobubble.plan.families import FAMILIES

SHAPE = ("--ranks", "8", "--microbatches", "24", "--times", "18.522,18.086,9.337", "--comm", "0.601", "--held", "0.941")
WORK_8 = zb.Workload.uniform(8, (18.522, 18.086, 9.337), 0.601, 0.941)


def run(command: str, *options: str) -> Result:
    return CliRunner().invoke(main, [command, *options])


def printed(command: str, *options: str) -> str:
    result = run(command, *options)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def refused(command: str, *options: str) -> str:
    result = run(command, *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    return result.stderr


def test_json_has_the_figures_and_a_csv_that_gives_them_again() -> None:
    told = json.loads(printed("plan", *SHAPE, "--memory", "8", "--placement", "vee", "--evaluations", "3000", "--json"))
    assert (told["placement"], told["seconds"] >= 0, [choice["placement"] for choice in told["choices"]]) == ("vee", True, ["vee"])
    schedule = load_schedule(told["csv"])
    assert zb.schedule_faults(schedule) == ()
    assert schedule.placement == zb.Placement.vee(8)
    costs = WORK_8.costs(schedule.placement)
    timeline = zb.simulate(schedule, costs)
    assert (told["bubble_span"], told["bubble_makespan"]) == (timeline.bubble_span, timeline.bubble_makespan)
    assert told["peak_microbatches"] == max(zb.peak_memory(schedule, costs)) / WORK_8.held_after_f[0] <= 8
    assert told["lower_bound_span"] == pytest.approx(0.0703, abs=5e-5)
    assert told["bubble_span"] >= told["lower_bound_span"]
    assert (told["status"] == "optimal") == (told["gap"] == 0)
    assert told["gap"] == pytest.approx((1 - told["lower_bound_span"]) / (1 - told["bubble_span"]) - 1, abs=1e-9)


def test_a_budget_of_0_gives_the_best_seed_of_each_placement() -> None:
    lines = printed("plan", *SHAPE, "--memory", "8", "--budget", "0").splitlines()
    assert lines[0].split()[:3] == ["placement", "span", "bubble"]
    assert {line.split()[0] for line in lines[1:8]} == set(FAMILIES)
    assert lines[1].endswith("interleaved-zb")
    linear = next(line.split() for line in lines[1:8] if line.startswith("linear"))
    assert linear == ["linear", "15.85", "%", "15.85", "%", "15.85", "%", "8", "336", "optimal", "zb-heuristic"]


def test_the_csv_alone_is_printed_where_asked() -> None:
    csv = printed("plan", *SHAPE, "--memory", "8", "--placement", "linear", "--budget", "0", "--format", "torch-csv")
    found = zb.plan(WORK_8, 24, 8, placements="linear", seconds=0)
    assert load_schedule(csv).rows == found.schedule.rows


def test_a_saved_plan_is_loaded_and_read_by_every_verb(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    printed("plan", *SHAPE, "--memory", "5", "--placement", "vee", "--budget", "0", "-o", file)
    solved = zb.load_plan(file)
    assert solved.schedule is not None
    assert (solved.schedule.name, solved.problem.limits.memory) == ("v-half", (60_000_000,) * 8)
    assert "v-half" in printed("check", file)
    assert json.loads(printed("show", file, "--json"))["name"] == "v-half"


def test_makespan_is_an_objective_too() -> None:
    shape = ("--ranks", "4", "--microbatches", "8", "--memory", "8", "--placement", "linear", "--budget", "0", "--json")
    span, makespan = (json.loads(printed("plan", *shape, "--objective", aim)) for aim in ("span", "makespan"))
    assert span["bubble_span"] == 0 < span["bubble_makespan"]
    assert makespan["bubble_makespan"] <= span["bubble_makespan"]
    assert makespan["gap"] == pytest.approx((1 - makespan["lower_bound_makespan"]) / (1 - makespan["bubble_makespan"]) - 1, abs=1e-9)


def test_a_baseline_is_asked_instead() -> None:
    told = json.loads(printed("plan", *SHAPE, "--memory", "8", "--baseline", "zb-heuristic", "--json"))
    assert (told["placement"], told["name"], round(told["bubble_span"], 4)) == ("linear", "zb-heuristic", 0.1585)
    assert "no baseline 'zb-heur': did you mean 'zb-heuristic'" in refused("plan", *SHAPE, "--baseline", "zb-heur")


# Times of each rank.


def written(tmp_path: Path, data: Any) -> str:
    file = tmp_path / "ranks.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(file)


COLUMNS = {"forward": [1, 2, 1.5], "backward": [1, 2, 1], "weight": [1, 1, 1]}
WORK = zb.Workload.from_ms([1, 2, 1.5], [1, 2, 1], [1, 1, 1], [0.25] * 3, 0.5)


@pytest.mark.parametrize(
    "data",
    [
        COLUMNS,
        COLUMNS | {"comm": [0.25, 0.25], "held": 0.5},
        COLUMNS | {"comm": [0.25] * 3},
        [[1, 1, 1], [2, 2, 1], [1.5, 1, 1]],
        WORK.to_dict(),
    ],
    ids=["columns", "links", "ring", "rows", "workload"],
)
def test_times_of_each_rank_come_from_a_file(tmp_path: Path, data: Any) -> None:
    options = ("--per-rank", written(tmp_path, data), "--microbatches", "6", "--memory", "3", "--comm", "0.25", "--held", "0.5")
    told = json.loads(printed("plan", *options, "--placement", "linear", "--budget", "0", "--json"))
    timeline = zb.simulate(load_schedule(told["csv"]), WORK.costs(zb.Placement.linear(3)))
    assert told["bubble_span"] == timeline.bubble_span


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([[1, 1, 1], [1, -2, 1]], "backward of rank 1 must be a finite number >= 0, got -2"),
        ('{"forward": [1, 1], "backward": [1, 1], "weight": [NaN, 1]}', "weight of rank 0 must be a finite number >= 0, got nan"),
        ({"forward": [1, 1], "backward": [1], "weight": [1, 1]}, "backward of rank 1 must be a finite number >= 0, got None"),
        ([[1, 1, 1], [1, 1]], "rank 1 needs three times in ms"),
        ({"forward": [1, 1], "backward": [1, 1]}, "the list 'weight' is missing"),
        (COLUMNS | {"wieght": [1]}, "'wieght' is unknown"),
        (COLUMNS | {"comm": [1]}, "rank 1 has no time of comm"),
        (COLUMNS | {"held": "x"}, "held of rank 0"),
        ([], "at least one rank"),
        ("{", "line 1 is not JSON"),
        ("3", "expected an object or a list"),
    ],
)
def test_wrong_times_name_their_rank(tmp_path: Path, data: Any, reason: str) -> None:
    assert reason in refused("plan", "--per-rank", written(tmp_path, data), "--microbatches", "4")


def test_the_file_and_the_options_must_agree(tmp_path: Path) -> None:
    assert "--ranks 4 does not fit" in refused("plan", "--per-rank", written(tmp_path, COLUMNS), "--ranks", "4", "--microbatches", "4")


# Wrong requests.


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--ranks", "4"), "plan needs --microbatches M"),
        (("--ranks", "0", "--microbatches", "4"), "--ranks must be at least 1, got 0"),
        ((*SHAPE, "--memory", "0.4"), "--memory 0.4 cannot hold one microbatch: rank 0, as every rank, lacks room for 0.6 of it"),
        ((*SHAPE, "--memory", "-3"), "above 0, got -3"),
        ((*SHAPE, "--memory", "nan"), "above 0, got nan"),
        ((*SHAPE, "--placement", "vee,loped-3"), "no placement 'loped-3': did you mean 'looped-3'"),
        ((*SHAPE, "--budget", "-1"), "--budget"),
        ((*SHAPE, "--objective", "speed"), "--objective"),
        ((*SHAPE[:4], "--times", "1,nan,1"), "nan is not in 0 to"),
        ((*SHAPE[:4], "--times", "1,1"), "has 2 times"),
        ((*SHAPE, "--json", "--format", "torch-csv"), "contradict each other"),
        (("--ranks", "4000", "--microbatches", "4000"), "the command line takes at most"),
        (("--ranks", "400", "--microbatches", "1600", "--placement", "wave-4"), "the command line takes at most"),
        ((*SHAPE, "--placement", "linear", "--budget", "0", "-o", "no/such/folder/plan.json"), "cannot write"),
    ],
)
def test_wrong_requests_are_one_sentence(options: tuple[str, ...], reason: str) -> None:
    assert reason in refused("plan", *options)


# The bar.


def test_the_bar_shows_bubble_and_gap_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(verb, "Console", lambda **_: Console(file=drawn, force_terminal=True, width=120))
    with verb.progress_bar(5.0) as watch:
        assert watch is not None
        watch(News("wave-4", 0.0457, 0.012, "annealing"))
    assert "wave-4: bubble 4.57 %, gap 1.20 %, annealing" in drawn.getvalue()
    with verb.progress_bar(0.0) as watch:
        assert watch is None
    monkeypatch.setattr(verb, "Console", lambda **_: Console(file=drawn, force_terminal=False))
    with verb.progress_bar(5.0) as watch:
        assert watch is None


# The front.

FRONT = ("--ranks", "4", "--microbatches", "8", "--placement", "linear,vee", "--budget", "0")


def test_a_front_has_a_point_for_each_limit(tmp_path: Path) -> None:
    svg, html = tmp_path / "front.svg", tmp_path / "front.html"
    told = json.loads(printed("pareto", *FRONT, "--memory", "0.5:4:0.5", "--json", "--svg", str(svg), "--html", str(html)))
    assert [point["memory"] for point in told] == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert told[0]["best"] is None
    found = [point["best"]["bubble_span"] for point in told[1:]]
    assert found == sorted(found, reverse=True)
    assert all(point["lower_bound"] <= point["best"]["bubble_span"] + 1e-12 for point in told[1:])
    circles = list(ElementTree.fromstring(svg.read_text()).iter("{http://www.w3.org/2000/svg}circle"))
    assert sum("best" in circle.get("class", "") for circle in circles) == 7
    heights = [float(circle.get("cy", "")) for circle in circles if "best" in circle.get("class", "")]
    assert heights == sorted(heights), "a smaller bubble is further down"
    page = html.read_text()
    assert page.count("<tr>") == 9
    assert "nothing fits" in page


def test_a_front_is_a_table_over_the_usual_limits() -> None:
    lines = printed("pareto", *FRONT).splitlines()
    assert [float(line.split()[0]) for line in lines[1:]] == [1 + n / 2 for n in range(15)]
    assert [line.split()[1:4] for line in (lines[7], lines[-1])] == [["vee", "0.00", "%"], ["linear", "0.00", "%"]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((*FRONT, "--memory", "4"), "'4' is not LO:HI:STEP"),
        ((*FRONT, "--memory", "4:2:1"), "has no limit"),
        ((*FRONT, "--memory", "1:4:0"), "has no limit"),
        ((*FRONT, "--memory", "1:40:0.1"), "more than 100 limits"),
        ((*FRONT, "--memory", "0.1:0.5:0.1"), "no schedule fits at any of the limits: rank 0"),
        (("--ranks", "4"), "pareto needs --microbatches M"),
    ],
)
def test_a_front_that_cannot_be_is_refused(options: tuple[str, ...], reason: str) -> None:
    assert reason in refused("pareto", *options)
