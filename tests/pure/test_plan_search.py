"""The planner's search: results are legal, fit, and take the stated time; budgets, seeds and interrupts work as documented.

If B leaves more than F saved, plans of tiny problems are the best of all orders with B and W split or fused.
"""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from itertools import count, pairwise
from math import ceil

import pytest
from hypothesis import assume, given, settings

from tests.pure.compiled import simulate_compiled
from tests.pure.problems import problems
from tests.pure.shapes import TRAINING, grid
from tests.pure.test_bounds import outcomes
from tests.pure.test_plan_papers import brute_force
from tests.refusals import raises, states
from tests.thinned import every
from zerobubble import Costs, Kind, Limits, Op, Placement, Schedule, make, schedule_faults, simulate
from zerobubble.bounds import lower_bounds
from zerobubble.costs import UNIT_BYTES
from zerobubble.errors import InputError
from zerobubble.planning.attempt import Attempt
from zerobubble.planning.candidate import Candidate, Entry
from zerobubble.planning.competition import solve
from zerobubble.planning.kernels import load_kernels, search_state
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.problem.workload import Workload
from zerobubble.planning.rounds import most_promising
from zerobubble.planning.search import Progress, SearchResult, search
from zerobubble.planning.transforms import fused_for_memory
from zerobubble.schedules import SCHEDULES
from zerobubble.simulation import memory_faults, peak_memory

MODEL = (18.522, 18.086, 9.337)
"""Times of F, B and W in ms: the 1.5B model of the papers, 8 ranks."""

PLACEMENTS = [
    *(Placement.linear(p) for p in (1, 2, 5)),
    *(Placement.vee(p) for p in (2, 3)),
    *(Placement.looped(2, v) for v in (2, 3, 4)),
    *(Placement.wave(2, n) for n in (1, 2)),
    Placement.custom((0, 2, 1, 1, 0)),
    Placement.custom((0, 1, 2, 3, 4, 5, 1, 1)),
    Placement.vee(16),
]


def random_costs(dice: random.Random, stages: int) -> Costs:
    """Unequal stages, one value in four a zero."""

    def column(length: int) -> tuple[int, ...]:
        return tuple(dice.choice((0, dice.randint(1, 9), dice.randint(1, 99), dice.randint(1, 999))) for _ in range(length))

    return Costs(column(stages), column(stages), column(stages), column(stages - 1), column(stages), column(stages))


def one_at_a_time(placement: Placement, microbatches: int) -> Schedule:
    """Every microbatch ends before the next begins: no schedule holds less."""
    rows: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    route = placement.routes[0]
    for j in range(microbatches):
        for stage, rank in enumerate(route):
            rows[rank].append(Op(Kind.F, stage, j))
        for stage, rank in reversed(list(enumerate(route))):
            rows[rank].append(Op(Kind.BW, stage, j))
    return Schedule("one at a time", placement, microbatches, tuple(map(tuple, rows)))


def tight(placement: Placement, costs: Costs, extra: int = 0) -> Limits:
    """What one microbatch needs, and `extra` bytes."""
    return Limits(tuple(max(1, peak + extra) for peak in peak_memory(one_at_a_time(placement, 1), costs)))


def check(problem: Problem, found: SearchResult) -> int:
    """Hold what was found against the plain judges; its time."""
    assert schedule_faults(found.schedule) == ()
    assert memory_faults(found.schedule, problem.costs, problem.limits) == ()
    timeline = simulate(found.schedule, problem.costs)
    assert simulate_compiled(problem, found.schedule) == (timeline.span, timeline.makespan, True)
    return problem.objective.measure(timeline)


def with_pieces(schedule: Schedule) -> Schedule:
    """The schedule with every backward cut into B and W."""
    cut = {Kind.BW: (Kind.B, Kind.W)}
    rows = tuple(tuple(Op(kind, op.stage, op.microbatch) for op in row for kind in cut.get(op.kind, (op.kind,))) for row in schedule.rows)
    return replace(schedule, rows=rows, overlaps=frozenset())


def paper(placement: Placement, memory: float, microbatches: int = 24, objective: Objective = Objective.PERIOD) -> Problem:
    work = Workload.uniform(placement.num_ranks, MODEL, 0.601, 32 / 34)
    return Problem(placement, microbatches, work.costs(placement), work.limits(memory), objective)


def bound(problem: Problem) -> int:
    bounds = lower_bounds(problem.placement, problem.num_microbatches, problem.costs, problem.limits)
    return (bounds.span if problem.objective is Objective.PERIOD else bounds.makespan).time


@pytest.mark.parametrize("name", TRAINING)
def test_the_compiled_simulator_gives_the_plain_ones_times(name: str) -> None:
    dice = random.Random(name)
    for p, m in grid(name, SCHEDULES[name].stages_per_rank, [(1, 2), (2, 4), (3, 6), (4, 8)]):
        schedule = make(name, p, m)
        if len(schedule.placement.routes) > 1:
            continue
        costs = random_costs(dice, schedule.num_stages)
        pieces = with_pieces(schedule)
        timeline, peaks = simulate(pieces, costs), peak_memory(pieces, costs)
        room = Limits(tuple(max(1, peak) for peak in peaks))
        problem = Problem(schedule.placement, m, costs, room)
        assert simulate_compiled(problem, schedule) == (timeline.span, timeline.makespan, True)
        if max(peaks) > 1:
            short = replace(problem, limits=Limits(tuple(max(1, limit - (limit == max(peaks))) for limit in room.memory)))
            whole = fused_for_memory(renumbered(pieces), short)
            if memory_faults(whole, costs, short.limits):
                assert simulate_compiled(short, schedule)[2] is False
            else:  # with fused passes it fits
                timeline = simulate(whole, costs)
                assert simulate_compiled(short, schedule) == (timeline.span, timeline.makespan, True)


def renumbered(schedule: Schedule) -> Schedule:
    """The schedule with the microbatches of every kind and stage numbered as they come, as the planner has them."""
    seen: dict[tuple[Kind, int], int] = {}

    def numbered(op: Op) -> Op:
        seen[op[:2]] = seen.get(op[:2], -1) + 1
        return op._replace(microbatch=seen[op[:2]])

    return replace(schedule, rows=tuple(tuple(map(numbered, row)) for row in schedule.rows))


@pytest.mark.long
@given(problems())
@settings(max_examples=150, deadline=None)
def test_the_compiled_simulator_gives_the_plain_ones_times_in_any_order(drawn: tuple[Schedule, Costs]) -> None:
    schedule, costs = drawn[0], replace(drawn[1], shares=())
    assume(len(schedule.placement.routes) == 1 and not schedule.is_forward_only)
    pieces = renumbered(with_pieces(schedule))
    problem = Problem(schedule.placement, schedule.num_microbatches, costs, Limits((10**6,) * schedule.num_ranks))
    if schedule_faults(pieces):
        with raises(InputError, "schedule", "run"):
            simulate_compiled(problem, pieces)
    else:
        timeline = simulate(pieces, costs)
        assert simulate_compiled(problem, pieces) == (timeline.span, timeline.makespan, True)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: f"{placement.name}-{placement.num_ranks}-{placement.num_stages}")
@pytest.mark.parametrize("objective", Objective)
def test_whatever_is_found_is_legal_and_fits_and_takes_its_time(placement: Placement, objective: Objective) -> None:
    dice = random.Random(f"{placement}{objective}")
    for _ in range(1):
        costs = random_costs(dice, placement.num_stages)
        limits = tight(placement, costs, dice.choice((0, 1, 500, 5000)))
        problem = Problem(placement, dice.randint(1, 6), costs, limits, objective)
        found = search(problem, bound(problem), seconds=0, evaluations=150, seed=dice.randint(0, 99))
        assert check(problem, found) >= bound(problem)


def test_memory_that_holds_no_microbatch_is_refused_and_one_byte_more_is_enough() -> None:
    placement = Placement.vee(3)
    for seed in range(20):
        costs = random_costs(random.Random(seed), 6)
        limits = tight(placement, costs)
        problem = Problem(placement, 3, costs, limits)
        check(problem, search(problem, 0, seconds=0))
        fullest = max(limits.memory)
        if fullest > 1:
            short = Limits(tuple(limit - (limit == fullest) for limit in limits.memory))
            with raises(InputError, "limits", "memory", "microbatch"):
                search(replace(problem, limits=short), 0, seconds=0)


@pytest.mark.parametrize("seed", every(3, range(12)))
def test_where_b_leaves_more_than_f_saved_the_plan_is_the_best_of_all_orders(seed: int) -> None:
    """B and W are in one piece where memory asks for it, and else apart, so that gradients leave early."""
    dice = random.Random(seed)
    placement = Placement.linear(2)
    times = [tuple(dice.randint(1, 9) for _ in range(2)) for _ in range(3)]
    after_f = (dice.randint(2, 6), dice.randint(2, 6))
    costs = Costs(*times, (dice.randint(0, 2),), after_f, tuple(round(held * dice.uniform(1.2, 2.5)) for held in after_f))
    limits = Limits(tuple(round(held * dice.uniform(1, 3)) for held in after_f))
    problem = Problem(placement, 2, costs, limits, dice.choice(list(Objective)))
    found = search(problem, bound(problem), seconds=0, evaluations=2000)
    assert check(problem, found) == brute_force(problem)


@pytest.mark.long
def test_of_orders_with_the_least_span_the_one_with_the_least_makespan_is_found() -> None:
    """By all orders of a tiny problem in which the makespans of the quickest differ."""
    placement = Placement.linear(2)
    costs = Costs((6, 3), (7, 1), (2, 9), (0,), (1, 1), (1, 1))
    every = outcomes(placement, 3, costs)
    for memory in (2, 3):
        problem = Problem(placement, 3, costs, Limits((memory,) * 2))
        fitting = [(span, makespan) for peaks, span, makespan in every if max(peaks) <= memory]
        least, _ = min(fitting)
        assert len({makespan for span, makespan in fitting if span == least}) > 1
        for seed in range(4):
            timeline = simulate(search(problem, 0, seconds=0, evaluations=3000, seed=seed).schedule, costs)
            assert (timeline.span, timeline.makespan) == min(fitting)


def test_where_the_list_scheduler_makes_nothing_the_rows_known_before_are_searched_on() -> None:
    """Bytes that no stage keeps free for what B adds leave no room for F: every due date ends in memory that nothing frees."""
    kernels = load_kernels()
    from zerobubble.planning.kernels.policy import NEVER, full_speed_policy  # compiled, so imported where it is needed

    placement = Placement.vee(2)
    costs = Costs((1,) * 4, (1,) * 4, (1,) * 4, (0,) * 3, (10,) * 4, (25,) * 4)
    problem = Problem(placement, 3, costs, Limits((24, 24)))
    tables = kernels.tables_of(problem)
    state = kernels.SearchState(tables, 0, kernels.BudgetMeter(0.0, 10_000), lambda time, how: None)
    state.order = kernels.order_of(one_at_a_time(placement, 3))
    assert (state.improve_due_dates(full_speed_policy(2, 1.0, NEVER), 5) == state.order).all()
    assert check(problem, search(problem, bound(problem), seconds=0, evaluations=30_000)) == 30


@pytest.mark.parametrize("evaluations", [4_999, 5_000, 12_000])
def test_more_evaluations_of_a_small_problem_find_no_longer_schedule(evaluations: int) -> None:
    """Beyond 4,999 evaluations, another search took over, whose schedule took 348 ms. Windows prove 342 ms."""
    placement, work = Placement.linear(4), Workload.uniform(4, (10, 12, 8), 1.0, held=0.8)
    problem = Problem(placement, 8, work.costs(placement), work.limits(3))
    assert check(problem, search(problem, bound(problem), seconds=0, evaluations=evaluations)) == 342_000_000


@pytest.mark.parametrize(("memory", "most"), [(0.5, 1.18), (1.0, 1.17), (1.5, 1.16), (2.0, 1.03)])
def test_work_whose_b_leaves_twice_of_what_f_saved_is_planned_near_its_bound(memory: float, most: float) -> None:
    """With B and W apart alone, the last three take 1.96, 1.51 and 1.19 times the bound, and nothing fits in the first."""
    work = Workload.uniform(4, MODEL, 0.601, held=2.0)
    placement = Placement.linear(4)
    problem = Problem(placement, 12, work.costs(placement), work.limits(memory))
    found = search(problem, bound(problem), seconds=0, evaluations=4000)
    assert check(problem, found) <= most * bound(problem)


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [24, 64])
@pytest.mark.parametrize("memory", [5, 6, 8])
def test_the_bound_is_met_for_the_v_at_the_papers_memory(memory: int, microbatches: int) -> None:
    problem = paper(Placement.vee(8), memory, microbatches)
    found = search(problem, bound(problem), seconds=0, evaluations=150_000)
    assert check(problem, found) == bound(problem)
    assert found.evaluations < 150_000


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3))
def test_waves_over_many_ranks_come_within_two_hundredths_of_their_bound(seed: int) -> None:
    """Three waves fill the memory of 16 ranks before the first B: without leads this is 3 to 4 % above the bound."""
    placement = Placement("wave-3", 16, ((*range(16), *reversed(range(16)), *range(16)),))
    work = Workload.uniform(16, (11.347, 11.248, 8.132), 0.377, held=32 / 34)
    problem = Problem(placement, 32, work.costs(placement), work.limits(16))
    found = search(problem, bound(problem), seconds=0, evaluations=1500, seed=seed)
    assert check(problem, found) <= 1.02 * bound(problem)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_waves_whose_microbatches_come_in_groups_are_close_to_their_bound(seed: int) -> None:
    """Where they come one by one, the search ends 0.8 % above it."""
    problem = paper(Placement("wave-3", 8, ((*range(8), *reversed(range(8)), *range(8)),)), 8)
    found = search(problem, bound(problem), seconds=0, evaluations=60_000, seed=seed)
    assert check(problem, found) <= 1.003 * bound(problem)


@pytest.mark.parametrize("placement", [Placement.wave(4, 2), Placement.looped(3, 3), Placement.linear(4)], ids=lambda one: one.name)
@pytest.mark.parametrize("lead", [0.0, 0.1, 0.5])
def test_a_lead_says_how_far_a_rank_may_be_ahead_of_its_next_leg(placement: Placement, lead: float) -> None:
    kernels = load_kernels()
    from zerobubble.planning.kernels.policy import NEVER, full_speed_policy  # compiled, so imported where it is needed
    from zerobubble.planning.kernels.search_state import PolicyPool

    stages, legs = placement.num_stages, placement.stages_per_rank
    costs = Costs((2,) * stages, (3,) * stages, (1,) * stages, (1,) * (stages - 1), (1,) * stages, (1,) * stages)
    problem = Problem(placement, 12, costs, Limits((12 * legs,) * placement.num_ranks))

    def farthest_ahead(leads: float) -> list[int]:
        """By stage, the most microbatches that its rank was ahead on it of the rank's next stage, or of its B."""
        tables = kernels.tables_of(problem)
        state = kernels.SearchState(tables, 0, kernels.BudgetMeter(0.0, 1), lambda time, how: None)
        state.improve_policies(PolicyPool.from_policies(full_speed_policy(legs, 1.0, leads)[None]), 1)
        assert state.order is not None
        schedule = kernels.schedule_of_order("made", problem, tables, state.order)
        assert not schedule_faults(schedule)
        farthest = [0] * stages
        for rank, row in enumerate(schedule.rows):
            own = [stage for _, stage in placement.stages(rank)]
            catches_up = {(Kind.F, after): stage for stage, after in pairwise(own)} | {(Kind.B, own[-1]): own[-1]}
            ahead = dict.fromkeys(own, 0)
            for op in row:
                if op.kind is Kind.F:
                    ahead[op.stage] += 1
                    farthest[op.stage] = max(farthest[op.stage], ahead[op.stage])
                if op[:2] in catches_up:
                    ahead[catches_up[op[:2]]] -= 1
        return farthest

    def way(stage: int) -> int:
        """The time of the passes from F of the stage to F of the rank's next stage, or to its own B."""
        own = [other for _, other in placement.stages(placement.routes[0][stage])]
        return 2 * (own[own.index(stage) + 1] - stage) if stage != own[-1] else 2 * (stages - stage) + 3 * (stages - 1 - stage)

    allowed = [ceil(1 + lead * way(stage) / 2) for stage in range(stages)]
    assert all(ahead <= most for ahead, most in zip(farthest_ahead(lead), allowed, strict=True))
    assert max(farthest_ahead(NEVER)) > max(farthest_ahead(lead))


@pytest.mark.parametrize("ranks", [4, 8, 16, 32])
def test_the_bound_is_met_for_one_stage_a_rank(ranks: int) -> None:
    problem = paper(Placement.linear(ranks), ranks, 3 * ranks)
    assert check(problem, search(problem, bound(problem), seconds=0, evaluations=2000)) == bound(problem)


def test_the_same_seed_and_evaluations_give_the_same_schedule() -> None:
    problem = paper(Placement.wave(4, 2), 4, 8)
    runs = [search(problem, 0, seconds=0, evaluations=3000, seed=seed) for seed in (7, 7, 8)]
    assert runs[0].schedule == runs[1].schedule
    assert runs[0].evaluations == runs[1].evaluations
    assert runs[0].schedule != runs[2].schedule


def test_a_seed_is_never_made_worse_and_without_budget_it_is_the_answer() -> None:
    problem = paper(Placement.vee(8), 5)
    lean, wide = make("v-half", 8, 24), make("zb-v", 8, 24)
    assert memory_faults(wide, problem.costs, problem.limits) != ()
    found = search(problem, 0, [wide, lean], seconds=0)
    assert found.schedule.rows == lean.rows
    assert found.how == "seed"
    more = search(problem, 0, [wide, lean], seconds=0, evaluations=4000)
    assert check(problem, more) < check(problem, found)


def test_a_seed_for_something_else_is_refused() -> None:
    with raises(InputError, "zb-v", "placement"):
        search(paper(Placement.vee(4), 4, 8), 0, [make("zb-v", 4, 12)], seconds=0)


def test_progress_shows_each_new_best_and_an_interrupt_keeps_it() -> None:
    heard: list[Progress] = []
    problem = paper(Placement.vee(8), 4)
    found = search(problem, 7, seconds=0, evaluations=5000, progress=heard.append)
    times = [news.time_ns for news in heard]
    assert times == sorted(set(times), reverse=True)
    assert len(times) > 2
    assert (heard[-1].time_ns, heard[-1].how, heard[-1].bound) == (check(problem, found), found.how, 7)

    def stop(news: Progress) -> None:
        if news.time_ns <= times[2]:
            raise KeyboardInterrupt

    assert check(problem, search(problem, 7, seconds=0, evaluations=5000, progress=stop)) == times[2]


def test_seconds_end_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of which a hundredth of the seconds has passed at every look."""
    looks = count()
    monkeypatch.setattr(search_state, "perf_counter", lambda: next(looks) / 100)
    problem = paper(Placement.vee(4), 2, 12)
    found = search(problem, 0, seconds=1.0)
    assert check(problem, found) > 0
    assert found.evaluations > 1
    assert 1.0 <= found.seconds < 1.5


def test_without_llvmlite_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["llvmlite"] = None
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.problem.workload import Workload
from zerobubble.planning.search import search
from zerobubble import InputError, Placement
work, line = Workload.uniform(2, (1, 1, 1)), Placement.linear(2)
try:
    search(Problem(line, 2, work.costs(line), work.limits(2)), 0, seconds=0)
except InputError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    states(done.stdout, "zerobubble[plan]", "llvmlite", "planner")


def test_candidates_that_would_be_searched_alike_take_turns_last() -> None:
    """Twice a limit that does not bind makes the same search; a candidate without a plan comes behind those with one."""
    placement, costs = Placement.linear(2), Costs.uniform(2, (10, 10, 8))
    limits = [Limits((factor * UNIT_BYTES,) * 2) for factor in (8, 16)]
    known = {}
    for place, (limit, slower) in enumerate([(limits[0], 1), (limits[1], 1), (limits[0], 2), (limits[0], 1.5)]):
        problem = Problem(placement, 4, costs.scaled(slower), limit)
        made = solve(problem, seconds=0)
        entry = Entry(Candidate("linear", problem, problem), Attempt("linear", made), made.bound, (made,))
        known[place] = replace(entry, plans=()) if slower == 1.5 else entry
    assert most_promising(known, range(4)) == [0, 2, 3, 1]
