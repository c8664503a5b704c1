"""Bounds: never above the optimum, equal to it if a known schedule is optimal, and explained in words.

No schedule beats a bound, including those of an exact solver and any order of unequal microbatches.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.pure.golden import TABLE_5, Profile
from tests.pure.orders import every_schedule, played
from tests.pure.problems import problems
from tests.pure.shapes import TRAINING, grid, stage_counts
from tests.refusals import Stated, raises, states
from tests.thinned import every_and_all
from zerobubble import Costs, InputError, Kind, Limits, Op, Placement, Schedule, ScheduleError, Workload, make, simulate
from zerobubble.bounds import lower_bounds, microbatch_starts, shortage
from zerobubble.bounds.chain import chain_needs, earliest_starts, passes_by_rank
from zerobubble.bounds.memory import memory_energy, unused_memory, wait_at_most
from zerobubble.bounds.microbatch_starts import MicrobatchStarts
from zerobubble.bounds.rank_load import MicrobatchState, RankLoad
from zerobubble.bounds.slack import knapsack
from zerobubble.simulation import peak_memory

ONE_ROUTE = [name for name in TRAINING if len(make(name, 4, 8).placement.routes) == 1]

BENCHMARK = Path(__file__).parents[2] / "benchmarks/bounds"

SHAPES = [(1, 3), (2, 4), (3, 7), (4, 3), (4, 8), (8, 16)]


def own_limits(schedule: Schedule, costs: Costs) -> Limits:
    return Limits(tuple(max(1, peak) for peak in peak_memory(schedule, costs)))


def hold(schedule: Schedule, costs: Costs) -> None:
    """The bounds at the schedule's own memory, and without a limit, are not above its times."""
    timeline = simulate(schedule, costs)
    for limits in (own_limits(schedule, costs), None):
        bounds = lower_bounds(schedule.placement, schedule.num_microbatches, costs, limits)
        assert bounds.span.time <= timeline.span, bounds.span
        assert bounds.makespan.time <= timeline.makespan, bounds.makespan
        assert bounds.span.time <= bounds.makespan.time


# Never above the truth.


@pytest.mark.sweep
@every_and_all(2)
@pytest.mark.parametrize("name", ONE_ROUTE)
def test_no_published_schedule_beats_a_bound(name: str, nth: int) -> None:
    dice = random.Random(name)
    for stages_per_rank in stage_counts(name):
        for ranks, microbatches in grid(name, stages_per_rank, SHAPES[::nth]):
            schedule = make(name, ranks, microbatches, stages_per_rank=stages_per_rank)
            hold(schedule, Costs.uniform(schedule.num_stages, (1.0, 1.1, 0.6), dice.choice((0.0, 0.3)), held=dice.choice((0.4, 1.0))))
            hold(schedule, uneven(schedule.num_stages, dice))


def uneven(stages: int, dice: random.Random) -> Costs:
    """Times and bytes in which every stage differs, zeros among them."""

    def column(low: int, high: int, length: int = stages) -> tuple[int, ...]:
        return tuple(dice.randint(low, high) for _ in range(length))

    return Costs(column(0, 9), column(0, 9), column(0, 9), column(0, 4, stages - 1), column(1, 5), column(0, 6))


@pytest.mark.long
@given(problems())
@settings(max_examples=200)
def test_no_random_schedule_beats_a_bound(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    if len(schedule.placement.routes) == 1:
        hold(schedule, costs)


@cache
def orders(stages: int, microbatches: int) -> list[tuple[tuple[Kind, int, int], ...]]:
    """Every order of one rank's passes: (kind, which of its stages, microbatch), microbatches in order for each kind and stage."""
    found = []

    def go_on(row: tuple[tuple[Kind, int, int], ...], done: dict[tuple[Kind, int], int]) -> None:
        if len(row) == 3 * stages * microbatches:
            found.append(row)
        for (kind, stage), count in done.items():
            earlier = {Kind.F: (Kind.F, stage - 1), Kind.B: (Kind.B, stage + 1), Kind.W: (Kind.B, stage)}[kind]
            before = done.get((Kind.F, stage) if kind is Kind.B and stage == stages - 1 else earlier, microbatches)
            if count < min(before, microbatches):
                go_on((*row, (kind, stage, count)), done | {(kind, stage): count + 1})

    go_on((), {(kind, stage): 0 for kind in (Kind.F, Kind.B, Kind.W) for stage in range(stages)})
    return found


def all_schedules(placement: Placement, microbatches: int, stage_rows: list[list[int]]) -> Iterator[Schedule]:
    for rows in product(*(orders(len(own), microbatches) for own in stage_rows)):
        named = tuple(tuple(Op(kind, own[s], j) for kind, s, j in row) for row, own in zip(rows, stage_rows, strict=True))
        yield Schedule("any", placement, microbatches, named)


def outcomes(placement: Placement, microbatches: int, costs: Costs) -> list[tuple[tuple[int, ...], int, int]]:
    """Peaks, span and makespan of every schedule that can run."""
    own = [[stage for _, stage in placement.stages(rank)] for rank in range(placement.num_ranks)]
    found = []
    for schedule in all_schedules(placement, microbatches, own):
        try:
            timeline = simulate(schedule, costs)
        except ScheduleError:
            continue
        found.append((peak_memory(schedule, costs), timeline.span, timeline.makespan))
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("placement", "microbatches"),
    [
        (Placement.vee(1), 2),
        (Placement.linear(2), 2),
        (Placement.linear(3), 2),
        (Placement.linear(2), 3),
        pytest.param(Placement.custom([0, 1, 0]), 2, marks=pytest.mark.long),
    ],
    ids=lambda value: f"{value.name}{value.num_ranks}" if isinstance(value, Placement) else str(value),
)
def test_no_order_at_all_beats_a_bound(placement: Placement, microbatches: int) -> None:
    """Of all orders of tiny problems, at every limit that lets some of them through; half of the bounds are met."""
    dice, met = random.Random(placement.num_stages + microbatches), []
    for _ in range(2):
        costs = uneven(placement.num_stages, dice)
        costs = replace(costs, held_after_b=tuple(map(min, costs.held_after_f, costs.held_after_b)))
        found = outcomes(placement, microbatches, costs)
        for limit in {peaks for peaks, _, _ in found}:
            fitting = [times for peaks, *times in found if all(map(int.__le__, peaks, limit))]
            best = [min(times) for times in zip(*fitting, strict=True)]
            bounds = lower_bounds(placement, microbatches, costs, Limits(limit))
            assert bounds.span.time <= best[0], bounds.span
            assert bounds.makespan.time <= best[1], bounds.makespan
            met += [bounds.span.time == best[0], bounds.makespan.time == best[1]]
    assert sum(met) > len(met) / 2


@pytest.mark.parametrize(
    ("placement", "shares"),
    [pytest.param(Placement.linear(1), (1, 3, 2), marks=pytest.mark.long), (Placement.linear(2), (2, 1)), (Placement.linear(2), (0.5, 4))],
    ids=lambda value: f"{value.name}{value.num_ranks}" if isinstance(value, Placement) else str(value),
)
def test_no_order_of_microbatches_of_unequal_cost_beats_a_bound(placement: Placement, shares: tuple[float, ...]) -> None:
    """Of all orders of tiny problems, microbatches in any order at every stage, at every limit that lets some of them through."""
    dice, met = random.Random(placement.num_stages), []
    costs = replace(uneven(placement.num_stages, dice), shares=shares)
    found = [
        (peak_memory(schedule, costs), timeline.span, timeline.makespan)
        for schedule in every_schedule(placement, len(shares))
        for timeline in played(schedule, costs)
    ]
    for limit in {peaks for peaks, _, _ in found}:
        best = [min(times) for times in zip(*(times for peaks, *times in found if all(map(int.__le__, peaks, limit))), strict=True)]
        bounds = lower_bounds(placement, len(shares), costs, Limits(limit))
        assert bounds.span.time <= best[0], bounds.span
        assert bounds.makespan.time <= best[1], bounds.makespan
        assert not shortage(placement, costs, Limits(limit))
        met += [bounds.span.time == best[0], bounds.makespan.time == best[1]]
    assert any(met)


ROWS = Path(__file__).with_name("reference_spans.txt").read_text().splitlines()[2:]


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted({row.split()[0] for row in ROWS}))
def test_the_authors_code_beats_no_bound(name: str) -> None:
    for row in ROWS:
        scheduler, kind, ranks, microbatches, stages_per_rank, *numbers, peak, span, makespan = row.split()
        if scheduler != name:
            continue
        placement = placed(kind, int(ranks), int(stages_per_rank))
        costs = priced(placement, [float(number) / 1000 for number in numbers[:4]], (int(numbers[4]), int(numbers[5])))
        bounds = lower_bounds(placement, int(microbatches), costs, Limits((int(peak),) * int(ranks)))
        assert bounds.span.time <= float(span) * 1000 + 1000
        assert makespan == "-" or bounds.makespan.time <= float(makespan) * 1000 + 1000


def placed(kind: str, ranks: int, stages_per_rank: int) -> Placement:
    others = {"linear": Placement.linear, "vee": Placement.vee}
    return Placement.looped(ranks, stages_per_rank) if kind == "looped" else others[kind](ranks)


def priced(placement: Placement, times: list[float], held: tuple[int, int]) -> Costs:
    """Equal stages with these times of F, B, W and a message in ms."""
    stages = placement.num_stages
    columns = [(time,) * stages for time in times[:3]]
    return Costs.from_ms(*columns, times[3], held_after_f=(held[0],) * stages, held_after_b=(held[1],) * stages)


# Equal to the truth.

FLASH, PAPER = (34, 32), {"1.5B": (201216, 73728), "6.2B": (74, 32), "14.6B": (74, 32), "28.3B": (74, 32)}
FIRST = {profile.model: profile for profile in reversed(TABLE_5)}


def rates(profile: Profile, microbatches: int, kind: str, limit: float, held: tuple[int, int]) -> tuple[float, float]:
    """The bubble rates (%) that the bounds leave, for times of a rank and a limit in microbatches of a whole rank."""
    stages_per_rank = 2 if kind == "vee" else 1
    placement = placed(kind, profile.ranks, stages_per_rank)
    costs = priced(placement, [*(time / stages_per_rank for time in profile.times), profile.comm], held)
    limits = Limits((round(limit * stages_per_rank) * held[0],) * profile.ranks)
    bounds = lower_bounds(placement, microbatches, costs, limits)
    work = microbatches * sum(profile.times) * 1_000_000
    return 100 * (1 - work / bounds.span.time), 100 * (1 - work / bounds.makespan.time)


@pytest.mark.parametrize("profile", TABLE_5, ids=lambda p: f"{p.model}-{p.microbatches}")
def test_zb_1p_cannot_be_beaten_with_a_stage_a_rank(profile: Profile) -> None:
    """All twelve published bubble rates of ZB-1p are the bound at its memory, to the last printed digit."""
    bound = rates(profile, profile.microbatches, "linear", profile.ranks, PAPER[profile.model])
    assert round(bound[0] / 100, 4) == profile.rates["zb-h1"]


@pytest.mark.long
@every_and_all(5)
def test_bounds_of_the_papers_instances(nth: int) -> None:
    for line in Path(__file__).with_name("bounds.txt").read_text().splitlines()[2::nth]:
        model, ranks, microbatches, kind, limit, memory, *wanted = line.split()
        slots = round(float(limit) * int(ranks) * (2 if kind == "vee" else 1)) / (2 if kind == "vee" else 1)
        found = rates(FIRST[model], int(microbatches), kind, slots, FLASH if memory == "flash" else PAPER[model])
        assert [f"{rate:.2f}" for rate in found] == wanted[:2], line
        assert all(round(rate, 2) <= float(best) for rate, best in zip(found, wanted[2:], strict=True)), line


@pytest.mark.parametrize(
    ("heavier", "lighter", "limit", "rate"),
    [(0.1, 0, 8, 0.26), (0.2, 0, 8, 0.24), (0.3, 0, 8, 0.22), (0.3, 0.1, 8, 1.59), (0.1, 0, 5, 3.49), (0.3, 0.1, 5, 5.00)],
)
def test_unequal_stages(heavier: float, lighter: float, limit: int, rate: float) -> None:
    """The last stage heavier and the first lighter by shares of a whole rank: at 8 microbatches a search found schedules this good."""
    placement, profile = Placement.vee(8), FIRST["6.2B"]
    columns = [[time / 2 - lighter * time, *[time / 2] * 14, time / 2 + heavier * time] for time in profile.times]
    costs = Costs.from_ms(*columns, profile.comm, held_after_f=(34,) * 16, held_after_b=(32,) * 16)
    bounds = lower_bounds(placement, 32, costs, Limits((2 * limit * 34,) * 8))
    work = 32 * sum(profile.times) * (1 + max(0, heavier - lighter)) * 1_000_000
    assert 100 * (1 - work / bounds.span.time) == pytest.approx(rate, abs=0.005)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("times", [(10.0, 11.0, 6.0, 0.5), (10.0, 10.0, 10.0, 0.0), (12.0, 12.0, 8.0, 1.0)])
def test_closed_forms_at_the_memory_of_1f1b(ranks: int, times: tuple[float, float, float, float]) -> None:
    f, b, w, c = times
    for microbatches in (2 * ranks, 5 * ranks):
        profile = Profile("", ranks, microbatches, (f, b, w), c, {})
        work = microbatches * (f + b + w)
        linear = max(0.0, (ranks - 1) * (f + b - w + 4 * c))
        vee = max(0.0, ((ranks - 1) * (f + b - 2 * w) - w) / 2 + 6 * (ranks - 1) * c)
        for kind, idle in (("linear", linear), ("vee", vee)):
            span, _ = rates(profile, microbatches, kind, ranks, (1, 1))
            assert span == pytest.approx(100 * idle / (work + idle))


# Optima that a solver proved (p, m, stage activations that fit, times of F, B, W and a message, bytes saved and pending, span, makespan).
LINEAR = """
2 4 1 1 1 1 0 1 1 20 20 | 2 4 2 1 1 1 0 1 1 13 13 | 2 4 3 1 1 1 0 1 1 12 13 | 3 6 1 1 1 1 0 1 1 42 42 | 3 6 2 1 1 1 0 1 1 25 25
3 6 3 1 1 1 0 1 1 20 20 | 3 6 4 1 1 1 0 1 1 19 20 | 3 6 5 1 1 1 0 1 1 18 20 | 3 6 2 3 3 2 1 1 1 80 80 | 3 6 3 3 3 2 1 1 1 64 64
3 6 4 3 3 2 1 1 1 58 58 | 3 6 5 3 3 2 1 1 1 56 56 | 3 6 2 2 3 1 0 2 1 55 55 | 3 6 3 2 3 1 0 2 1 44 44 | 3 6 4 2 3 1 0 2 1 41 41
3 6 5 2 3 1 0 2 1 41 41 | 4 6 3 1 1 1 0 1 1 24 - | 4 8 3 1 1 1 0 1 1 31 - | 4 10 3 1 1 1 0 1 1 37 - | 5 8 4 1 1 1 0 1 1 31 -
5 10 4 1 1 1 0 1 1 37 - | 4 6 2 1 1 1 0 1 1 31 - | 4 8 2 1 1 1 0 1 1 41 -
"""
VEE = """
2 4 2 33 | 2 4 3 27 | 2 4 4 24 | 2 6 2 49 | 2 6 3 39 | 2 6 4 36 | 3 6 2 63 | 3 6 3 52 | 3 6 4 41 | 3 6 5 39 | 3 6 6 36
4 8 3 86 | 4 8 4 59 | 4 8 5 56 | 4 8 6 53 | 4 8 7 51 | 4 8 8 48
"""
LOOPED = "2 4 4 25 25 | 2 4 5 24 25 | 3 6 6 38 38 | 3 6 8 36 38"


def optima(text: str) -> list[list[str]]:
    return [row.split() for line in text.strip().splitlines() for row in line.split("|")]


def test_proved_optima() -> None:
    """No bound is above a proved optimum, and most are equal to it: all but those with less memory than makes a steady state."""
    loose = {"linear": 6, "vee": 6, "looped": 0}
    unit = ["1", "1", "1", "0", "1", "1"]
    cases = {
        "linear": optima(LINEAR),
        "vee": [[*row[:3], *unit, *row[3:], "-"] for row in optima(VEE)],
        "looped": [[*row[:3], *unit, *row[3:]] for row in optima(LOOPED)],
    }
    for kind, rows in cases.items():
        above = 0
        for ranks, microbatches, limit, *numbers, span, makespan in rows:
            placement = placed(kind, int(ranks), 2)
            f, b, w, comm, saved, pending = map(int, numbers)
            costs = priced(placement, [f, b, w, comm], (saved, pending))
            bounds = lower_bounds(placement, int(microbatches), costs, Limits((int(limit) * saved,) * int(ranks)))
            assert bounds.span.time <= int(span) * 1_000_000
            assert makespan == "-" or bounds.makespan.time <= int(makespan) * 1_000_000
            above += bounds.span.time < int(span) * 1_000_000
        assert above == loose[kind]


# In words.


def reasons(ranks: int, microbatches: int, memory: float | None, kind: str = "linear") -> tuple[str, str]:
    """Why span and makespan are at least what they are, at times 10, 11, 6 and 0.5 ms of a stage; memory in microbatches of a stage."""
    placement = placed(kind, ranks, 2)
    costs = priced(placement, [10, 11, 6, 0.5], (2, 1))
    limits = None if memory is None else Limits((round(memory * 2),) * ranks)
    bounds = lower_bounds(placement, microbatches, costs, limits)
    return bounds.span.reason, bounds.makespan.reason


def test_reasons_say_what_must_wait_for_what() -> None:
    states(reasons(1, 5, None)[0], "rank 0", "135 ms")
    assert reasons(4, 8, 5) == (
        "rank 0 has 216 ms of work and must idle 26 ms before its first B of stage 0, because only 5 of its forwards fit in memory",
        "rank 3 has 216 ms of work and cannot begin before 31.5 ms",
    )
    states(reasons(4, 8, 4)[0], "rank 0", "216 ms", "36 ms", "B", "stage 0", 4, "15 ms", "F", "68 ms")
    states(reasons(4, 8, 8, "vee")[0], "rank 3", "432 ms", "rank 0", "37.5 ms", "B", "stage 4", 8, "7.5 ms")
    states(reasons(2, 8, 1)[0], "rank 0", "343 ms", "F", "stage 0", 1, "B")
    assert set(reasons(4, 8, 2)) == {
        "the critical path until rank 0 ends takes 321 ms for microbatches to pass through the stages, "
        "and 78 ms of work in between on rank 0"
    }


def test_reasons_do_not_show_the_rounding_of_times_to_ns() -> None:
    """A third of 1 ms is no whole number of ns, so the passes of 3 stages and 24 microbatches take less than 72 ms."""
    placement = Placement.wave(8, 3)
    bound = lower_bounds(placement, 24, Workload.uniform(8, (1, 1, 1)).costs(placement), None).span
    assert 71_999_000 < bound.time < 72_000_000
    states(bound.reason, "rank 0", "72 ms")


def test_the_figures_of_a_reason_add_up() -> None:
    """Four F fill the time until the first B returns, four B and W the time until the last one does."""
    costs = priced(Placement.linear(4), [10, 11, 6, 0.5], (2, 1))
    bounds = lower_bounds(Placement.linear(4), 8, costs, Limits((8,) * 4))
    alone = 4 * 10 + 4 * 11 + 6 * 0.5
    before, after = alone - 11 - 4 * 10, alone + 6 - 10 - 4 * (11 + 6)
    assert bounds.span.time == (8 * (10 + 11 + 6) + before + after) * 1_000_000


def tight_problem(dice: random.Random) -> tuple[Placement, int, Costs, Limits]:
    """Unequal stages on any placement, in memory for one to three microbatches of a rank, which makes forwards wait for room."""
    ranks = dice.randint(1, 4)
    placement = dice.choice([Placement.linear(ranks), Placement.vee(ranks), Placement.looped(ranks, 2), Placement.custom([0, 1, 0, 2, 1])])
    costs = uneven(placement.num_stages, dice)
    costs = replace(costs, held_after_b=tuple(map(min, costs.held_after_f, costs.held_after_b)))
    whole = [sum(costs.held_after_f[stage] for _, stage in placement.stages(rank)) for rank in range(placement.num_ranks)]
    return placement, dice.randint(1, 12), costs, Limits(tuple(round(held * dice.uniform(1, 3)) for held in whole))


def test_what_passes_wait_for_adds_up_to_every_earliest_start() -> None:
    """From the start of any pass of any microbatch back to the first pass of all: each wait begins where the one before it ends."""
    kinds: set[str] = set()
    for number in range(40):
        placement, microbatches, costs, limits = tight_problem(random.Random(number))
        by_rank = passes_by_rank(placement, microbatches, costs, limits, earliest_starts(placement, costs))
        starts = MicrobatchStarts(chain_needs(placement, costs), microbatches, by_rank)
        for here in by_rank:
            for visit in (None, *range(len(here.passes))):
                causes = list(starts.critical_path(here.rank, visit))
                assert sum(cause.time for cause in causes) == starts.last(here.rank, visit)
                assert visit is None or all(cause.time >= 0 for cause in causes)
                kinds |= {cause.reason for cause in causes}
    assert kinds == {"transit", "work", "memory"}


def test_microbatches_that_are_not_looked_at_count_by_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer microbatches looked at one by one no bound is higher; with all of them some are."""
    higher = 0
    for number in range(20):
        problem = tight_problem(random.Random(number))
        monkeypatch.setattr(microbatch_starts, "MOST_STEPS", 60_000)
        whole = lower_bounds(*problem)
        monkeypatch.setattr(microbatch_starts, "MOST_STEPS", 100)
        few = lower_bounds(*problem)
        assert few.span.time <= whole.span.time
        assert few.makespan.time <= whole.makespan.time
        higher += few.span.time < whole.span.time
    assert higher


def test_the_bounds_of_the_benchmark_are_those_it_reports() -> None:
    """For small problems with a proven optimum. The page reports for how many of them the bound is tight."""
    results = json.loads((BENCHMARK / "results.json").read_text(encoding="utf-8"))
    optima = json.loads((BENCHMARK / "optima.json").read_text(encoding="utf-8"))
    rows = results["small"]
    assert {str(row["number"]): row["optimum_ms"] for row in rows} == {number: time for number, time in optima.items() if time is not None}
    assert all(row["bound_ms"] <= row["optimum_ms"] for row in rows)
    assert results["summary"]["tight"] == sum(row["bound_ms"] == row["optimum_ms"] for row in rows)
    page = " ".join((BENCHMARK.parents[1] / "docs/planner.md").read_text(encoding="utf-8").split())
    summary = results["summary"]
    states(page, summary["tight"], summary["proven"], "problems", "optimum")
    states(page, summary["mean_over"], summary["worst_over"], "average")


def test_shortage_names_every_rank_and_what_it_lacks() -> None:
    placement = Placement.vee(2)
    costs = Costs((1,) * 4, (1,) * 4, (1,) * 4, (0,) * 3, (5, 1, 2, 3), (1,) * 4)
    assert shortage(placement, costs, Limits((8, 3))) == ""
    assert shortage(placement, costs, None) == ""
    states(shortage(placement, costs, Limits((7, 1))), "rank 0", 8, 1, 7, "rank 1", 3, 2)
    assert lower_bounds(placement, 3, costs, Limits((7, 1))) == lower_bounds(placement, 3, costs, Limits((8, 3)))


def test_shortage_says_once_what_ranks_have_in_common() -> None:
    def lacks(*limits: int) -> str:
        return shortage(Placement.linear(5), Costs.from_ms([1] * 5, [1] * 5, [1] * 5, held_after_f=[8] * 5), Limits(limits))

    states(lacks(7, 7, 7, 7, 7), 8, 1, 7, "rank", "B")
    states(lacks(8, 7, 7, 7, 8), 1, 3, 8, 7, "ranks", "B")
    states(lacks(7, 8, 7, 8, 8), 0, 2, 8, 1, 7, "ranks", "B")


def test_a_limit_that_holds_everything_is_none() -> None:
    placement = Placement.looped(3, 2)
    costs = uneven(6, random.Random(1))
    everything = [7 * sum(costs.held_after_f[stage] for _, stage in placement.stages(rank)) for rank in range(3)]
    assert lower_bounds(placement, 7, costs, Limits(tuple(everything))) == lower_bounds(placement, 7, costs, None)


@pytest.mark.parametrize(
    ("placement", "microbatches", "limits", "stated"),
    [
        (Placement.bidirectional(2), 2, None, ("bidirectional", 2)),
        (Placement.linear(3), 2, None, (3, 2, "placement", "stages")),
        (Placement.linear(2), 2, Limits((1,)), ("placement", "2 ranks", "limits", 1)),
        (Placement.linear(2), 0, None, ("bound", "1 microbatch", 0)),
    ],
)
def test_parts_that_do_not_fit(placement: Placement, microbatches: int, limits: Limits | None, stated: Stated) -> None:
    with raises(InputError, *stated):
        lower_bounds(placement, microbatches, Costs.uniform(2), limits)


def test_a_knapsack_takes_the_options_that_gain_most() -> None:
    """By hand: two forwards with 3 for 5 or 6 for 9, and one with 4 for 4."""
    forwards = ((2, ((3, 5), (6, 9))), (1, ((4, 4),)))
    assert [knapsack(limit, forwards) for limit in (0, 2, 3, 5, 6, 9, 10, 12, 15, 16, 100)] == [0, 0, 5, 5, 10, 14, 14, 18, 18, 22, 22]


def test_many_forwards_gain_no_more_than_the_bytes_are_worth() -> None:
    """200 forwards take 3 for 5 and another 3 for 4 more: 300 bytes are worth 5/3 each, and those beyond 600 4/3 each."""
    one, two = ((200, ((3, 5),)),), ((200, ((3, 5), (6, 9))),)
    assert [knapsack(limit, one) for limit in (0, 300, 600, 900)] == [0, 500, 1000, 1000]
    assert [knapsack(limit, two) for limit in (0, 300, 600, 900, 1200)] == [0, 500, 1000, 1400, 1800]


LOAD = RankLoad(forward=(2,), backward=(3,), weight=(1,), saved=(4,), pending=(2,), microbatches=5, limit=9)


def test_memory_that_the_first_and_last_passes_leave_unused_lengthens_a_span() -> None:
    """5 microbatches hold 4 bytes for 5 ns and 2 for 1 ns. Two F fill 9 bytes and leave 12 byte-ns unused, two W leave 6."""
    assert unused_memory(LOAD) == 12 + 6
    assert memory_energy(LOAD, (0, 2)) == ceil((5 * (4 * 5 + 2 * 1) + 18) / 9)


def test_the_cheap_bound_on_a_wait_is_not_below_the_wait() -> None:
    assert wait_at_most((3, 10, 0), 1, 1) >= 10
    assert wait_at_most((3, 0, 10), 1, 1) >= 10


def test_the_price_of_bytes_is_paid_for_those_that_are_held() -> None:
    """At 1 ns per 2 bytes, 2 ns of work that hold 4 bytes gain nothing, so 9 bytes bound the work by 4 ns."""
    assert LOAD.dual_bound(1, 2, [MicrobatchState(held=4, stages=1, work=2, first_pending=1)], 9, ()) == 4
