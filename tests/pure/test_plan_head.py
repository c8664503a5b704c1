"""Plans with a head, whole on the last stage or divided: the fastest that fits, in Python and on the command line.

No plan beats its bound. A plan survives its file together with the head.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.refusals import Stated, raises, states
from tests.thinned import every_of
from zerobubble import Costs, InputError, Limits, Placement, Schedule, make, schedule_faults, simulate
from zerobubble.bounds import bounds_with_divided_head, lower_bounds
from zerobubble.cli import main
from zerobubble.io import dumps, load_plan, loads, save_plan
from zerobubble.ir import Op
from zerobubble.planning import Head, Objective, Plan, Workload, solve
from zerobubble.planning.axes.head import HeadOption, HeadSavings
from zerobubble.planning.problem.workload import RANK_BYTES
from zerobubble.schedules import with_vocabulary
from zerobubble.simulation import peak_memory
from zerobubble.units import show_percent

WORK = Workload.uniform(4, times=(10, 10, 8), comm=0.3)
HEAD = (12.0, 12.0, 12.0)
SHAPE = ["plan", "-p", "4", "-m", "8", "--times", "10,10,8", "--comm", "0.3", "--head", "12,12,12", "--evaluations", "0"]


def planned(memory: float | None = 6, head: tuple[float, ...] = HEAD, objective: str | None = None, **head_options: float) -> Plan:
    """The plan with a head that keeps `held` of what a rank saves of a microbatch."""
    held = head_options.pop("held", 0.0) * RANK_BYTES
    placed = Head(head, held, **head_options)  # type: ignore[arg-type]
    return zb.plan(WORK, 8, memory, head=placed, placements=["linear", "vee"], objective=objective, evaluations=0)


def savings_of(found: Plan) -> HeadSavings:
    savings = found.saving(HeadSavings)
    assert savings is not None
    return savings


def ways_of(found: Plan) -> tuple[HeadOption, ...]:
    return savings_of(found).ways


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(("memory", "objective"), every_of(5, [None, 6, 4, 2], ["period", "makespan"]))
def test_every_way_is_legal_fits_and_takes_what_it_says(memory: float | None, objective: str) -> None:
    found = planned(memory, objective=objective, held=0.4, collective=0.2, slowdown=1.2)
    ways = ways_of(found)
    assert ways[0].algorithm == 0
    for way in ways:
        plan = way.plan
        assert schedule_faults(plan.schedule) == ()
        assert plan.schedule.has_divided_head == (way.algorithm > 0)
        timeline = simulate(plan.schedule, plan.costs)
        assert (way.time, plan.makespan) == (Objective(objective).time_of(plan.schedule, plan.costs, timeline), timeline.makespan)
        assert plan.peaks == peak_memory(plan.schedule, plan.costs)
        assert max(plan.peaks) <= (memory or 12) * RANK_BYTES
        assert savings_of(found).bound.time <= way.bound.time <= plan.bound.time <= way.time
    assert found.time == min(way.time for way in ways) == found.choices[0].plan.time
    assert {choice.plan.schedule for choice in found.choices} == {way.plan.schedule for way in ways}


def test_a_heavy_head_is_divided_and_a_light_one_on_slow_links_is_not() -> None:
    heavy = planned()
    assert heavy.schedule.has_divided_head
    assert (heavy.time or 0) < 0.75 * ways_of(heavy)[0].time
    assert re.search(r"The head divided by algorithm . takes .* % less than .* with it whole on the last stage; ranks hold", str(heavy))
    light = planned(head=(0.1, 0.1, 0.1), slowdown=3, collective=20)
    assert light.schedule == ways_of(light)[0].plan.schedule
    states(str(light), "head", "stage")
    assert savings_of(light).bound == savings_of(light).best.bound  # divided, the last B would wait for two collectives


def test_a_whole_head_is_planned_as_part_of_the_last_stage() -> None:
    way = ways_of(planned())[0]
    costs = WORK.costs(way.plan.placement)
    assert way.plan.costs.forward == (*costs.forward[:-1], costs.forward[-1] + 12_000_000)
    assert way.time >= 8 * (28 + 36) * 1_000_000


def test_room_that_is_left_for_what_division_holds_is_used() -> None:
    """Five microbatches are too few to divide a schedule that fills them; one that is planned for four or three fits."""
    found = planned(5)
    assert {way.algorithm for way in ways_of(found)} == {0, 1, 2}
    filled = zb.plan(WORK, 8, 5, placements=["linear", "vee"], evaluations=0)
    over = [with_vocabulary(choice.plan.schedule, 1) for choice in filled.choices if choice.plan.order is not None]
    for schedule in over:
        assert max(peak_memory(schedule, WORK.costs(schedule.placement).with_divided_head((3, 3, 3)))) > 5 * RANK_BYTES


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "v-half", "v-min", "interleaved-1f1b", "gpipe"])
def test_no_divided_schedule_beats_the_bound(name: str) -> None:
    plain = make(name, 4, 8)
    stages = plain.num_stages
    for times in ([1.0 + stage for stage in range(stages)], [2.0] * stages, [3.0] + [1.0] * (stages - 1)):
        costs = Costs.from_ms(times, times[::-1], times, 0.3).with_divided_head((1, 2, 3), collective=0.1)
        bounds = bounds_with_divided_head(plain.placement, 8, costs, None)
        for algorithm in (1, 2):
            timeline = simulate(with_vocabulary(plain, algorithm, costs), costs)
            assert bounds.span.time <= timeline.span
            assert bounds.makespan.time <= timeline.makespan


def test_the_bound_is_met_and_counts_the_head() -> None:
    row = ["0F0", "0S0", "0T0", "0B0", "0W0"]
    alone = Schedule("alone", Placement.linear(1), 1, (tuple(map(Op.parse, row)),))
    for collective in (0.0, 2.5):  # no message, and so no collective, leaves the rank
        costs = Costs.uniform(1, (1, 1, 1)).with_divided_head((1, 1, 1), collective=collective)
        assert bounds_with_divided_head(alone.placement, 1, costs, None).span.time == simulate(alone, costs).span == 6_000_000
    assert lower_bounds(alone.placement, 1, costs, None).span.time == 3_000_000


def test_the_last_b_waits_for_the_parts_of_other_ranks() -> None:
    """F of both stages, the part of the head on the other rank, B of both and W: with a message each way, and two for the head."""
    costs = Costs.uniform(2, (1, 1, 1), 0.5).with_divided_head((2, 1, 1), collective=0.25)
    assert bounds_with_divided_head(Placement.linear(2), 1, costs, None).span.time == (2 + 0.5 + 0.25 + 3 + 0.25 + 2 + 0.5 + 1) * 1_000_000


def test_no_order_of_two_ranks_beats_the_bound() -> None:
    """All orders of one microbatch on two ranks that can run."""
    costs = Costs.uniform(2, (1, 2, 3), 0.5).with_divided_head((2, 1, 4), collective=0.25)
    bounds = bounds_with_divided_head(Placement.linear(2), 1, costs, None)
    rows = [[[Op.parse(f"{rank}{kind}0") for kind in ("F", "S", *order)] for order in permutations("TBW")] for rank in (0, 1)]
    schedules = [Schedule("any", Placement.linear(2), 1, (tuple(one), tuple(two))) for one in rows[0] for two in rows[1]]
    able = [simulate(schedule, costs) for schedule in schedules if not schedule_faults(schedule)]
    assert len(able) == 9
    assert min(timeline.span for timeline in able) >= bounds.span.time
    assert min(timeline.makespan for timeline in able) >= bounds.makespan.time


@pytest.mark.parametrize(
    ("options", "stated"),
    [
        ({"memory": 0.5}, ("0.5", "schedule", "head")),
        ({"slowdown": 0.5}, ("slowdown", "divided", "head", "0.5")),
        ({"held": -1.0}, ("bytes", "head", -12_000_000)),
        ({"head": (1.0, -1.0, 1.0)}, ("time", "head", "gradient", -1)),
        ({"head": (1.0,)}, ("head", "numbers")),
        ({"objective": "speed"}, ("speed", "objective")),
    ],
)
def test_what_cannot_be_planned_says_why(options: dict[str, Any], stated: Stated) -> None:
    with raises(InputError, *stated):
        planned(**options)


def test_a_head_may_keep_gigabytes() -> None:
    """Bytes have their own limit, far above that of times in ms."""
    assert Head((18.8, 16.5, 12.4), held=2_248_146_944).divided(Costs.uniform(2), 2).column("held_head") == (1_124_073_472,) * 2
    with raises(InputError, "head", "keeps", got=1e16):
        Head((1, 1, 1), held=1e16)


@pytest.mark.long
def test_the_verb_prints_table_json_and_schedule() -> None:
    shape = [*SHAPE, "--placement", "linear,vee", "--memory", "6"]
    found = planned()
    assert run(*shape).startswith(f"{found}\n")
    data = json.loads(run(*shape, "--json"))
    assert data["head"] == json.loads(json.dumps(savings_of(found).to_dict()))
    assert [way["algorithm"] for way in data["head"]["ways"]] == [0, 1, 2]
    assert (data["placement"], data["span_ms"], data["csv"]) == (found.placement.name, (found.time or 0) / 1e6, None)
    text = run(*shape, "--format", "text")
    assert Schedule.from_text(text) == found.schedule
    assert found.schedule.has_divided_head


@pytest.mark.parametrize("head", [HEAD, pytest.param((0.1, 0.1, 0.1), marks=pytest.mark.long)])
def test_a_plan_with_a_head_survives_its_file(head: tuple[float, float, float], tmp_path: Path) -> None:
    """The best is divided for a heavy head, and whole for a light one."""
    file = tmp_path / "head.json"
    found = planned(head=head, held=0.4, collective=0.2, slowdown=1.2)
    save_plan(found, file)
    loaded = load_plan(file)
    assert (loaded.problem, loaded.schedule, loaded.time, loaded.bound) == (found.problem, found.schedule, found.time, found.bound)
    assert loaded.problem.has_divided_head == found.schedule.has_divided_head == (head == HEAD)
    assert loads(dumps(loaded)) == loaded
    assert loaded.head == found.head
    assert loaded.bound.time == loaded.problem.bound().time
    assert loaded.bubble is not None
    assert 0 < loaded.bubble < 1


@pytest.mark.long
def test_every_way_has_a_plan_of_its_own() -> None:
    for choice in planned().choices:
        assert Plan.from_dict(json.loads(json.dumps(choice.plan.to_dict()))).schedule == choice.plan.schedule


@pytest.mark.long
def test_the_verb_saves_a_plan_that_others_read_and_that_is_made_anew(tmp_path: Path) -> None:
    file, again = tmp_path / "head.json", tmp_path / "again.json"
    shape = [*SHAPE, "--placement", "linear,vee", "--memory", "6", "--head-slowdown", "1.2"]
    message = run(*shape, "-o", str(file))
    found = planned(slowdown=1.2)
    assert message.startswith(f"{found}\n")
    assert json.loads(run("show", str(file), "--json"))["makespan_ms"] == (found.makespan or 0) / 1e6
    compared = {row["name"]: row["makespan_ms"] for row in json.loads(run("compare", str(file), "1f1b", "--json"))}
    stages = WORK.costs(Placement.linear(4))
    assert compared["1f1b"] == simulate(make("1f1b", 4, 8), Head(HEAD).whole(stages)).makespan / 1e6
    assert run("plan", "--costs", str(file), "--placement", "linear,vee", "--evaluations", "0", "-o", str(again)) == message
    first, second = load_plan(file), load_plan(again)
    assert (first.problem, first.schedule, first.bound) == (second.problem, second.schedule, second.bound)
    refused = CliRunner().invoke(main, ["pareto", "--costs", str(file)])
    states(" ".join(refused.output.split()), "head", "pareto")


def test_a_plan_file_in_which_head_and_schedule_differ_is_refused() -> None:
    data = json.loads(dumps(planned()))
    plain = with_name(make("zb-v", 4, 8), data["schedule"])
    for changed, stated in (
        ({"head": None}, ("workload", "other", "costs", "problem")),
        ({"head": data["head"] | {"slowdown": 0.5}}, ("slowdown", "divided", "head", "0.5")),
        ({"head": data["head"] | {"times": [1, 2]}}, ("JSON", "head")),
        ({"workload": None, "head": data["head"] | {"held": 7.0}}, ("12 ms", "Head.from_parts")),
        ({"schedule": plain}, ("divided", "schedule", "problem", "one")),
    ):
        with raises(InputError, *stated):
            loads(json.dumps(data | changed))


def with_name(schedule: Schedule, other: dict[str, Any]) -> dict[str, Any]:
    """The JSON form of a schedule under the name of another."""
    return schedule.to_dict() | {"name": other["name"]}


def test_the_search_refuses_a_divided_head() -> None:
    problem = planned().problem
    with raises(InputError, "zb.plan", "head"):
        solve(problem, seconds=0)


def test_the_verb_draws_the_best_of_each_way(tmp_path: Path) -> None:
    svg, page = tmp_path / "head.svg", tmp_path / "head.html"
    run(*SHAPE, "--placement", "vee", "--svg", str(svg), "--html", str(page))
    for drawn in (svg.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")):
        assert "vocabulary 1" in drawn
        assert "vocabulary 2" in drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "torch-csv"], "PyTorch's CSV has no cell for"),
        (["--head", "1,2"], "'1,2' has 2 times; give three in ms"),
    ],
)
def test_options_that_exclude_a_head_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, [*SHAPE, "--placement", "vee", *arguments])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_options_of_a_head_need_one() -> None:
    result = CliRunner().invoke(main, ["plan", "-p", "4", "-m", "8", "--head-slowdown", "1.2"])
    assert result.exit_code == 2
    states(" ".join(result.output.split()), "--head-slowdown", "--head")


def test_show_and_make_divide_the_head_of_a_schedule(tmp_path: Path) -> None:
    data = json.loads(run("show", "1f1b", "-p", "4", "-m", "8", "--vocabulary", "2", "--json"))
    schedule = with_vocabulary(make("1f1b", 4, 8))
    assert data["makespan_ms"] == simulate(schedule, Costs.uniform(4).completed_for(schedule)).makespan / 1e6
    file = tmp_path / "divided.txt"
    run("make", "v-half", "-p", "4", "-m", "8", "--vocabulary", "1", "-o", str(file))
    assert Schedule.from_text(file.read_text(encoding="utf-8")) == with_vocabulary(make("v-half", 4, 8), 1)
    assert "0SL0" in file.read_text(encoding="utf-8")
    run("show", str(file))
    refused = CliRunner().invoke(main, ["make", str(file), "--vocabulary", "2"])
    states(" ".join(refused.output.split()), "head", "already")


def test_the_program_of_the_page_plans_a_divided_head(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/vocabulary.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[2], {"zb": zb})
    table, savings, bound = capsys.readouterr().out.split("\n\n")
    states(table.split("\n")[1], "algorithm", "divided")
    states(savings, "head", "algorithm")
    states(bound, "schedule", "period")


def measured(placement: Placement) -> Costs:
    """Costs of stages and of unequal parts of a head, as a profile has them: nothing where no part goes."""
    stages, per_rank = placement.num_stages, placement.num_stages // placement.num_ranks
    costs = Costs.uniform(stages, (10, 10, 8), 0.3, stages_per_rank=per_rank)
    columns = {"head_forward": (4, 3, 3, 2), "head_backward": (3, 3, 3, 3), "head_weight": (3, 4, 3, 3), "held_head": (0.1, 0.2, 0.1, 0.1)}
    parts = {name: [round(1e6 * part) for part in parts] + [0] * (stages - 4) for name, parts in columns.items()}
    return replace(costs, placement=placement).with_columns(**parts, collective=[200_000] * stages)


@pytest.mark.sweep
@pytest.mark.parametrize("placement", [Placement.linear(4), Placement.vee(4)], ids=lambda placement: str(placement.name))
@pytest.mark.parametrize("room", [None, 6])
def test_measured_parts_are_planned_for_as_they_are(placement: Placement, room: int | None) -> None:
    costs = measured(placement)
    memory = None if room is None else Limits((room * 1_000_000 * placement.num_stages // 4,) * 4)
    found = zb.plan(costs, 8, memory, head=Head.from_parts(costs, slowdown=1.25), evaluations=0)
    assert {way.algorithm for way in ways_of(found)} == {0, 1, 2}
    for way in ways_of(found):
        plan = way.plan
        timeline, limits = simulate(plan.schedule, plan.costs), plan.problem.limits.memory
        assert (way.time, plan.makespan) == (timeline.span, timeline.makespan)
        assert savings_of(found).bound.time <= way.bound.time <= way.time
        assert all(peak <= most for peak, most in zip(peak_memory(plan.schedule, plan.costs), limits, strict=True))
        if way.algorithm:
            assert plan.costs == costs
            assert plan.problem.work == 8 * (4 * 28 + 12 + 12 + 13) * 1_000_000
        else:
            assert plan.costs.forward[-1] - costs.forward[-1] == round(12 / 1.25 * 1e6)
            assert plan.costs.further == ()


def test_a_head_is_planned_with_the_costs_of_stages() -> None:
    """Its parts are then even, as with a workload."""
    costs = WORK.costs(Placement.vee(4))
    head = Head(HEAD, 0.4 * RANK_BYTES, 0.2, 1.2)
    found = zb.plan(costs, 8, head=head, placements=Placement.vee(4), evaluations=0)
    known = zb.plan(WORK, 8, head=head, placements="vee", evaluations=0)
    assert [way.time for way in ways_of(found)] == [way.time for way in ways_of(known)]
    assert found.schedule == known.schedule


@pytest.mark.parametrize("memory", [None, "6000000"])
def test_a_costs_file_with_a_head_is_planned_by_the_verb_and_its_plan_anew(memory: str | None, tmp_path: Path) -> None:
    file, plan, again = (tmp_path / name for name in ("costs.json", "plan.json", "again.json"))
    file.write_text(dumps(measured(Placement.linear(4))), encoding="utf-8")
    room = [] if memory is None else ["--memory", f"{memory}B"]
    shape = ["plan", "--evaluations", "0", *room]
    message = run(*shape, "-m", "8", "--costs", str(file), "--head-slowdown", "1.1", "-o", str(plan))
    limits = None if memory is None else Limits((int(memory),) * 4)
    costs = measured(Placement.linear(4))
    found = zb.plan(costs, 8, limits, head=Head.from_parts(costs, slowdown=1.1), evaluations=0)
    assert message.startswith(f"{found}\n")
    saved = load_plan(plan)
    assert (saved.schedule, saved.problem) == (found.schedule, found.problem)
    assert saved.schedule.has_divided_head
    of_options, _, _ = message.rstrip().partition("\n\nMemory: ")  # bytes in a plan's file are no bytes of a GPU
    assert run("plan", "--evaluations", "0", "--costs", str(plan), "-o", str(again)).rstrip() == of_options
    assert load_plan(again).problem == saved.problem


def test_a_plan_of_measured_parts_that_holds_the_head_whole_survives_its_file_and_is_not_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "whole.json"
    whole = ways_of(zb.plan(measured(Placement.linear(4)), 8, evaluations=0))[0].plan
    save_plan(whole, file)
    assert load_plan(file).problem == whole.problem
    refused = CliRunner().invoke(main, ["plan", "--costs", str(file)])
    states(" ".join(refused.output.split()), "costs", "whole")


@pytest.mark.parametrize(
    ("costs", "arguments", "message"),
    [
        (Costs.uniform(4), ["--head-slowdown", "1.2"], "--head-slowdown needs --head"),
        (measured(Placement.linear(4)), ["--head", "1,1,1"], "--head cannot be given: leave it out"),
        (
            measured(Placement.linear(4)),
            ["--collective", "1", "--head-held", "1"],
            "--head-held and --collective cannot be given: leave them out",
        ),
    ],
)
def test_costs_files_and_options_of_a_head_that_contradict_each_other_are_refused(
    costs: Costs, arguments: list[str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(dumps(costs), encoding="utf-8")
    result = CliRunner().invoke(main, ["plan", "--costs", str(file), "-m", "8", "--placement", "linear", "--evaluations", "0", *arguments])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("work", "options", "stated"),
    [
        (Costs.uniform(4), {"placements": "linear", "head": Head(HEAD)}, ("costs", "stages")),
        (measured(Placement.linear(4)), {"head": Head(HEAD)}, ("12 ms", "13 ms")),
    ],
)
def test_costs_that_cannot_be_planned_with_a_head_say_why(work: Workload | Costs, options: dict[str, Any], stated: Stated) -> None:
    with raises(InputError, *stated):
        zb.plan(work, 8, evaluations=0, **options)


def test_a_whole_head_is_no_part_of_the_microbatches_that_memory_is_counted_in(tmp_path: Path) -> None:
    """Neither where the plan is made, nor where its file is shown and compared, with itself or with a schedule that divides the head."""
    file = str(tmp_path / "plan.json")
    asked = (*SHAPE[:-4], "--head", "0.1,0.1,0.1", "--head-held", "0.5", "--placement", "vee", "--memory", "6", "--evaluations", "0")
    data = json.loads(run(*asked, "--json", "-o", file))
    assert data["head"]["best"] == 0
    peak = data["head"]["ways"][0]["peak_microbatches"]
    solved = load_plan(file)
    assert peak == solved.peak_microbatches == max(solved.peaks) / RANK_BYTES
    assert solved.peaks[solved.problem.placement.routes[0][-1]] == max(solved.peaks)
    assert json.loads(run("show", file, "--json"))["peak_microbatches"] == peak
    itself, other = json.loads(run("compare", file, "zb-v", "--json"))
    assert itself["peak_microbatches"] == peak
    assert other["peak_microbatches"] == max(peak_memory(make("zb-v", 4, 8), solved.problem.costs)) / RANK_BYTES == 4.5


def test_the_note_of_a_head_has_the_gap_of_its_row() -> None:
    """With offload, the table has a row for each choice: its gap is that over the bound of its placement, not of all."""
    work, host = zb.Workload.uniform(2, (10, 9, 5)), zb.offload.HostLink(1e9, 1e9)
    found = zb.plan(work, 4, 1.2, placements=["linear", "vee"], head=Head((0, 2, 2), slowdown=1.2), host=host, evaluations=0)
    for choice in found.choices:
        assert choice.plan.gap is not None
        assert show_percent(choice.plan.gap) in choice.note
        assert choice.plan.bound.reason in choice.note
