"""Plans for microbatches of unequal cost: legal, within the limits, never slower than the order of the data, and reported correctly.

That includes recompute.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import zerobubble as zb
from tests.pure.test_cli import refused, run
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble import Costs, InputError, Limits, Placement, make, simulate
from zerobubble.costs import FULL, MAX_LIMIT, NONE, SELECTIVE, Level
from zerobubble.io import load_plan, save_plan
from zerobubble.planning import Objective, Problem, Workload, order_microbatches, plan
from zerobubble.planning.axes.recompute import RecomputeSavings
from zerobubble.planning.axes.shares import with_equal_microbatches
from zerobubble.planning.kernels import load_kernels
from zerobubble.planning.problem.recomputation import Recomputation
from zerobubble.simulation import memory_faults, metrics, peak_memory, period
from zerobubble.verify import schedule_faults

WORK = Workload.uniform(3, (10, 11, 7), 0.4)
SHARES = (1.0, 4.0, 1.0, 2.0, 0.5, 4.0, 1.0, 1.0)


def drawn(microbatches: int, seed: int) -> tuple[float, ...]:
    dice = random.Random(seed)
    return tuple(dice.choice((0.25, 1.0, 1.6, 3.0)) for _ in range(microbatches))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_ordered_microbatches_take_no_longer_and_leave_the_passes_alone(name: str) -> None:
    schedule = make(name, 3, 9)
    costs = replace(WORK.costs(schedule.placement), shares=drawn(9, 1))
    limits = Limits(peak_memory(schedule, costs))
    for objective in Objective:
        for room in (limits, None):
            ordered = order_microbatches(schedule, costs, limits=room, objective=objective, evaluations=100)
            assert not schedule_faults(ordered)
            assert [[op[:2] for op in row] for row in ordered.rows] == [[op[:2] for op in row] for row in schedule.rows]
            assert objective.measure(metrics(ordered, costs)) <= objective.measure(metrics(schedule, costs))
            assert room is None or not memory_faults(ordered, costs, room)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_ordered_microbatches_of_schedules_with_r_take_no_longer_and_keep_limits(name: str) -> None:
    """Limits are what the schedule holds, of which R saves most: without R nothing would fit."""
    dice = random.Random(name)
    for _ in range(8):
        schedule = zb.schedules.with_recompute(make(name, 3, 6))
        plain = Costs.uniform(schedule.num_stages, (10, 11, 9), 0.5, stages_per_rank=schedule.num_stages // 3)
        costs = replace(plain.with_recompute(zb.costs.Level("all", 3.0, 0.06)), shares=tuple(dice.uniform(0.3, 3) for _ in range(6)))
        limits = Limits(peak_memory(schedule, costs))
        ordered = order_microbatches(schedule, costs, limits=limits, evaluations=100)
        assert not schedule_faults(ordered)
        assert not memory_faults(ordered, costs, limits)
        assert metrics(ordered, costs).span <= metrics(schedule, costs).span


def test_the_order_of_microbatches_is_the_same_every_time_and_near_the_best_of_all() -> None:
    schedule, shares = make("zb-h1", 2, 4), (1.0, 5.0, 2.0, 1.0)
    costs = replace(Workload.uniform(2, (10, 10, 10)).costs(schedule.placement), shares=shares)
    one, other = (order_microbatches(schedule, costs, evaluations=300) for _ in range(2))
    assert one == other
    assert metrics(one, costs).span <= 1.02 * min(metrics(each, costs).span for each in renumbered(schedule))


def renumbered(schedule: zb.Schedule) -> list[zb.Schedule]:
    return [
        replace(schedule, rows=tuple(tuple(op._replace(microbatch=number[op.microbatch]) for op in row) for row in schedule.rows))
        for number in permutations(range(schedule.num_microbatches))
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("memory", [None, 12.0])
def test_a_plan_takes_no_longer_than_the_order_of_the_data_and_beats_no_bound(memory: float | None) -> None:
    found = plan(WORK, 8, memory, placements=["linear", "vee"], evaluations=150, shares=SHARES)
    for choice in found.choices:
        problem, solved = choice.plan.problem, choice.plan
        assert problem.costs.shares == SHARES
        assert not memory_faults(solved.schedule, problem.costs, problem.limits)
        assert solved.time == period(solved.schedule, problem.costs)
        assert solved.time >= solved.bound.time
        uniform = plan(with_equal_microbatches(problem).costs, 8, problem.limits, placements=problem.placement, evaluations=300).schedule
        assert solved.time <= metrics(uniform, problem.costs).span
    again = plan(WORK, 8, memory, placements=["linear", "vee"], evaluations=150, shares=SHARES)
    assert again.schedule == found.schedule


@pytest.mark.long
def test_shares_in_the_costs_and_as_an_argument_give_the_same_plan() -> None:
    costs = replace(WORK.costs(Placement.linear(3)), placement=Placement.linear(3))
    outside = plan(costs, 8, evaluations=200, shares=SHARES)
    inside = plan(replace(costs, shares=SHARES), 8, evaluations=200)
    assert outside.schedule == inside.schedule


def test_a_plan_survives_its_file_with_its_shares(tmp_path: Path) -> None:
    found = plan(WORK, 8, placements="vee", evaluations=200, shares=SHARES)
    save_plan(found, tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert (read.problem.costs.shares, read.schedule, read.time) == (SHARES, found.schedule, found.time)
    shown = json.loads(run("show", str(tmp_path / "plan.json"), "--json").stdout)
    assert shown["span_ms"] * 1_000_000 == found.time
    anew = run("plan", "--costs", str(tmp_path / "plan.json"), "--evaluations", "200", "--placement", "vee", "--json")
    assert json.loads(anew.stdout)["span_ms"] * 1_000_000 <= found.time * 1.2


@pytest.mark.parametrize("levels", [(), (FULL,), (SELECTIVE, FULL), (NONE, Level("odd", 2.3, 0.4))], ids=str)
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_the_compiled_player_has_the_times_and_bytes_of_every_microbatch(name: str, levels: tuple[Level, ...]) -> None:
    kernels = load_kernels()
    schedule = make(name, 3, 7)
    costs = replace(WORK.costs(schedule.placement), shares=drawn(7, 2))
    problem = Problem(schedule.placement, 7, costs, Limits((MAX_LIMIT,) * 3))
    if levels:
        chosen = tuple(levels[stage % len(levels)] for stage in range(schedule.num_stages))
        costs = costs.with_recompute(chosen)
        problem = replace(problem, costs=costs, recomputation=Recomputation(levels, chosen))
    order = kernels.order_of(schedule)
    for assignment in ([0, 1, 2, 3, 4, 5, 6], [3, 1, 6, 0, 2, 5, 4]):
        named = kernels.schedule_of_order("named", problem, kernels.tables_of(problem), order, assignment)
        assert bool(levels) == any(op.kind is zb.Kind.R for row in named.rows for op in row)
        peaks = peak_memory(named, costs)
        for rank in range(3):
            for lack in (0, 1):
                limits = Limits(tuple(peak - lack * (other == rank) for other, peak in enumerate(peaks)))
                found = kernels.first_orders(kernels.tables_of(replace(problem, limits=limits)), order, [assignment])
                assert [one.time for one in found] == [metrics(named, costs).span] * (not lack)


def test_the_compiled_search_plays_what_it_finds_for_microbatches_that_are_computed_again() -> None:
    """Where two change places, what R takes and F keeps of them does, too."""
    kernels = load_kernels()
    schedule = make("zb-v", 3, 7)
    costs = replace(WORK.costs(schedule.placement), shares=drawn(7, 2)).with_recompute(FULL)
    limits = Limits(tuple(round(0.6 * peak) for peak in peak_memory(schedule, replace(costs, shares=(3.0,) * 7))))
    problem = Problem(schedule.placement, 7, costs, limits, recomputation=Recomputation((FULL,), (FULL,) * 6))
    tables, order = kernels.tables_of(problem), kernels.order_of(schedule)
    (start,) = kernels.first_orders(tables, order, [range(7)])
    for seed in range(4):
        found = kernels.improve_jointly(tables, start, 0, kernels.BudgetMeter(0.0, 600), seed, moves_passes=True)
        named = kernels.schedule_of_order("found", problem, tables, found.order, found.assignment.tolist())
        assert found.time < start.time
        assert found.time == metrics(named, costs).span
        assert not memory_faults(named, costs, limits)


def tight(seed: int) -> Problem:
    """A problem whose ranks have the bytes of its largest microbatch and hardly more, some with R."""
    dice = random.Random(seed)
    placement = dice.choice((Placement.linear(3), Placement.vee(3), zb.planning.placements.family("looped-3", 2)))
    stages, count = placement.num_stages, dice.randint(2, 7)
    held = tuple(dice.randint(3, 40) for _ in range(stages))
    times = [tuple(dice.randint(1, 20) for _ in range(stages)) for _ in range(3)]
    pending = tuple(dice.randint(0, size) for size in held)
    costs = Costs(*times, tuple(dice.randint(0, 3) for _ in range(stages - 1)), held, pending)
    costs = replace(costs, shares=tuple(dice.choice((0.5, 1.0, 2.5, 6.0)) for _ in range(count)))
    problem = Problem(placement, count, costs, Limits((MAX_LIMIT,) * placement.num_ranks), dice.choice(list(Objective)))
    if dice.random() < 0.5:
        level = Level("some", 0.7, 0.3)
        problem = replace(problem, costs=costs.with_recompute(level), recomputation=Recomputation((level,), (level,) * stages))
    alone = zb.planning.seeds.with_recompute_passes(zb.planning.seeds.serial_schedule(placement, count), problem)
    return replace(problem, limits=Limits(tuple(round(dice.uniform(1, 2.5) * peak) for peak in peak_memory(alone, problem.costs))))


@pytest.mark.parametrize("seed", every(7, range(60)))
def test_list_schedules_by_size_fit_in_any_order_of_the_microbatches(seed: int) -> None:
    problem, kernels = tight(seed), load_kernels()
    tables, shuffled = kernels.tables_of(problem), random.Random(seed).sample(range(problem.num_microbatches), problem.num_microbatches)
    alone = min(kernels.search_assignments(tables, [shuffled], 0, kernels.BudgetMeter(0.0, 0), 0, 1), key=lambda order: order.time)
    found = kernels.search_assignments(tables, [shuffled], 0, kernels.BudgetMeter(0.0, 300), 0, 5)
    assert found[0].time <= alone.time
    for each in (alone, *found):
        schedule = kernels.schedule_of_order("listed", problem, tables, each.order, each.assignment.tolist())
        assert not schedule_faults(schedule)
        assert not memory_faults(schedule, problem.costs, problem.limits)
        assert each.time == problem.objective.measure(metrics(schedule, problem.costs))
        assert each.time >= problem.bound().time


@pytest.mark.long
@pytest.mark.parametrize(("mode", "memory"), [("full", 5), ("auto", 5), ("auto", 6.5), ("auto", 12)])
def test_plans_with_recomputation_are_sound_and_no_slower_than_without_or_in_the_order_of_the_data(mode: str, memory: float) -> None:
    found = plan(WORK, 8, memory, placements=["linear", "vee"], evaluations=150, shares=SHARES, recompute=mode)
    for choice in found.choices:
        problem, solved = choice.plan.problem, choice.plan
        assert problem.costs.shares == SHARES
        assert not schedule_faults(solved.schedule)
        assert not memory_faults(solved.schedule, problem.costs, problem.limits)
        assert solved.time == period(solved.schedule, problem.costs)
        assert solved.time >= solved.bound.time
        again = sum(op.kind is zb.Kind.R for row in solved.schedule.rows for op in row)
        assert mode == "auto" or again == 8 * problem.placement.num_stages
        assert mode == "auto" or solved.bound.time >= sum(SHARES) * (10 + 11 + 7 + 10) * 1_000_000
    savings = found.saving(RecomputeSavings)
    assert savings is not None
    assert found.time is not None
    if mode == "auto":
        assert found.time <= (savings.without.time or found.time)
        if savings.full is not None:
            assert found.time <= (savings.full.time or found.time)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_plans_with_recomputation_fit_however_bytes_are_rounded(seed: int) -> None:
    """Stages that keep some bytes, so that a share of what is kept is seldom what is kept of a share."""
    dice = random.Random(seed)
    placement = dice.choice((Placement.linear(3), Placement.vee(2)))
    stages = placement.num_stages
    held = tuple(dice.randint(5, 40) for _ in range(stages))
    costs = replace(Costs.uniform(stages, (4, 5, 3), 0.5), held_after_f=held, held_after_b=held, placement=placement)
    shares = tuple(dice.uniform(0.3, 3) for _ in range(5))
    own = [sum(size for size, home in zip(held, placement.routes[0], strict=True) if home == r) for r in range(placement.num_ranks)]
    limits = Limits(tuple(round(dice.uniform(4, 8) * size) for size in own))
    found = plan(costs, 5, limits, shares=shares, recompute="auto", levels=[Level("some", 0.4, 0.37)], evaluations=300)
    assert not memory_faults(found.schedule, found.problem.costs, limits)
    again = plan(costs, 5, limits, shares=shares, recompute="auto", levels=[Level("some", 0.4, 0.37)], evaluations=300)
    assert again.schedule == found.schedule


@pytest.mark.long
def test_a_plan_with_recomputation_survives_its_file_with_its_shares(tmp_path: Path) -> None:
    asked = [
        "plan",
        "-p",
        "3",
        "-m",
        "8",
        "--times",
        "10,11,7",
        "--comm",
        "0.4",
        "--placement",
        "vee",
        "--memory",
        "5",
        "--evaluations",
        "500",
    ]
    shares = ("--microbatch-costs", ",".join(map(str, SHARES)), "--recompute", "auto")
    data: dict[str, Any] = json.loads(run(*asked, *shares, "-o", str(tmp_path / "plan.json"), "--json").stdout)
    read = load_plan(tmp_path / "plan.json")
    assert read.problem.costs.shares == SHARES
    assert any(op.kind is zb.Kind.R for row in read.schedule.rows for op in row)
    assert data["span_ms"] == simulate(read.schedule, read.problem.costs).span / 1e6
    assert data["recomputation"]["chosen"]["time_ms"] == data["span_ms"]
    shown = json.loads(run("show", str(tmp_path / "plan.json"), "--json").stdout)
    assert shown["span_ms"] * 1_000_000 == read.time


def test_wrong_questions_are_refused(tmp_path: Path) -> None:
    costs = replace(Costs.uniform(2), shares=(1, 2))
    with raises(InputError, 8, 3, "microbatches", "shares"):
        plan(WORK, 8, shares=(1, 2, 3))
    rows = [tuple(zb.Op.parse(text) for text in row.split()) for row in ("0F0 0F1 0BW0 0BW1", "1F1 1BW1 1F0 1BW0")]
    crossed = zb.Schedule("crossed", Placement.linear(2), 2, tuple(rows))
    with raises(InputError, "stage 1", "microbatches"):
        order_microbatches(crossed, costs)
    with raises(InputError, routes=2):
        order_microbatches(make("chimera", 2, 2), costs)
    states(refused("plan", "-p", "2", "-m", "4", "--microbatch-costs", "1,2"), 2, "shares", "costs")


def test_the_command_line_plans_for_microbatch_costs(tmp_path: Path) -> None:
    asked = ("plan", "-p", "3", "-m", "8", "--times", "10,11,7", "--comm", "0.4", "--placement", "linear,vee", "--evaluations", "500")
    shares = ("--microbatch-costs", ",".join(map(str, SHARES)))
    data: dict[str, Any] = json.loads(run(*asked, *shares, "-o", str(tmp_path / "plan.json"), "--json").stdout)
    read = load_plan(tmp_path / "plan.json")
    assert data["span_ms"] == simulate(read.schedule, read.problem.costs).span / 1e6
    assert "ordered" in data["how"]
    assert data["microbatch_order"] == [op.microbatch for op in read.schedule.rows[0] if op.kind is zb.Kind.F and op.stage == 0]


def test_the_page_runs_as_it_is_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/unequal.md").read_text(encoding="utf-8")
    ordered, _in_training = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(ordered, {})
    assert sorted(json.loads(capsys.readouterr().out)) == list(range(8))
    for command in re.findall(r"^    zerobubble (.*)$", page, re.MULTILINE):
        done = run(*shlex.split(re.sub(r"--(budget|evaluations) \d+", "--evaluations 50", command)))
        assert done.exit_code == 0, done.output


def test_a_winner_whose_stages_take_microbatches_in_other_orders_is_reported_in_json() -> None:
    """Breadth-first takes B's in another order than F's, and with R it may be the quickest as it is: JSON refused it."""
    ask = "plan -p 2 -m 4 --times 4,13.7,16.6 --placement looped-2 --evaluations 0 --comm 2.5 --memory 3 --recompute auto"
    done = run(*shlex.split(ask), "--microbatch-costs", "2,4,2,2", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["name"].startswith("breadth-first")
    assert sorted(data["microbatch_order"]) == [0, 1, 2, 3]
