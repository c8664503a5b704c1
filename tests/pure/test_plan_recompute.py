"""Plans that recompute forwards: legal, within the limits, never slower than without, never below a bound, and reported correctly.

On small problems they are as short as an exact solver's, and brute force finds no schedule below the bound.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import count, product
from pathlib import Path
from random import Random

import pytest

import zerobubble as zb
from tests.pure.test_cli import refused, run
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble import Costs, InputError, Kind, Limits, Op, Placement, Schedule
from zerobubble.bounds import bounds_with_recompute, shortage_with_recompute
from zerobubble.costs import FULL, NONE, SELECTIVE, Level
from zerobubble.io import load_plan, save_plan
from zerobubble.partition import Layer
from zerobubble.planning import Problem, Workload, competition, plan
from zerobubble.planning.answer import Plan
from zerobubble.planning.attempt import Budget
from zerobubble.planning.axes.recompute import RecomputeSavings
from zerobubble.planning.kernels import load_kernels
from zerobubble.planning.kernels.coarse_to_fine import coarsened
from zerobubble.planning.problem.recomputation import Recomputation, level_choices, levels_for, parse_levels
from zerobubble.planning.recompute.reduction import with_less_recompute
from zerobubble.planning.search import search
from zerobubble.rules import recomputed
from zerobubble.runtime.options import PipelineOptions, recompute_levels
from zerobubble.runtime.stage.levels import GivenLevels
from zerobubble.simulation import memory_faults, metrics, peak_memory
from zerobubble.units import show_bytes
from zerobubble.verify import schedule_faults

WORK = Workload.uniform(4, (10, 10, 8), 0.3)
PAGE = (Path(__file__).parents[2] / "docs/recompute.md").read_text(encoding="utf-8")


def problem_at(placement: Placement, levels: tuple[Level, ...], microbatches: int, memory: float, work: Workload = WORK) -> Problem:
    offered = (NONE, SELECTIVE, FULL)
    costs = work.costs(placement).with_recompute(levels)
    return Problem(placement, microbatches, costs, work.limits(memory), workload=work, recomputation=Recomputation(offered, levels))


def count_again(schedule: Schedule) -> int:
    return sum(len(recomputed(row)) for row in schedule.rows)


def require_sound(solved: Plan) -> None:
    """The answer is legal, within its limits, as long as it says and not below its bound."""
    assert not schedule_faults(solved.schedule)
    assert not memory_faults(solved.schedule, solved.problem.costs, solved.problem.limits)
    played = metrics(solved.schedule, solved.problem.costs)
    assert solved.time == solved.problem.objective.time_of(solved.schedule, solved.problem.costs, played)
    assert solved.time >= solved.bound.time


@pytest.mark.sweep
@pytest.mark.parametrize(("memory", "objective"), [(1.0, "period"), (2.0, "makespan"), (4.0, "period")])
def test_plans_are_sound_and_never_slower_than_without(memory: float, objective: str) -> None:
    asked = {"placements": ["linear", "vee"], "objective": objective, "seed": 3}
    found = plan(WORK, 8, memory, recompute="auto", evaluations=150, **asked)  # type: ignore[arg-type]
    for choice in found.choices:
        require_sound(choice.plan)
        assert choice.plan.problem.workload == WORK
    savings = found.saving(RecomputeSavings)
    assert savings is not None
    assert savings.chosen.schedule is found.schedule
    without = plan(WORK, 8, memory, evaluations=100, **asked)  # type: ignore[arg-type]
    assert (found.time or 0) <= (without.time or 0)
    assert (savings.without.time or 0) >= (found.time or 0)
    again = plan(WORK, 8, memory, recompute="auto", evaluations=150, **asked)  # type: ignore[arg-type]
    assert again.schedule == found.schedule


@pytest.mark.long
def test_where_memory_is_short_it_pays_and_with_room_for_everything_nothing_is_computed_again() -> None:
    short = plan(WORK, 8, 1, placements="vee", recompute="auto", evaluations=500)
    savings = short.saving(RecomputeSavings)
    assert savings is not None
    assert savings.without.time is not None
    assert short.time is not None
    assert short.time < 0.75 * savings.without.time
    assert count_again(short.schedule) > 0
    states(" ".join(str(short).split()), "less", "R")
    ample = plan(WORK, 8, placements="vee", recompute="auto", evaluations=500)
    assert count_again(ample.schedule) == 0
    assert set(ample.problem.recomputation.chosen) == {NONE}  # type: ignore[union-attr]
    states(" ".join(str(ample).split()), "recomputation")


def test_what_full_costs_where_memory_is_ample_is_more_time() -> None:
    found = plan(WORK, 6, placements="linear", recompute="full", evaluations=0)
    states(" ".join(str(found).split()), "more", "R")


@pytest.mark.long
def test_full_computes_every_forward_again() -> None:
    found = plan(WORK, 6, 2, placements=["vee", "linear"], recompute="full", evaluations=200)
    for choice in found.choices:
        require_sound(choice.plan)
        assert count_again(choice.plan.schedule) == 6 * choice.plan.schedule.num_stages
        assert choice.plan.bound.time >= choice.plan.problem.work / 4 + 6 * 10e6
    assert "with full recomputation" not in str(found.savings[0])


def test_a_stage_that_no_gradient_reaches_takes_no_time_to_recompute() -> None:
    frozen_first = replace(Costs.from_ms([8, 4, 4], [0, 4, 4], [0, 4, 4]), placement=Placement.linear(3))
    found = plan(frozen_first, 6, Limits((10**7,) * 3), recompute="full", evaluations=50)
    require_sound(found)
    assert found.costs.column("recompute") == (0, 4_000_000, 4_000_000)
    assert found.timeline is not None
    busy = [sum(span.end - span.start for span in row) for row in found.timeline.rows]
    assert busy == [48_000_000, 96_000_000, 96_000_000]


@pytest.mark.sweep
@pytest.mark.parametrize("extra", [1.0, 0.2])
def test_levels_by_stage_that_agree_are_planned_as_one_number_is(extra: float) -> None:
    costs = replace(Costs.uniform(8, times=(10, 10, 8)), placement=Placement.vee(4))
    one, several = (
        plan(costs, 6, Limits((1_900_000,) * 4), recompute="auto", levels=[level], evaluations=300)
        for level in (Level("some", extra, 0.25), Level("some", (extra,) * 8, (0.25,) * 8))
    )
    assert one.schedule == several.schedule
    assert (one.time, one.bound) == (several.time, several.bound)


def test_levels_that_were_measured_with_the_costs_are_those_to_choose_from() -> None:
    """The second stage alone has something that is worth computing again: all of its own level, none of another stage's."""
    costs = Costs.uniform(4).with_level("odd", (0, 1_000, 0, 1_000), (1_000_000, 10_000, 1_000_000, 10_000))
    costs = replace(costs, placement=Placement.linear(4))
    found = plan(costs, 6, Limits((4_000_000, 1_500_000, 2_000_000, 1_500_000)), recompute="auto", evaluations=300)
    require_sound(found)
    assert {op.stage for row in found.schedule.rows for op in row if op.kind is Kind.R} <= {1, 3}
    savings = found.saving(RecomputeSavings)
    assert savings is not None
    assert savings.without.time is not None
    assert found.time is not None
    assert found.time < savings.without.time
    small = coarsened(found.problem, 2, 4)
    assert small.recomputation is not None
    assert small.recomputation.offered == (NONE, Level("odd", (0.0, 0.001), (1.0, 0.01)))
    with raises(InputError, "odd", 4, 8):
        plan(WORK, 4, 2, placements="vee", recompute="auto", levels=costs.levels, seconds=0)


def test_without_a_search_there_is_a_plan() -> None:
    require_sound(plan(WORK, 4, 1, placements="vee", recompute="auto", seconds=0))


def test_placements_with_any_name_are_planned() -> None:
    """A name may have blanks, as those of two placements of one name get."""
    first, second = Placement.custom([0, 1]), Placement.custom([1, 0])
    found = zb.plan(Workload.uniform(2, (1, 1, 1)), 3, 1.5, placements=[first, second], recompute="auto", evaluations=0)
    assert {choice.name: choice.plan.problem.placement for choice in found.choices} == {"custom": first, "custom (2)": second}


@pytest.mark.long
def test_what_fits_only_if_it_is_computed_again_has_a_plan_and_what_fits_nowhere_a_reason() -> None:
    costs = replace(Costs.uniform(4), placement=Placement.vee(2))
    found = plan(costs, 3, Limits((1_200_000,) * 2), recompute="auto", evaluations=100)
    require_sound(found)
    states(str(found.savings[0]), "R", 0.6, "nothing", "rank")
    nowhere = plan(costs, 3, Limits((1_050_000,) * 2), recompute="auto", evaluations=100)
    states(nowhere.reason, 0.525, 0.53, "rank")
    with raises(InputError, "schedule", "fits"):
        _ = nowhere.schedule


@pytest.mark.parametrize(("options", "says"), [(("--recompute", "auto"), "recomput"), (("--offload", "2"), "offload")])
def test_the_verb_plans_in_less_memory_than_one_microbatch_takes_where_that_is_possible(options: tuple[str, ...], says: str) -> None:
    """It refused what `zb.plan` plans: with R, or on the host, a rank never holds all that its stages save for a microbatch."""
    asked = ("plan", "-p", "2", "-m", "4", "--placement", "looped-4", "--memory", "0.5", "--evaluations", "0")
    states(refused(*asked), "0.5", 1)
    assert says in run(*asked, *options).stdout


@pytest.mark.parametrize("levels", [(FULL,) * 8, (FULL, NONE) * 4, (SELECTIVE,) * 4 + (FULL,) * 4])
def test_compiled_play_and_plain_play_agree_where_forwards_are_computed_again(levels: tuple[Level, ...]) -> None:
    problem = problem_at(Placement.vee(4), levels, 6, 2.0)
    result = search(problem, 0, seconds=0, evaluations=300)
    kernels = load_kernels()
    tables = kernels.tables_of(problem)
    rows = kernels.rows_of(tables, kernels.order_of(result.schedule))
    assert kernels.longest_time(tables, rows) == metrics(result.schedule, problem.costs).span
    tight = replace(problem, limits=Limits(peak_memory(result.schedule, problem.costs)))
    assert kernels.all_ranks_fit(kernels.tables_of(tight), rows)
    for rank in range(4):
        limits = list(tight.limits.memory)
        limits[rank] -= 1
        below = replace(problem, limits=Limits(tuple(limits)))
        assert not kernels.all_ranks_fit(kernels.tables_of(below), rows)


def test_less_is_computed_again_wherever_there_is_room_and_nothing_gets_longer() -> None:
    problem = problem_at(Placement.vee(4), (FULL,) * 8, 8, 2.5)
    result = search(problem, 0, seconds=0, evaluations=200)
    solved = Plan.from_schedule(problem, problem.bound(), result.schedule, 0.0, result.how)
    lighter = with_less_recompute(solved, Budget(0.0, 0))
    require_sound(lighter)
    assert lighter.time is not None
    assert solved.time is not None
    assert lighter.time <= solved.time
    assert count_again(lighter.schedule) < count_again(result.schedule)
    searched = with_less_recompute(solved, Budget(0.0, 400), 1)
    require_sound(searched)
    assert (searched.time or 0) <= lighter.time
    full = replace(problem, recomputation=Recomputation((FULL,), (FULL,) * 8))
    only = Plan.from_schedule(full, full.bound(), result.schedule, 0.0, result.how)
    placed = with_less_recompute(only, Budget(0.0, 400))
    require_sound(placed)
    assert (placed.time or 0) <= solved.time
    assert count_again(placed.schedule) == count_again(result.schedule)


# The bound, and the answers, against all that there is.


def all_schedules(placement: Placement, microbatches: int) -> Iterator[Schedule]:
    """Every legal order of F and BW with every choice of forwards that are computed again, microbatches in order."""
    passes = [(0, microbatch) for microbatch in range(microbatches)]
    rows: list[tuple[Op, ...]] = []
    for chosen in product(((Kind.F, Kind.R, Kind.BW), (Kind.F, Kind.BW)), repeat=microbatches):
        rows += orders([[Op(kind, *one) for kind in kinds] for one, kinds in zip(passes, chosen, strict=True)], ())
    for here, there in product(rows, repeat=2):
        schedule = Schedule("tried", placement, microbatches, (here, tuple(op._replace(stage=1) for op in there)))
        if not schedule_faults(schedule):
            yield schedule


def orders(waiting: list[list[Op]], row: tuple[Op, ...]) -> Iterator[tuple[Op, ...]]:
    """Every row in which the passes of each microbatch follow each other, and those of a kind in the order of microbatches."""
    if not any(waiting):
        yield row
    for place, own in enumerate(waiting):
        if own and not any(own[0].kind in [op.kind for op in other] for other in waiting[:place]):
            yield from orders([*waiting[:place], own[1:], *waiting[place + 1 :]], (*row, own[0]))


@pytest.mark.parametrize(("microbatches", "number"), [(2, 133), pytest.param(3, 11_496, marks=pytest.mark.long)])
def test_no_schedule_at_all_beats_the_bound_and_the_plan_is_near_the_best(microbatches: int, number: int) -> None:
    placement, levels = Placement.linear(2), (NONE, FULL)
    costs = replace(Costs.uniform(2, times=(3, 4, 2), comm=0.5), placement=placement).with_recompute(FULL)
    schedules = [(one, peak_memory(one, costs), metrics(one, costs)) for one in all_schedules(placement, microbatches)]
    assert len(schedules) == number
    alone = replace(costs, further=())
    for share in (1.1, 1.6, 2.0, 3.0):
        limits = Limits((round(share * 1_000_000),) * 2)
        spans, makespans = zip(*(times for _, peaks, times in schedules if max(peaks) <= limits.memory[0]), strict=True)
        bounds = bounds_with_recompute(placement, microbatches, costs, limits, levels)
        assert bounds.span.time <= min(spans)
        assert bounds.makespan.time <= min(makespans)
        found = plan(alone, microbatches, limits, recompute="auto", levels=[FULL], evaluations=20_000)
        assert found.time is not None
        assert found.time <= min(spans)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("shares", [(1.0, 3.0), (3.0, 1.0), (0.5, 0.7)])
def test_no_schedule_of_microbatches_of_unequal_cost_beats_the_bound(shares: tuple[float, ...]) -> None:
    placement, levels = Placement.linear(2), (NONE, FULL)
    costs = replace(Costs.uniform(2, times=(3, 4, 2), comm=0.5), placement=placement, shares=shares).with_recompute(FULL)
    schedules = [(one, peak_memory(one, costs), metrics(one, costs)) for one in all_schedules(placement, 2)]
    for room in (1.1, 1.4, 2.0):
        limits = Limits((round(room * max(shares) * 1_000_000),) * 2)
        spans, makespans = zip(*(times for _, peaks, times in schedules if max(peaks) <= limits.memory[0]), strict=True)
        bounds = bounds_with_recompute(placement, 2, costs, limits, levels)
        assert 0 < bounds.span.time <= min(spans)
        assert bounds.makespan.time <= min(makespans)
        in_full = bounds_with_recompute(placement, 2, costs, limits, [FULL])
        all_again = [times for one, peaks, times in schedules if max(peaks) <= limits.memory[0] and count_again(one) == 4]
        assert sum(shares) * (3 + 4 + 2 + 3) * 1_000_000 <= in_full.span.time <= min(times.span for times in all_again)
        assert in_full.makespan.time <= min(times.makespan for times in all_again)
        found = plan(replace(costs, further=()), 2, limits, recompute="auto", levels=[FULL], evaluations=20_000)
        assert bounds.span.time <= (found.time or 0) <= 1.1 * min(spans)


EXACT = {
    5: (Placement.vee(2), 2, ((7, 2, 9, 5), (2, 4, 3, 7), (9, 5, 8, 3)), 2, 2_947_992, 81),
    16: (Placement.vee(2), 2, ((9, 9, 6, 8), (5, 9, 2, 8), (6, 5, 5, 2)), 1, 3_106_131, 88),
    24: (Placement.linear(3), 3, ((8, 4, 5), (4, 5, 4), (3, 4, 6)), 2, 2_483_270, 65),
    35: (Placement.vee(2), 2, ((4, 7, 4, 6), (8, 6, 2, 6), (7, 3, 7, 2)), 2, 2_233_828, 87),
}
"""Problems of `benchmarks/recompute`, with their memory in bytes and the optimum in ms that CP-SAT proved."""


@pytest.mark.parametrize("number", EXACT)
def test_single_forwards_and_places_of_r_are_found_that_an_exact_solver_finds(number: int) -> None:
    placement, microbatches, times, comm, memory, optimum = EXACT[number]
    costs = replace(Costs.from_ms(*times, comm=comm), placement=placement)
    limits = Limits((memory,) * placement.num_ranks)
    found = plan(costs, microbatches, limits, recompute="auto", levels=[FULL], evaluations=60_000)
    require_sound(found)
    assert found.time == optimum * 1_000_000
    assert 0 < count_again(found.schedule) < placement.num_stages * microbatches


def test_the_forward_of_a_rank_s_first_backward_counts_in_full_so_that_a_bound_meets_an_optimum() -> None:
    """Were it to leave its R for later, as all forwards before may, three more ms would fit before that backward."""
    placement, microbatches, times, comm, memory, optimum = EXACT[35]
    costs = replace(Costs.from_ms(*times, comm=comm), placement=placement)
    assert bounds_with_recompute(placement, microbatches, costs, Limits((memory,) * 2), (NONE, FULL)).span.time == optimum * 1_000_000


def test_what_fits_with_backwards_in_one_piece_alone_is_planned() -> None:
    costs = replace(Costs.uniform(4, held=1.3, stages_per_rank=2), placement=Placement.vee(2))
    found = plan(costs, 6, Limits((2_400_000,) * 2), recompute="auto", levels=[Level("full", 1.0, 0.08)], evaluations=5000)
    require_sound(found)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", every(2, range(8, 20)))
def test_plans_of_random_problems_are_sound_whatever_b_leaves_to_w(seed: int) -> None:
    dice = Random(seed)
    placement = dice.choice((Placement.linear(4), Placement.vee(2), Placement.looped(2, 3)))
    stages, ranks = placement.num_stages, placement.num_ranks
    times = [[dice.choice((0, 1, 3, 5, 9)) for _ in range(stages)] for _ in range(3)]
    saved, left = ([1000 * dice.randint(1, 6) for _ in range(stages)] for _ in range(2))
    costs = replace(Costs.from_ms(*times, comm=1), held_after_f=tuple(saved), held_after_b=tuple(left), placement=placement)
    room = dice.uniform(1.0, 2.5)
    limits = [round(room * sum(each for each, home in zip(saved, placement.routes[0], strict=True) if home == r)) for r in range(ranks)]
    found = plan(costs, 6, Limits(tuple(limits)), recompute="auto", levels=[Level("a", 0.5, 0.3), FULL], evaluations=600, seed=seed)
    if found.order is None:
        states(found.reason, "limit")
    else:
        require_sound(found)


def test_forwards_before_the_first_b_count_less_the_r_that_they_leave_for_later() -> None:
    """6.2B in half of the memory of 1F1B: without R nothing fills the time until the first B, and R fills it with what it costs later."""
    work = zb.Workload.uniform(8, (29.802, 29.428, 19.530), 0.577)
    costs, limits = work.costs(Placement.vee(8)), work.limits(4)
    bound = bounds_with_recompute(Placement.vee(8), 24, costs, limits, [NONE, SELECTIVE, FULL]).span
    assert bound.time / (24 * (29.802 + 29.428 + 19.530) * 1_000_000) == pytest.approx(1.1153, abs=5e-5)
    states(bound.reason, "174.3 ms", "R")


def test_the_bound_counts_the_work_of_r_where_nothing_may_be_left_out() -> None:
    costs, limits = Costs.uniform(2, times=(10, 10, 10)), Limits((9_000_000,) * 2)
    bounds = bounds_with_recompute(Placement.linear(2), 4, costs, limits, [FULL])
    assert bounds.span.time >= 160_000_000
    assert bounds.makespan.time >= 170_000_000
    assert "160 ms" in bounds.span.reason
    free = bounds_with_recompute(Placement.linear(2), 4, costs, limits, [NONE, FULL])
    assert free.span.time < 160_000_000


def test_a_microbatch_needs_what_its_stages_keep_and_all_that_one_saves() -> None:
    costs, placement = Costs.uniform(4), Placement.vee(2)
    states(shortage_with_recompute(placement, costs, Limits((1, 1)), [(NONE, FULL)] * 4), 1.06, "rank")
    states(shortage_with_recompute(placement, costs, Limits((1, 1)), [(NONE,)] * 4), 2, "rank")
    assert not shortage_with_recompute(placement, costs, Limits((1_060_000,) * 2), [(FULL,)] * 4)


# Levels, files and errors.


def test_levels_are_read_and_refused_with_the_reason() -> None:
    assert parse_levels("a:0.5:0.25, full:1:0.06") == (Level("a", 0.5, 0.25), FULL)
    assert levels_for("none", None) == ()
    assert levels_for("full", None) == (FULL,)
    assert levels_for("auto", [FULL]) == (NONE, FULL)
    wrong = {
        "full": ("full",),
        "full:x:1": ("full:x:1",),
        ":1:1": ("name", "level"),
        "full:1:2": (2,),
        "full:-1:0.5": ("full", "share", "time", -1),
    }
    for text, stated in wrong.items():
        with raises(InputError, *stated):
            parse_levels(text)
    for mode, levels, stated in (
        ("some", None, ("some", "recompute")),
        ("none", [FULL], ("levels", "recompute")),
        ("auto", [], ("level",)),
        ("auto", [NONE], ("none",)),
        ("full", [SELECTIVE], ("full", "level")),
    ):
        with raises(InputError, *stated):
            levels_for(mode, levels)
    with raises(InputError, "full", "levels", "recompute"):
        plan(WORK, 4, 2, placements="vee", recompute="auto", levels=[FULL, FULL], seconds=0)


def test_recompute_levels_by_direction_are_all_for_few_stages_and_less_memory_first_for_many() -> None:
    assert len(list(level_choices(Placement.vee(2), (NONE, SELECTIVE, FULL)))) == 9
    many = list(level_choices(Placement.looped(2, 4), (NONE, SELECTIVE, FULL)))
    assert len(many) == 15
    for levels in many:
        kept = [level.kept for level in levels[::2]]
        assert kept == sorted(kept)


def test_problems_have_the_costs_of_their_levels() -> None:
    problem = problem_at(Placement.linear(4), (FULL,) * 4, 2, 2.0)
    with raises(InputError, "costs", "levels", "with_recompute"):
        replace(problem, recomputation=Recomputation((NONE, FULL), (NONE,) * 4))
    with raises(InputError, "full", "stage", "level"):
        Recomputation((NONE,), (FULL,))


def test_plan_files_keep_levels_and_a_pipeline_plays_what_it_is_reported_of(tmp_path: Path) -> None:
    for levels in ([FULL], None):
        found = plan(WORK, 6, 1, placements="vee", recompute="auto", levels=levels, evaluations=300)
        save_plan(found, tmp_path / "plan.json")
        loaded = load_plan(tmp_path / "plan.json")
        assert loaded.problem == found.problem
        assert (loaded.schedule, loaded.time) == (found.schedule, found.time)
    problem = problem_at(Placement.linear(2), (SELECTIVE, FULL), 2, 2.0, Workload.uniform(2, (10, 10, 8)))
    schedule = zb.schedules.with_recompute(zb.make("zb-h1", 2, 2))
    partly = Plan.from_schedule(problem, problem.bound(), schedule, 0.0, "made")
    left = Plan.from_schedule(problem, problem.bound(), zb.schedules.with_recompute(zb.make("zb-h1", 2, 2), stages=[1]), 0.0, "made")
    with raises(InputError, "0 (selective)", "--levels", "full:1:0.06"):
        recompute_levels(options_for(partly, None), schedule)
    reported = recompute_levels(options_for(partly, {"selective": "*.attn"}), schedule)
    assert [reported.name_of(stage) for stage in range(2)] == ["selective", "full"]
    assert recompute_levels(options_for(left, None), left.schedule).name_of(1) == "full"


def options_for(solved: Plan, recompute: GivenLevels | None) -> PipelineOptions:
    """Those of a pipeline that plays a plan, as far as levels go by them."""
    names = [field.name for field in fields(PipelineOptions)]
    return PipelineOptions(**{**dict.fromkeys(names), "schedule": solved, "recompute": recompute})  # type: ignore[arg-type]


# The command line.

ASK = "plan --ranks 2 --microbatches 4 --times 10,10,8 --placement vee --memory 1 --evaluations 200"


def test_the_command_line_shows_levels_and_prints_the_schedule(tmp_path: Path) -> None:
    text = run(*shlex.split(f"{ASK} --recompute full --format text")).stdout
    assert re.search(r"0F0 .*0R0 0B0", text)
    assert count_again(Schedule.from_text(text)) == 16
    file = str(tmp_path / "plan.json")
    data = json.loads(run(*shlex.split(f"{ASK} --recompute auto --levels full:1:0.06 --json -o {file}")).stdout)
    assert set(data["levels"]) <= {"none", "full"}
    assert len(data["levels"]) == 4
    assert data["recomputation"]["forwards"]["full"] > 0
    assert data["recomputation"]["without"]["time_ms"] > data["span_ms"]
    assert data["csv"] is None
    assert data["how"] in run("show", file).stdout
    anew = json.loads(run("plan", "--costs", file, "--placement", "vee", "--evaluations", "200", "--json").stdout)
    assert anew["span_ms"] == data["span_ms"]
    plain = json.loads(run(*shlex.split(f"{ASK} --json")).stdout)
    assert "levels" not in plain
    assert "recomputation" not in plain


def test_the_command_line_refuses_what_cannot_be() -> None:
    states(refused(*shlex.split(f"{ASK} --levels full:1:0.06")), "levels", "recompute")
    assert "name:time:bytes" in refused(*shlex.split(f"{ASK} --recompute auto --levels full"))


@pytest.mark.long
def test_the_stages_of_a_cut_are_planned_with_recomputation(tmp_path: Path) -> None:
    layers, file = tmp_path / "layers.json", str(tmp_path / "plan.json")
    layers.write_text(json.dumps([[10, 10, 8]] * 10), encoding="utf-8")
    asked = ["plan", "--ranks", "4", "--microbatches", "6", "--layers", str(layers), "--placement", "vee", "--memory", "2"]
    cut = json.loads(run(*asked, "--evaluations", "100", "--json", "-o", file).stdout)
    again = json.loads(run("plan", "--costs", file, "--recompute", "auto", "--evaluations", "400", "--json").stdout)
    assert again["span_ms"] < cut["span_ms"]
    assert again["recomputation"]["chosen"]["time_ms"] == again["span_ms"]
    together = json.loads(run(*asked, "--recompute", "auto", "--evaluations", "200", "--json").stdout)
    assert together["span_ms"] < cut["span_ms"]


def test_the_page_runs_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    _, program, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {"zb": zb})
    levels, savings = capsys.readouterr().out.splitlines()
    assert "'full'" in levels
    states(savings, "R", "recomputation")
    commands = re.findall(r"^\$ zerobubble (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        short = command if "--evaluations" in command else f"{command} --evaluations 100"
        assert run(*shlex.split(short)).exit_code == 0, command


@pytest.mark.parametrize(("mode", "memory"), [("full", 1), ("full", 2), ("auto", 0.6)])
def test_passes_that_overlap_are_planned_with_recomputation(mode: str, memory: float) -> None:
    """The bound shortens F by what overlapped passes hide, and with it R."""
    costs = Costs.uniform(4, (10, 10, 8), comm=1, overlap=20, stages_per_rank=2)
    found = zb.plan(costs, 4, memory, placements=Placement.vee(2), recompute=mode, evaluations=60)
    assert not schedule_faults(found.schedule)
    assert found.time is not None
    assert found.bound.time <= found.time


@pytest.mark.parametrize("is_late", [False, True])
def test_choices_of_levels_are_tried_until_the_budget_is_over(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """On a clock that stands still, several are on each placement; on one on which every look takes an hour, only one has a schedule."""
    opened: list[str] = []
    clock, before = count(0, 3600 if is_late else 0), competition.start_attempt
    monkeypatch.setattr(competition, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(competition, "start_attempt", lambda name, *rest: (opened.append(name), before(name, *rest))[1])
    found = plan(WORK, 6, 1.5, placements=["vee", "linear"], recompute="auto", seconds=0.2)
    assert found.order is not None
    choices = {name: opened.count(name) for name in ("vee", "linear")}
    assert sum(choices.values()) == 1 if is_late else min(choices.values()) > 1


@pytest.mark.parametrize("memory", [13_000, 15_500])
def test_layers_that_fit_only_with_recomputation_are_planned_over_all_placements(memory: int) -> None:
    """There are so many choices of levels that none without R stays in the list."""
    layers = [Layer(0, 0, 0, 10, 10, 3_000), *[Layer(10, 15, 8, 1_000, 500, 700)] * 36, Layer(30, 30, 30, 2_000, 1_000, 3_000)]
    found = zb.plan(layers, 8, zb.Limits((memory,) * 4), recompute="auto", evaluations=0)
    savings = found.saving(RecomputeSavings)
    assert found.order is not None
    assert savings is not None
    assert savings.without.order is None
    problem = savings.without.problem
    assert problem.cut is not None
    first = [layers[place] for _, stage in problem.placement.stages(0) for place in problem.cut.stages[stage]]
    held, left = (sum(getattr(layer, name) for layer in first) for name in ("held_after_f", "parameters_bytes"))
    states(savings.without.reason, "rank 0", show_bytes(held), show_bytes(memory - left))
