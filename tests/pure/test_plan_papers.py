"""The papers' planners reproduce the papers' figures, and the exact solver finds optima proven elsewhere."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import pytest

from tests.pure.golden import TABLE_5, TABLE_8, Profile
from tests.pure.problems import needs
from tests.refusals import Stated, raises
from tests.thinned import every
from zerobubble import Costs, InputError, Kind, Limits, Op, Placement, Schedule, make, schedule_faults, simulate
from zerobubble.bounds import lower_bounds
from zerobubble.costs import NS_PER_MS, UNIT_BYTES
from zerobubble.planning.answer import Status
from zerobubble.planning.kernels.vee_greedy import vee_greedy
from zerobubble.planning.papers import BASELINES, Baseline, adaptive, exact, zb_heuristic, zb_v_greedy
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.simulation import memory_faults

LINE = Placement.linear

SHAPES = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}
"""Hidden size and attention heads of the models of Zero Bubble, table 3; sequences have 1024 tokens."""

# Zero Bubble (arXiv 2401.10241 v1), table 5, ZB-1p and ZB-2p; table 8, ZB-V: the rows of TABLE_5 and TABLE_8 in golden.py.
ONE_P = (0.1585, 0.1242, 0.0674, 0.1323, 0.1045, 0.0554, 0.1397, 0.1088, 0.0576, 0.1421, 0.1106, 0.0594)
TWO_P = (0.0433, 0.0039, 0.0026, 0.0029, 0.0022, 0.0010, 0.0066, 0.0054, 0.0028, 0.0038, 0.0029, 0.0018)
ZB_V = (0.0697, 0.0533, 0.0274, 0.0638, 0.0483, 0.0250, 0.0593, 0.0451, 0.0236)


def profiled(profile: Profile, placement: Placement, microbatches: float) -> Problem:
    """The problem of a row: its times for each stage, the memory that a layer takes (table 1), room for so many microbatches."""
    hidden, heads = SHAPES[profile.model]
    saved, work = 34 * hidden + 5 * heads * 1024, 32 * hidden
    stages = placement.num_stages
    costs = Costs.from_ms(*([time] * stages for time in profile.times), profile.comm, [saved] * stages, [work] * stages)
    limit = round(microbatches * placement.stages_per_rank * saved)
    return Problem(placement, profile.microbatches, costs, Limits((limit,) * placement.num_ranks))


def unit_problem(placement: Placement, microbatches: int, slots: int, objective: Objective = Objective.PERIOD, **costs: float) -> Problem:
    """Every pass takes 1 ms, every rank has room for so many stage activations."""
    return Problem(placement, microbatches, Costs.uniform(placement.num_stages, **costs), slotted(placement, slots), objective)


def slotted(placement: Placement, slots: int) -> Limits:
    return Limits((slots * UNIT_BYTES,) * placement.num_ranks)


def checked_time(problem: Problem, schedule: Schedule) -> int:
    """The objective of a schedule that is legal and fits, in ns."""
    assert schedule_faults(schedule) == ()
    assert memory_faults(schedule, problem.costs, problem.limits) == ()
    assert (schedule.placement, schedule.num_microbatches) == (problem.placement, problem.num_microbatches)
    return problem.objective.measure(simulate(schedule, problem.costs))


def label(profile: object) -> str:
    return f"{profile.model}-m{profile.microbatches}" if isinstance(profile, Profile) else str(profile)


# The heuristics meet the published numbers.


@pytest.mark.parametrize(("profile", "one_p", "two_p"), every(12, zip(TABLE_5, ONE_P, TWO_P, strict=True)), ids=label)
def test_the_heuristic_gives_zb_1p_and_zb_2p_of_table_5(profile: Profile, one_p: float, two_p: float) -> None:
    rates = []
    for times_p in (1, 2):
        problem = profiled(profile, Placement.linear(profile.ranks), times_p * profile.ranks)
        schedule = zb_heuristic(problem)
        checked_time(problem, schedule)
        rates.append(round(simulate(schedule, problem.costs).bubble_span, 4))
    assert rates == [one_p, two_p]


@pytest.mark.sweep
@pytest.mark.parametrize(("profile", "rate"), every(3, zip(TABLE_8, ZB_V, strict=True)), ids=label)
def test_the_greedy_gives_zb_v_of_table_8(profile: Profile, rate: float) -> None:
    problem = profiled(profile, Placement.vee(profile.ranks), profile.ranks)
    schedule = zb_v_greedy(problem)
    checked_time(problem, schedule)
    assert round(simulate(schedule, problem.costs).bubble_span, 4) == rate


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_at_unit_times_the_heuristics_are_the_handcrafted_schedules(ranks: int, microbatches: int) -> None:
    one = unit_problem(Placement.linear(ranks), microbatches, ranks)
    two = unit_problem(Placement.linear(ranks), microbatches, 2 * ranks)
    vee = unit_problem(Placement.vee(ranks), microbatches, 2 * ranks)
    for problem, planner, name in ((one, zb_heuristic, "zb-h1"), (two, zb_heuristic, "zb-h2"), (vee, zb_v_greedy, "zb-v")):
        by_hand = simulate(make(name, ranks, microbatches), problem.costs).span
        assert checked_time(problem, planner(problem)) <= by_hand


def test_more_memory_never_costs_time() -> None:
    """The heuristic's bubble falls from the memory of 1F1B to twice that, as in figure 7."""
    problems = [profiled(TABLE_5[3], Placement.linear(8), 8 * share) for share in (1.0, 1.2, 1.4, 1.5, 1.7, 1.9)]
    rates = [round(simulate(zb_heuristic(problem), problem.costs).bubble_span, 4) for problem in problems]
    assert rates == [0.1323, 0.0957, 0.0615, 0.0475, 0.0331, 0.0029]


def test_the_heuristic_keeps_the_cost_that_is_asked_for() -> None:
    """On some unequal stages the shortest span and the shortest makespan are not those of the same schedule."""
    problem = random_problem(random.Random(111), LINE(3), 6)
    for_span, for_makespan = (zb_heuristic(replace(problem, objective=objective)) for objective in Objective)
    assert simulate(for_span, problem.costs).span < simulate(for_makespan, problem.costs).span
    assert simulate(for_makespan, problem.costs).makespan < simulate(for_span, problem.costs).makespan


# Building blocks.


@pytest.mark.parametrize(("slots", "bubble"), every(3, [(4, 11), (6, 5), (8, 0)]))
def test_adaptive_meets_the_law_of_building_blocks(slots: int, bubble: int) -> None:
    """The least bubble on four ranks in a V (controllable memory, figure 13): proved, too, by the exact solver below."""
    problem = unit_problem(Placement.vee(4), 8, slots)
    assert checked_time(problem, adaptive(problem)) == (48 + bubble) * NS_PER_MS


@pytest.mark.long
def test_adaptive_is_no_longer_than_the_authors_search_at_the_memory_of_v_half() -> None:
    """What their code finds for 1.5B, at 5/8 of the memory of 1F1B: it takes legs of two gaps."""
    problem = profiled(TABLE_5[0], Placement.vee(8), 5)
    assert problem.bubble(checked_time(problem, adaptive(problem))) <= 0.169541


@pytest.mark.long
def test_adaptive_judges_by_the_costs_it_is_given() -> None:
    """Where B takes twice as long, the block that suits equal times is not the one that suits these."""
    costs, placement = Costs.uniform(6, (1, 2, 1)), Placement.vee(3)
    problem = Problem(placement, 6, costs, slotted(placement, 5))
    equal = adaptive(unit_problem(placement, 6, 5))
    assert checked_time(problem, adaptive(problem)) < simulate(equal, costs).span


def test_adaptive_counts_what_a_stage_holds() -> None:
    """The larger of a rank's two stages counts, and what B leaves where that is more than F saved."""
    costs, placement = Costs.from_ms([1] * 6, [1] * 6, [1] * 6, 0, [1, 1, 2, 1, 1, 1], [1, 1, 1, 3, 1, 1]), Placement.vee(3)
    problem = Problem(placement, 6, costs, Limits((9, 9, 12)))
    assert checked_time(problem, adaptive(problem)) == checked_time(problem, adaptive(unit_problem(placement, 6, 4)))
    with raises(InputError, "vee", 3):
        adaptive(Problem(placement, 6, costs, Limits((9, 9, 11))))


@pytest.mark.long
@pytest.mark.parametrize("placement", [Placement.looped(3, 2), LINE(3)], ids=lambda p: p.name)
def test_adaptive_with_other_numbers_of_stages(placement: Placement) -> None:
    problem = unit_problem(placement, 6, placement.num_stages)
    serial = 6 * 3 * placement.num_stages * NS_PER_MS
    assert checked_time(problem, adaptive(problem)) < serial / 1.5


# The exact solver.

with_solver = pytest.mark.skipif(find_spec("ortools") is None, reason="needs OR-Tools")


class Optimum(NamedTuple):
    """A problem at whole times of F, B, W and a message, in ms, with its least span and makespan, both proved by another program."""

    placement: Placement
    microbatches: int
    slots: int
    span: int
    makespan: int | None = None
    times: tuple[int, int, int, int] = (1, 1, 1, 0)
    held: tuple[int, int] = (1, 1)

    def problem(self, objective: Objective) -> Problem:
        stages, (*times, comm) = self.placement.num_stages, self.times
        saved, work = ([held * UNIT_BYTES] * stages for held in self.held)
        costs = Costs.from_ms(*([time] * stages for time in times), comm, saved, work)
        return Problem(self.placement, self.microbatches, costs, slotted(self.placement, self.slots * self.held[0]), objective)


OPTIMA = (
    Optimum(LINE(2), 4, 1, 20, 20),
    Optimum(LINE(2), 4, 2, 13, 13),
    Optimum(LINE(2), 4, 3, 12, 13),
    Optimum(LINE(3), 6, 1, 42, 42),
    Optimum(LINE(3), 6, 2, 25, 25),
    Optimum(LINE(3), 6, 3, 20, 20),
    Optimum(LINE(3), 6, 4, 19, 20),
    Optimum(LINE(3), 6, 5, 18, 20),
    Optimum(LINE(3), 6, 2, 80, 80, (3, 3, 2, 1)),
    Optimum(LINE(3), 6, 3, 64, 64, (3, 3, 2, 1)),
    Optimum(LINE(3), 6, 5, 56, 56, (3, 3, 2, 1)),
    Optimum(LINE(3), 6, 2, 55, 55, (2, 3, 1, 0), (2, 1)),
    Optimum(LINE(3), 6, 4, 41, 41, (2, 3, 1, 0), (2, 1)),
    Optimum(LINE(4), 8, 3, 31),
    Optimum(LINE(4), 8, 2, 41),
    Optimum(Placement.vee(3), 6, 4, 41),
    Optimum(Placement.vee(3), 6, 5, 39),
    Optimum(Placement.vee(3), 6, 6, 36),
    Optimum(Placement.vee(4), 8, 4, 59),
    Optimum(Placement.vee(4), 8, 6, 53),
    Optimum(Placement.vee(4), 8, 8, 48),
    Optimum(Placement.looped(2, 2), 4, 4, 25, 25),
    Optimum(Placement.looped(2, 2), 4, 5, 24, 25),
)


@pytest.mark.sweep
@with_solver
@pytest.mark.parametrize("optimum", every(3, OPTIMA), ids=lambda o: f"{o.placement.name}-{o.placement.num_ranks}-{o.slots}-{o.span}")
def test_the_exact_solver_proves_known_optima(optimum: Optimum) -> None:
    for objective, time in zip(Objective, (optimum.span, optimum.makespan), strict=True):
        if time is not None:
            problem = optimum.problem(objective)
            schedule, bound, status = exact(problem, seconds=200)
            assert checked_time(problem, schedule) == bound.time == time * NS_PER_MS
            assert status is Status.OPTIMAL


def brute_force(problem: Problem) -> int | None:
    """The least objective in ns over every order of the passes, by trying each pass on each rank next; None where none fits."""
    costs, home, stages = problem.costs, problem.placement.routes[0], problem.placement.num_stages
    every = [Op(kind, s, j) for kind in (Kind.F, Kind.B, Kind.W) for s in range(stages) for j in range(problem.num_microbatches)]
    best: list[int | None] = [None]
    seen: set[tuple[tuple[Op, ...], ...]] = set()

    def extend(rows: tuple[tuple[Op, ...], ...], done: frozenset[Op]) -> None:
        if rows in seen:
            return
        seen.add(rows)
        if len(done) == len(every):
            time = problem.objective.measure(simulate(Schedule("tried", problem.placement, problem.num_microbatches, rows), costs))
            best[0] = time if best[0] is None else min(best[0], time)
            return
        for op in every:
            if op not in done and all(need in done for need in needs(op, set(every), stages)):
                rank, whole = home[op.stage], (op._replace(kind=Kind.BW), {op, op._replace(kind=Kind.W)})
                for one, is_done in ((op, {op}), whole) if op.kind is Kind.B else ((op, {op}),):
                    row = (*rows[rank], one)
                    if sum(costs.memory_change(each.kind, each.stage) for each in row) <= problem.limits.memory[rank]:
                        extend((*rows[:rank], row, *rows[rank + 1 :]), done | is_done)

    extend(((),) * problem.placement.num_ranks, frozenset())
    return best[0]


@pytest.mark.sweep
@with_solver
@pytest.mark.parametrize("number", range(12))
def test_the_exact_solver_agrees_with_trying_everything(number: int) -> None:
    """Two microbatches on two ranks: unequal stages, passes of no time, W that holds more than F, every objective, B and W in one piece."""
    problem = random_problem(random.Random(number), LINE(2), 2, least=number % 2)
    least = brute_force(problem)
    if least is None:
        with raises(InputError, "rank"):
            exact(problem, seconds=200)
    else:
        schedule, bound, status = exact(problem, seconds=200)
        assert (checked_time(problem, schedule), bound.time, status) == (least, least, Status.OPTIMAL)


MIXED = """zerobubble schedule 1
name mixed
placement linear: 0 1 2
microbatches 2
rank 0: 0F0 0F1 0B0 0B1 0W0 0W1
rank 1: 1F1 1F0 1B1 1W1 1B0 1W0
rank 2: 2F1 2B1 2F0 2B0 2W0 2W1
"""


@with_solver
@pytest.mark.parametrize("hint", [None, Schedule.from_text(MIXED)], ids=["no hint", "a hint"])
def test_the_exact_solver_lets_a_rank_begin_with_a_later_microbatch(hint: Schedule | None) -> None:
    """Rank 1 has nearly all of the work, and idles less before its first B where both of its F's have come when it begins."""
    ms = [(10, 2, 2), (1, 1, 2), (0, 30, 0), (0, 0)]
    costs = Costs(*(tuple(time * NS_PER_MS for time in column) for column in ms), (1, 1, 1), (1, 1, 1))
    problem = Problem(LINE(3), 2, costs, Limits((2, 2, 2)))
    schedule, bound, status = exact(problem, seconds=200, hint=hint)
    assert checked_time(problem, schedule) == bound.time == 68 * NS_PER_MS  # 73 where every rank takes them in order
    assert status is Status.OPTIMAL


def random_problem(dice: random.Random, placement: Placement, microbatches: int, least: int = 0) -> Problem:
    """Small whole times from `least` on, so that ties are frequent, and limits from too little to plenty."""
    stages = placement.num_stages

    def column(low: int, high: int, length: int = stages) -> tuple[int, ...]:
        return tuple(dice.randint(low, high) for _ in range(length))

    times = [column(least, 6) for _ in range(3)]
    costs = Costs(*times, column(0, 3, stages - 1), column(1, 5), column(0, 6))
    limits = Limits(column(4, 6 + 4 * stages, placement.num_ranks))
    return Problem(placement, microbatches, costs, limits, dice.choice(list(Objective)))


@with_solver
def test_without_time_the_exact_solver_keeps_its_hint() -> None:
    problem = unit_problem(Placement.vee(4), 8, 7)
    hint = make("v-half", 4, 8)
    schedule, bound, status = exact(problem, seconds=0, hint=hint)
    assert (schedule.rows, status) == (hint.rows, Status.FEASIBLE)
    assert bound.time == problem.bound().time < checked_time(problem, schedule)


@with_solver
def test_a_hint_may_have_fused_passes_and_another_order_of_microbatches() -> None:
    problem = unit_problem(LINE(2), 4, 8)
    turned = tuple(tuple(op._replace(microbatch=3 - op.microbatch) for op in row) for row in make("1f1b", 2, 4).rows)
    schedule = exact(problem, seconds=0, hint=Schedule("turned", LINE(2), 4, turned)).schedule
    assert checked_time(problem, schedule) <= simulate(make("1f1b", 2, 4), problem.costs).span
    assert [op.microbatch for op in schedule.rows[0] if op.kind is Kind.F] == [0, 1, 2, 3]


@with_solver
@pytest.mark.parametrize(
    ("hint", "stated"),
    [
        (make("zb-h1", 2, 5), ("zb-h1", "placement", "microbatches")),
        (make("zb-h2", 2, 4), ("zb-h2", "rank 0", 3000000)),
    ],
)
def test_a_hint_for_another_problem_is_refused(hint: Schedule, stated: Stated) -> None:
    with raises(InputError, *stated):
        exact(unit_problem(LINE(2), 4, 2), hint=hint)


def test_a_missing_solver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with raises(InputError, "OR-Tools", "zerobubble[exact]"):
        exact(unit_problem(LINE(2), 4, 2))


# Every planner, whatever the problem: a legal schedule that fits, or the reason why there is none.


@pytest.mark.parametrize("planner", [name for name in BASELINES if name != "exact"])
@pytest.mark.parametrize("number", every(5, range(40)))
def test_random_unequal_problems(planner: str, number: int) -> None:
    dice = random.Random(number)
    placement = dice.choice([LINE, Placement.vee])(dice.randint(1, 4))
    problem = random_problem(dice, placement, dice.randint(1, 8))
    try:
        schedule = BASELINES[planner](problem)
    except InputError:
        return
    bounds = lower_bounds(placement, problem.num_microbatches, problem.costs, problem.limits)
    least = bounds.span if problem.objective is Objective.PERIOD else bounds.makespan
    assert checked_time(problem, schedule) >= least.time


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("microbatches", [1, 3, 9])
def test_with_equal_stages_the_heuristics_always_have_an_answer(ranks: int, microbatches: int) -> None:
    """From the memory of one microbatch on, and of p microbatches for the greedy of ZB-V."""
    for slots in range(1, 2 * ranks + 1):
        problem = unit_problem(LINE(ranks), microbatches, slots, times=(3.0, 2.0, 1.0), comm=0.3)
        checked_time(problem, zb_heuristic(problem))
    for slots in range(2 * ranks, 4 * ranks):
        problem = unit_problem(Placement.vee(ranks), microbatches, slots, times=(3.0, 2.0, 1.0), comm=0.3)
        checked_time(problem, zb_v_greedy(problem))


@pytest.mark.parametrize(
    ("planner", "placement", "stated"),
    [
        (zb_heuristic, Placement.vee(2), ("vee", "stage", "rank")),
        (zb_v_greedy, LINE(2), ("V", "linear")),
    ],
)
def test_the_placement_must_be_the_planners(planner: Baseline, placement: Placement, stated: Stated) -> None:
    with raises(InputError, *stated):
        planner(unit_problem(placement, 4, 8))


@pytest.mark.parametrize("planner", [zb_heuristic, adaptive, exact])
def test_a_limit_below_one_microbatch_names_the_rank_and_what_it_lacks(planner: Baseline) -> None:
    with raises(InputError, "rank 1", 0.999999, 1):
        planner(Problem(LINE(2), 4, Costs.uniform(2), Limits((UNIT_BYTES, UNIT_BYTES - 1))))


def test_the_greedy_says_how_much_memory_it_counts_on() -> None:
    with raises(InputError, 4, "rank 0", 2):
        zb_v_greedy(unit_problem(Placement.vee(4), 8, 4))


@pytest.mark.long
def test_the_compiled_greedy_of_zb_v_makes_the_same_rows() -> None:
    random_numbers, refused = random.Random(1), 0
    for _ in range(30):
        ranks, microbatches = random_numbers.randint(2, 5), random_numbers.randint(1, 14)
        times = tuple(random_numbers.randint(1, 20) * NS_PER_MS for _ in range(3))
        placement = Placement.vee(ranks)
        costs = Costs.uniform(2 * ranks, times, comm=random_numbers.choice([0, NS_PER_MS]))
        slots = round(2 * ranks * random_numbers.choice([0.7, 1, 1.2, 1.6, 2]))
        problem = Problem(placement, microbatches, costs, slotted(placement, slots), Objective.PERIOD)
        try:
            rows = zb_v_greedy(problem).rows
        except InputError:
            rows, refused = None, refused + 1
        made = vee_greedy(problem)
        assert (made and made.rows) == rows
    assert 0 < refused < 15
