"""Planning: seeds and bounds, the competition of placements, and plan files; every plan is checked and simulated again.

Every plan is legal, within its limits, and takes the time that it states, in plain Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerobubble as zb
from tests.pure.golden import TABLE_5
from tests.refusals import Stated, raises, states
from zerobubble import Costs, InputError, Kind, Limits, Placement, ScheduleError, Workload
from zerobubble.errors import ParseError
from zerobubble.planning import Plan, Problem, Status, attempt, competition, rounds, solve
from zerobubble.planning import search as engine
from zerobubble.planning.attempt import FAR_FROM_BOUND, Budget, start_attempt, with_list_schedule
from zerobubble.planning.lengthening import extend_by_pattern
from zerobubble.planning.pareto import pareto
from zerobubble.planning.placements import FAMILIES, family, placements_to_try
from zerobubble.planning.seeds import SEARCH_SECONDS, STEADY_MICROBATCHES, published_schedules, ranked_seeds, serial_schedule
from zerobubble.planning.transforms import split
from zerobubble.schedules import SCHEDULES

PROFILE = TABLE_5[0]
WORK = Workload.uniform(8, PROFILE.times, PROFILE.comm, 0.941)


def problem_on(name: str, memory: float = 8, work: Workload = WORK, microbatches: int = 24) -> Problem:
    placement = family(name, work.num_ranks)
    return Problem(placement, microbatches, work.costs(placement), work.limits(memory))


def check(solved: Plan) -> None:
    """Everything that a result says of itself, found again without it."""
    problem, schedule = solved.problem, solved.schedule
    assert solved.time is not None
    assert zb.schedule_faults(schedule) == ()
    assert zb.simulation.memory_faults(schedule, problem.costs, problem.limits) == ()
    assert (schedule.placement, schedule.num_microbatches) == (problem.placement, problem.num_microbatches)
    in_steps = zb.simulation.period(schedule, problem.costs)
    makespan = zb.simulate(schedule, problem.costs).makespan
    assert solved.time == (in_steps if problem.objective == "period" else makespan) >= solved.bound.time
    assert (solved.status is Status.OPTIMAL) == (solved.time == solved.bound.time)


# Placements by name.


def test_families_say_which_rank_holds_which_stage() -> None:
    assert family("linear", 3).routes == ((0, 1, 2),)
    assert family("vee", 3).routes == family("wave-2", 3).routes == ((0, 1, 2, 2, 1, 0),)
    assert family("looped-3", 2).routes == ((0, 1, 0, 1, 0, 1),)
    assert family("wave-3", 2).routes == ((0, 1, 1, 0, 0, 1),)
    assert family("wave-4", 2).routes == ((0, 1, 1, 0, 0, 1, 1, 0),)


def test_a_layout_is_tried_once_and_an_unknown_one_refused() -> None:
    assert list(placements_to_try("any", 4)) == list(FAMILIES)
    assert list(placements_to_try(["wave-2", "vee", Placement.vee(4), Placement.custom([0, 1, 2, 3, 3])], 4)) == ["wave-2", "custom"]
    with raises(InputError, "veee", "vee"):
        placements_to_try("veee", 4)
    with raises(InputError, "plan", "placement"):
        placements_to_try([], 4)


# Seeds.


@pytest.mark.parametrize("name", FAMILIES)
def test_seeds_are_all_published_schedules_of_the_placement(name: str) -> None:
    placement = family(name, 4)
    found = {seed.name for seed in published_schedules(placement, 8)}
    stages = placement.stages_per_rank
    made = [zb.make(n, 4, 8, stages) for n, recipe in SCHEDULES.items() if recipe.trains and recipe.allows(4, 8, stages)]
    assert found == {schedule.name for schedule in made if schedule.placement.routes == placement.routes}
    for seed in published_schedules(placement, 8):
        assert zb.schedule_faults(split(seed)) == ()
        assert {op.kind for _, _, op in split(seed).ops()} == {Kind.F, Kind.B, Kind.W}
        costs = Costs.uniform(placement.num_stages, (1, 1.5, 0.7), 0.1)
        assert zb.simulate(split(seed), costs).makespan <= zb.simulate(seed, costs).makespan


@pytest.mark.parametrize(("name", "stages"), [(name, recipe.stages_per_rank) for name, recipe in SCHEDULES.items() if recipe.torch_csv])
def test_a_stretched_schedule_is_the_long_one(name: str, stages: int) -> None:
    for ranks, more in ((3, 1), (8, 5), (9, 20)):
        few, many = STEADY_MICROBATCHES * ranks, STEADY_MICROBATCHES * ranks + more
        if SCHEDULES[name].allows(ranks, few, stages) and SCHEDULES[name].allows(ranks, many, stages):
            long = extend_by_pattern(zb.make(name, ranks, few, stages), many)
            assert long is None or long.rows == zb.make(name, ranks, many, stages).rows


def test_schedules_that_repeat_themselves_are_stretched() -> None:
    def can_be(name: str) -> bool:
        return extend_by_pattern(zb.make(name, 8, STEADY_MICROBATCHES * 8), 50) is not None

    assert all(map(can_be, ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-min", "v-half", "1f1b-v"]))
    assert not any(map(can_be, ["gpipe", "breadth-first", "interleaved-1f1b", "two-thirds"]))


@pytest.mark.parametrize(
    ("placement", "memory", "first"),
    [("vee", 8, "zb-v"), ("vee", 6, "v-half"), ("vee", 4, "v-min"), ("linear", 8, "zb-h1"), ("linear", 16, "zb-h2")],
)
def test_the_seed_tried_first_fits_and_has_the_smallest_bubble(placement: str, memory: float, first: str) -> None:
    problem = problem_on(placement, memory, microbatches=40)
    names = [seed.name for seed in ranked_seeds(problem)]
    assert names[0] == first
    assert sorted(names) == sorted(seed.name for seed in published_schedules(problem.placement, 40))


@pytest.mark.parametrize(
    ("placement", "memory", "made"),
    [("vee", 8, ["zb-v"]), ("vee", 6, []), ("vee", 5, ["v-half"]), ("vee", 20, []), ("linear", 16, ["zb-h2"]), ("linear", 12, [])],
)
def test_in_a_hurry_only_a_seed_that_fills_the_memory_is_made(placement: str, memory: float, made: list[str]) -> None:
    problem = problem_on(placement, memory, microbatches=40)
    assert [seed.name for seed in ranked_seeds(problem, SEARCH_SECONDS * problem.num_passes)] == made
    assert next(ranked_seeds(problem, 0.0)).name == next(ranked_seeds(problem)).name


@pytest.mark.parametrize("name", FAMILIES)
def test_each_microbatch_alone_fits_wherever_anything_does(name: str) -> None:
    work = Workload.uniform(3, (1, 1, 1), held=2.0)
    problem = problem_on(name, 0.5, work, 4)  # B leaves twice what F saves, so this holds what F saves of a microbatch
    alone = serial_schedule(problem.placement, 4)
    assert zb.schedule_faults(alone) == ()
    assert zb.simulation.peak_memory(alone, problem.costs) == work.limits(0.5).memory
    check(solve(problem, evaluations=50))


# Solving on one placement.


@pytest.mark.parametrize(("name", "memory", "bubble"), [("linear", 8, 0.1585), ("linear", 16, 0.1015)])
def test_published_schedules_are_proven_optimal_without_a_search(
    name: str, memory: float, bubble: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    solved = solve(problem_on(name, memory), seconds=0)
    check(solved)
    assert solved.status is Status.OPTIMAL or memory > 8
    assert solved.least_bubble == pytest.approx(bubble, abs=6e-5)


def test_a_search_proves_the_vee_and_is_repeatable() -> None:
    problem = problem_on("vee")
    first, second = (solve(problem, evaluations=4000, seed=3) for _ in range(2))
    check(first)
    assert (first.schedule, first.how) == (second.schedule, second.how)
    assert first.time is not None
    assert first.time <= (solve(problem, seconds=0).time or 0)
    assert first.bubble == pytest.approx(0.0703, abs=3e-3)


def test_a_search_starts_from_given_seeds() -> None:
    problem = problem_on("vee", 5)
    good = solve(problem, evaluations=4000).schedule
    assert good is not None
    again = solve(problem, seconds=0, seeds=[good])
    assert again.schedule == good
    assert (again.time or 0) < (solve(problem, seconds=0).time or 0)


def test_where_no_seed_fits_the_search_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_on("wave-3", 4)
    alone = solve(problem, seconds=0)
    assert alone.how == "one by one"
    offered: list[int] = []
    search = engine.search
    monkeypatch.setattr(
        engine, "search", lambda given, bound, seeds, **rest: offered.append(len(seeds)) or search(given, bound, seeds, **rest)
    )
    found = solve(problem, evaluations=300)
    check(found)
    assert offered == [0]
    assert (found.time or 0) < (alone.time or 0) / 2


# The budget.


class Clock:
    """A clock that shows the time it was set to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (attempt, competition, rounds):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)


@pytest.mark.parametrize(("seconds", "made"), [(1.0, 2), (0.1, 1), (0.0, 6)])
def test_seeds_take_half_of_the_budget_but_one_is_always_made(seconds: float, made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = Clock(monkeypatch), list[Any]()

    def slowly() -> Any:
        for _ in range(6):
            clock.now += 0.3
            given.append(zb.make("v-half", 8, 24))
            yield given[-1]

    begun = attempt.start_attempt("vee", problem_on("vee", 6), Budget(seconds), slowly())
    assert len(given) == made
    assert set(given) <= set(begun.seeds)


def test_seeds_searches_and_checks_share_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    given: list[float] = []
    of = Plan.from_schedule

    def checked(problem: Problem, *parts: Any) -> Plan:
        clock.now += attempt.CHECK_SECONDS * problem.num_passes
        return of(problem, *parts)

    def search(problem: Problem, bound: int, seeds: Any, *, seconds: float, **rest: Any) -> engine.SearchResult:
        given.append(seconds)
        clock.now += 1.1 * seconds
        return engine.SearchResult(serial_schedule(problem.placement, problem.num_microbatches), "nothing", 0, seconds)

    monkeypatch.setattr(Plan, "from_schedule", checked)
    monkeypatch.setattr(engine, "search", search)
    monkeypatch.setattr(engine, "compile_kernels", lambda **_: 0.0)
    made = zb.plan(WORK, 24, 6, seconds=3)
    assert len(given) > 7
    assert 2.9 < made.seconds == clock.now < 3.1
    clock.now, given[:] = 0.0, []
    assert 0.95 < solve(problem_on("vee", 6), seconds=1).seconds < 1.1
    assert len(given) == 1


@pytest.mark.parametrize(("budget", "searches"), [(Budget(0.9), 0), (Budget(1.1), 1), (Budget(0.9, 10), 1)])
def test_no_search_begins_where_the_seconds_end_before_its_check(budget: Budget, searches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = attempt.start_attempt("vee", problem_on("vee", 6), Budget(0.0))
    assert begun.can_improve
    monkeypatch.setattr(attempt, "CHECK_SECONDS", 1 / begun.plan.problem.num_passes)
    calls = list[float]()

    def search(problem: Problem, bound: int, seeds: Any, *, seconds: float, **rest: Any) -> engine.SearchResult:
        calls.append(seconds)
        return engine.SearchResult(seeds[0], "nothing", 0, seconds)

    monkeypatch.setattr(engine, "search", search)
    assert attempt.improve(begun, budget).searched == bool(searches)
    assert len(calls) == searches


def test_too_little_memory_is_infeasible_with_the_rank() -> None:
    problem = problem_on("vee")
    limits = Limits((*problem.limits.memory[:5], 100, *problem.limits.memory[6:]))
    solved = solve(Problem(problem.placement, 24, problem.costs, limits))
    assert (solved.status, solved.order, solved.time, solved.gap, solved.bubble) == (Status.INFEASIBLE, None, None, None, None)
    states(solved.reason, "rank 5", 1)
    with raises(InputError, "plan", "rank 5"):
        solved.to_dict()


def test_an_answer_that_breaks_the_limits_is_refused() -> None:
    problem = problem_on("vee", 4)
    with raises(ScheduleError, "zb-v", "limit"):
        Plan.from_schedule(problem, problem.bound(), zb.make("zb-v", 8, 24), 0.0, "zb-v")


times = st.lists(st.tuples(*[st.integers(0, 20)] * 6), min_size=1, max_size=4)


@settings(deadline=None, max_examples=20)
@given(times, st.integers(1, 6), st.floats(0.8, 5), st.sampled_from(["period", "makespan"]))
def test_random_unequal_work_gives_legal_plans_or_a_true_reason(
    rows: list[tuple[int, ...]], microbatches: int, memory: float, objective: str
) -> None:
    columns: Any = tuple(zip(*rows, strict=True))
    work = Workload(*columns[:4], tuple(60 + held for held in columns[4]), tuple(60 + held for held in columns[5]))
    made = zb.plan(work, microbatches, memory, objective=objective, placements=["linear", "vee", "wave-3"], evaluations=60)
    for choice in made.choices:
        if choice.plan.order is None:
            needed = [
                sum(h for r, h in zip(*homes, strict=True) if r == rank)
                for rank in range(work.num_ranks)
                for homes in [(choice.plan.problem.placement.routes[0], choice.plan.problem.costs.held_after_f)]
            ]
            assert any(need > limit for need, limit in zip(needed, choice.plan.problem.limits.memory, strict=True))
        else:
            check(choice.plan)


# The competition of placements.


def test_the_best_placement_wins_and_each_other_has_its_reason() -> None:
    made = zb.plan(WORK, 24, 8, evaluations=3000)
    bubbles = [choice.plan.bubble or 0 for choice in made.choices]
    assert bubbles == sorted(bubbles)
    assert {choice.name for choice in made.choices} == set(FAMILIES)
    assert made.schedule == made.schedule
    for choice in made.choices:
        check(choice.plan)
        assert choice.note.endswith(choice.plan.bound.reason)
        assert f"\n{choice.name} " in str(made)
    linear = next(choice for choice in made.choices if choice.name == "linear")
    assert linear.plan.status is Status.OPTIMAL
    states(linear.note, "nothing", "placement")
    assert made.lower_bound == min(choice.plan.least_bubble for choice in made.choices) <= bubbles[0]


@pytest.mark.long
def test_a_search_never_loses_what_the_seeds_have() -> None:
    seeds = {choice.name: choice.plan.time or 0 for choice in zb.plan(WORK, 24, 6, seconds=0).choices}
    for choice in zb.plan(WORK, 24, 6, evaluations=500).choices:
        assert (choice.plan.time or 0) <= seeds[choice.name]


@pytest.mark.long
def test_the_same_evaluations_give_the_same_plan() -> None:
    one, other = (zb.plan(WORK, 16, 7, evaluations=2000, seed=1) for _ in range(2))
    assert [(c.name, c.note, c.plan.schedule) for c in one.choices] == [(c.name, c.note, c.plan.schedule) for c in other.choices]


def test_a_placement_that_cannot_win_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = recorded(monkeypatch, lambda found: found)
    made = zb.plan(WORK, 24, 8, placements=["looped-2", "looped-4", "linear"], evaluations=900)
    assert set(searched) == {"looped"}
    best, second, third = made.choices
    assert [best.name, second.name, third.name] == ["looped-4", "looped-2", "linear"]
    states(second.note, "7.12", "bubble", "winner")
    assert 0.0712 < second.plan.least_bubble < (second.plan.bubble or 0)
    assert (best.plan.bubble or 1) < 0.0712
    assert third.plan.status is Status.OPTIMAL


@pytest.mark.long
def test_ctrl_c_ends_the_competition_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = recorded(monkeypatch, lambda found: engine.SearchResult(found.schedule, found.how, 0, 0.0, interrupted=True))
    check(zb.plan(WORK, 24, 8, evaluations=700))
    assert len(searched) == 1

    searched = recorded(monkeypatch, interrupted)
    made = zb.plan(WORK, 24, 8, evaluations=700)
    assert len(searched) == 1
    assert made.schedule == zb.plan(WORK, 24, 8, seconds=0).schedule
    monkeypatch.setattr(engine, "compile_kernels", interrupted)
    assert zb.plan(WORK, 24, 8, evaluations=700).schedule == made.schedule
    assert solve(problem_on("looped-4"), evaluations=700).schedule == made.schedule


def interrupted(*_: object, **__: object) -> engine.SearchResult:
    raise KeyboardInterrupt


def recorded(monkeypatch: pytest.MonkeyPatch, change: Callable[[engine.SearchResult], engine.SearchResult]) -> list[str]:
    """The placements searched from now on; `change` is made to what each search finds."""
    search, names = engine.search, []

    def noted(problem: Problem, *parts: Any, **options: Any) -> engine.SearchResult:
        names.append(problem.placement.name)
        return change(search(problem, *parts, **options))

    monkeypatch.setattr(engine, "search", noted)
    monkeypatch.setattr(engine, "compile_kernels", lambda **_: 0.0)
    return names


def test_news_of_a_search_names_placement_bubble_and_gap() -> None:
    news: list[Any] = []
    made = zb.plan(WORK, 24, 5, placements="vee", evaluations=2000, progress=news.append)
    assert news
    assert {message.placement for message in news} == {"vee"}
    assert news[-1].bubble == pytest.approx(made.bubble)
    assert news[-1].gap == pytest.approx(made.gap)


def test_costs_of_stages_go_with_their_placement() -> None:
    placement = Placement.vee(4)
    costs = Costs.from_ms([1, 2, 1, 1, 1, 1, 1, 3], [1] * 8, [1] * 8, 0.1)
    made = zb.plan(costs, 6, Limits((8_000_000,) * 4), placements=placement, seconds=0)
    check(made)
    check(zb.plan(costs, 6, placements=placement, seconds=0))
    for options, stated in (
        ({}, ("costs", "placement", "Workload")),
        ({"placements": "vee"}, ("costs", "placement", "Workload")),
        ({"placements": placement, "memory": "8MB"}, ("memory", "8MB", "Costs")),
        ({"placements": placement, "memory": 40e9}, ("memory", "40GB")),
        ({"placements": placement, "memory": "8"}, ("plan", "memory", "8")),
    ):
        with raises(InputError, *stated):
            zb.plan(costs, 6, **options)  # type: ignore[arg-type]


def test_memory_is_microbatches_or_bytes_or_the_limits_of_each_rank() -> None:
    """Numbers are microbatches and text is bytes, for stages, for the ranks of a workload and for layers."""
    placement, limits = Placement.vee(2), Limits((8 * 10**9,) * 2)
    stages = Costs.from_ms([1] * 4, [1] * 4, [1] * 4, held_after_f=[10**9] * 4)
    work = Workload(*((1,) * 2,) * 4, (2 * 10**9,) * 2, (10**9,) * 2)
    for ranks in (stages, work):
        for memory in (4, "8GB", "8e9 b", limits):
            assert zb.plan(ranks, 6, memory, placements=placement, seconds=0).problem.limits == limits
    layers = [zb.partition.Layer(1, 1, 1, 10**8, 10**8)] * 4
    first, second = (zb.plan(layers, 6, memory, placements=placement, seconds=0) for memory in ("8GB", limits))
    assert (first.problem, first.schedule) == (second.problem, second.schedule)
    with raises(InputError, "memory", "8GB", "Workload"):
        zb.plan(Workload.uniform(2, (1, 1, 1)), 6, "8GB", seconds=0)


def test_no_rank_holds_more_microbatches_than_there_are() -> None:
    """B of the last stage leaves far more for W than its F saved, as that of a head leaves the gradient of its logits."""
    costs = Costs.from_ms([1, 1], [1, 1], [1, 1], held_after_f=[8, 8], held_after_b=[8, 800])
    for how in (None, "zb-heuristic"):
        best = zb.plan(costs, 6, placements=Placement.linear(2), seconds=0, baseline=how)
        assert best.peak_microbatches is not None
        assert 0 < best.peak_microbatches <= 6


def test_without_a_limit_there_is_room_for_everything() -> None:
    work = Workload.uniform(3, (1, 1, 1), held=2.0)
    assert zb.plan(work, 5, placements="linear", seconds=0).bubble == 0
    assert zb.plan(work, 5, 5, placements="linear", seconds=0).bubble == 0
    assert (zb.plan(work, 5, 2.5, placements="linear", seconds=0).bubble or 0) > 0


@pytest.mark.parametrize("memory", [2, 3.5])
def test_the_peak_is_in_the_unit_of_the_memory(memory: float) -> None:
    for work in (Workload.uniform(4, (10, 12, 8), held=2.0), Workload.uniform(4, (10, 12, 8), held=0.5)):
        for placement in ("linear", "vee"):
            found = zb.plan(work, 8, memory, placements=placement, evaluations=50)
            assert found.peak_microbatches is not None
            assert memory / 2 < found.peak_microbatches <= memory


@pytest.mark.parametrize(
    ("options", "stated"),
    [
        ({"memory": -1.0}, ("memory", -1)),
        ({"memory": float("nan")}, ("memory", "nan")),
        ({"seconds": -1.0}, (-1, "seconds", "finite")),
        ({"evaluations": -5}, (-5, "evaluations", "finite")),
        ({"objective": "speed"}, ("speed", "objective", "period")),
        ({"baseline": "zb-heuristc", "placements": "linear"}, ("zb-heuristic",)),
        ({"placements": Placement.linear(3)}, (8, "workload", "ranks")),
    ],
)
def test_wrong_requests_are_refused(options: dict[str, Any], stated: Stated) -> None:
    with raises(InputError, *stated):
        zb.plan(WORK, 8, **{"memory": 8.0, **options})


def test_a_baseline_answers_where_it_can() -> None:
    made = zb.plan(WORK, 24, 8, baseline="zb-heuristic")
    assert [choice.name for choice in made.choices] == ["linear"]
    assert made.bubble == pytest.approx(0.1585, abs=5e-5)
    with pytest.raises(InputError):
        zb.plan(WORK, 24, 8, placements="vee", baseline="zb-heuristic")


# Workloads.


def test_a_wrong_time_names_its_rank() -> None:
    for backward, stated in (
        ([1.0, -2.0], ("rank 1", -2)),
        ([1.0], ("backward", 1, 2)),
        ([float("nan"), 1], ("rank 0",)),
    ):
        with raises(InputError, *stated):
            Workload.from_ms([1, 2], backward, [1, 1], [0, 0])


def test_work_is_shared_by_the_stages_of_a_rank() -> None:
    work = Workload.from_ms([3, 6], [3, 6], [3, 6], [0.5, 0.25], held=0.5)
    costs = work.costs(family("looped-3", 2))
    assert costs.forward == (1_000_000, 2_000_000) * 3
    assert costs.comm == (500_000,) * 5
    assert costs.held_after_f == (4_000_000,) * 6
    assert costs.held_after_b == (2_000_000,) * 6
    ring = Workload.from_ms([1] * 3, [1] * 3, [1] * 3, [1, 2, 5]).costs(family("looped-2", 3))
    assert ring.comm == (1_000_000, 2_000_000, 5_000_000, 1_000_000, 2_000_000)


# Files.


def test_a_plan_file_gives_the_plan_back(tmp_path: Path) -> None:
    solved = solve(problem_on("vee"), seconds=0)
    zb.io.save_plan(solved, tmp_path / "plan.json")
    assert zb.io.load_plan(tmp_path / "plan.json") == solved


def test_a_plan_file_is_judged_anew(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    good = solve(problem_on("vee"), seconds=0).to_dict()

    def refused(**parts: Any) -> str:
        file.write_text(json.dumps(good | parts))
        with pytest.raises(ParseError) as error:
            zb.io.load_plan(file)
        return str(error.value)

    states(refused(bound={"time": 10**12, "reason": "none"}), "bound")
    states(refused(limits=[10**6] * 8), "limit")
    swapped = json.loads(json.dumps(good["schedule"]))
    swapped["rows"][0] = swapped["rows"][0][::-1]
    assert "cannot run" in refused(schedule=swapped)
    assert "must have the key 'costs'" in refused() if good.pop("costs") else ""
    with raises(InputError, "read", str(tmp_path / "none.json")):
        zb.io.load_plan(tmp_path / "none.json")
    with raises(InputError, "name", "empty"):
        zb.io.save_plan(solve(problem_on("vee"), seconds=0), "")
    with raises(InputError, "write", str(tmp_path / "no" / "plan.json")):
        zb.io.save_plan(solve(problem_on("vee"), seconds=0), tmp_path / "no" / "plan.json")


# The front.


@pytest.mark.long
def test_more_memory_never_means_more_bubble() -> None:
    front = pareto(WORK, 16, [9, 4, 5, 6.5, 9], placements=["linear", "vee"], evaluations=150)
    assert [point.memory for point in front.points] == [4, 5, 6.5, 9]
    for name in ("linear", "vee"):
        answers = [next(c.plan for c in point.plan.choices if c.name == name) for point in front.points]
        found = [answer.time or 0 for answer in answers]
        assert found == sorted(found, reverse=True)
        for point, answer in zip(front.points, answers, strict=True):
            check(answer)
            assert (answer.peak_microbatches or 0) <= point.memory
    assert str(front).partition("\n\n")[0].count("\n") == 4
    with raises(InputError, "front", "memory", "limit"):
        pareto(WORK, 16, [])


def test_more_memory_never_means_more_bubble_if_the_budget_lasts_for_one_seed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_seed_alone(problems: Any, budget: Any, seed: int, progress: Any, seeds: Any) -> zb.Plan:
        tried = {name: [next(iter(known))] for name, known in seeds.items()}
        return competition.compete(problems, Budget(0.0, 200 if len(answered) == 0 else 0), seed, progress=progress, seeds=tried)

    answered: list[Any] = []
    monkeypatch.setattr("zerobubble.planning.pareto.compete", first_seed_alone)
    front = pareto(WORK, 16, [4, 5, 6.5, 9], placements="vee", on_point=answered.append)
    bubbles = [point.plan.bubble or 0 for point in front.points]
    assert bubbles == sorted(bubbles, reverse=True)


def test_splitting_takes_overlapped_steps_apart() -> None:
    schedule = split(zb.make("dualpipe-v", 2, 4))
    assert schedule.overlaps == frozenset()
    assert Kind.BW not in {op.kind for _, _, op in schedule.ops()}
    assert zb.schedule_faults(schedule) == ()


def test_a_seed_far_from_the_bound_gives_way_to_a_list_schedule_before_any_round_of_search() -> None:
    problem = problem_on("wave-3")
    serial = serial_schedule(problem.placement, problem.num_microbatches)
    far = start_attempt("wave-3", problem, Budget(1.0, 0), [serial])
    listed = with_list_schedule(far)
    assert far.plan.time is not None
    assert listed.plan.time is not None
    assert far.plan.time > FAR_FROM_BOUND * problem.bound().time > listed.plan.time
    assert with_list_schedule(listed) is listed
    searched = replace(far, searched=True)
    assert with_list_schedule(searched) is searched


def test_placements_that_the_budget_is_too_short_for_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload.uniform(4, (10, 10, 8))
    monkeypatch.setattr(attempt, "FIRST_SECONDS", 1.0)
    found = zb.plan(work, 8, memory=4, placements=["linear", "vee", "looped-2"], seconds=1)
    best, *others = found.choices
    assert best.name == "linear", "the smallest"
    check(best.plan)
    for choice in others:
        assert choice.plan.order is None
        assert choice.plan.status is Status.FEASIBLE
        assert "no schedule was made, the budget is too short for a schedule of 192 passes" in choice.note or "winner" in choice.note
    assert "not made" in str(found)
    monkeypatch.setattr(attempt, "FIRST_SECONDS", 0.4 / 192)
    found = zb.plan(work, 8, memory=4, placements=["linear", "vee", "looped-2"], seconds=1)
    assert found.placement.name == "vee", "the most promising"
    monkeypatch.setattr(attempt, "FIRST_SECONDS", 0.75 / 192)
    found = zb.plan(work, 8, memory=4, placements=["linear", "vee", "looped-2"], seconds=1)
    assert found.placement.name == "vee", "the most promising, even if it takes more than half of the time"
    assert next(choice.plan.reason for choice in found.choices if choice.name == "looped-2").count("give 4 s") == 1
    counted = zb.plan(work, 8, memory=4, placements=["linear", "vee", "looped-2"], evaluations=1)
    assert all(choice.plan.order is not None for choice in counted.choices), "where the clock must not decide"


def test_memory_below_a_microbatch_is_stated_in_the_unit_of_the_work() -> None:
    """Costs made of times have no bytes, so their shortage is in microbatches; that of measured costs is in bytes with a unit."""
    vee, measured = Placement.vee(2), Costs.from_ms([1] * 4, [1] * 4, [1] * 4, held_after_f=[10**9] * 4)
    without_bytes = zb.plan(Costs.uniform(4), 4, 0.1, placements=vee, evaluations=0)
    of_a_workload = zb.plan(zb.Workload.uniform(2, (1, 1, 1)).costs(vee), 4, 0.1, placements=vee, evaluations=0)
    with_bytes = zb.plan(measured, 4, 0.1, placements=vee, evaluations=0)
    for answer in (without_bytes, of_a_workload):
        states(repr(answer), 0.1, 1, "every")
    states(repr(with_bytes), "2 GB", "1.8 GB", "200 MB")
    assert "..." not in repr(without_bytes) + repr(with_bytes)


def test_seconds_and_evaluations_exclude_each_other() -> None:
    work = zb.Workload.uniform(2, (10, 10, 8))
    with raises(InputError, argument="evaluations", other="seconds"):
        zb.plan(work, 4, seconds=3, evaluations=10)
    with raises(InputError, argument="evaluations", other="seconds"):
        pareto(work, 4, [2], seconds=3, evaluations=10)
    with raises(InputError, argument="evaluations", other="seconds"):
        solve(problem_on("vee", 4), seconds=3, evaluations=10)


def test_the_line_of_a_plan_and_its_bound_are_whole() -> None:
    found = zb.plan(Costs.uniform(8, (10, 10, 8), 0.5, stages_per_rank=2), 8, placements=Placement.vee(4), evaluations=10)
    assert repr(found).endswith("on vee over 4 ranks>")
    assert "of the period" in repr(found)
    assert repr(found.bound) == f"<Bound {found.bound}>"
    assert "of the makespan" in repr(found.timeline)
