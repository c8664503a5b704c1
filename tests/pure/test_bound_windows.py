"""The window bound: never above an optimum, for any order of microbatches, and not used if its proof does not hold.

An answer has one bound: in its plan, text, JSON, file, as a baseline, and in the explorer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import combinations, permutations, product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
from click.testing import CliRunner

import zerobubble as zb
from tests.refusals import states
from tests.thinned import every_and_all
from zerobubble.bounds import Bound
from zerobubble.cli import main
from zerobubble.costs import FULL, NONE, Costs, Level, Limits
from zerobubble.explorer.answer import answer, answer_to_dict
from zerobubble.explorer.question import Question
from zerobubble.ir import Kind, Op, Placement, Schedule
from zerobubble.offload import HostLink
from zerobubble.planning import Head, Sharded, solve
from zerobubble.planning.answer import Status
from zerobubble.planning.attempt import Budget, start_attempt, with_sharper_bound
from zerobubble.planning.kernels.window_bound import MOST_PASSES, is_covered, sharper_bound
from zerobubble.planning.problem.problem import Objective, Problem
from zerobubble.planning.problem.recomputation import Recomputation
from zerobubble.simulation import memory_faults, metrics
from zerobubble.verify import schedule_faults

MICROBATCHES = 2

BENCHMARK = Path(__file__).parents[2] / "benchmarks/bounds"


def rows_of_rank(stage: int) -> list[tuple[Op, ...]]:
    """All orders of the passes of a rank with one stage, whatever the order of its microbatches."""
    passes = [Op(kind, stage, j) for kind in (Kind.F, Kind.B, Kind.W) for j in range(MICROBATCHES)]
    found = []
    for row in permutations(passes):
        place = {(op.kind, op.microbatch): number for number, op in enumerate(row)}
        if all(place[Kind.F, j] < place[Kind.B, j] < place[Kind.W, j] for j in range(MICROBATCHES)):
            found.append(row)
    return found


@cache
def all_schedules(placement: Placement) -> list[Schedule]:
    """Every schedule of two microbatches that runs, on a placement with one stage a rank."""
    tried = (Schedule("tried", placement, MICROBATCHES, rows) for rows in product(*map(rows_of_rank, range(placement.num_ranks))))
    return [schedule for schedule in tried if not schedule_faults(schedule)]


def joined_schedules(placement: Placement) -> Iterator[Schedule]:
    """Every schedule of two microbatches that runs, with B and W in one pass, on a placement with several stages a rank."""
    rows = []
    for rank in range(placement.num_ranks):
        stages = [stage for stage, home in enumerate(placement.routes[0]) if home == rank]
        visits = [*((Kind.F, stage) for stage in stages), *((Kind.BW, stage) for stage in reversed(stages))]
        turns = range(2 * len(visits))
        rows.append([_row(visits, [int(turn in second) for turn in turns]) for second in combinations(turns, len(visits))])
    for chosen in product(*rows):
        if chosen[0][0].microbatch:  # the first of all is as good under either name
            continue
        schedule = Schedule("tried", placement, MICROBATCHES, chosen)
        if not schedule_faults(schedule):
            yield schedule


def _row(visits: list[tuple[Kind, int]], microbatches: list[int]) -> tuple[Op, ...]:
    """The visits of a rank in their order for each microbatch, where `microbatches` says whose turn it is."""
    left = [iter(visits) for _ in range(MICROBATCHES)]
    return tuple(Op(*next(left[j]), j) for j in microbatches)


def problem_of(dice: Random, placement: Placement) -> Problem:
    """Random costs, zero among them, and limits that hold one microbatch or more."""
    stages = placement.num_stages
    times = [tuple(dice.randint(0, 6) for _ in range(stages)) for _ in range(3)]
    comm = tuple(dice.choice((0, 1, 3)) for _ in range(stages - 1))
    saved = tuple(dice.randint(1, 4) for _ in range(stages))
    left = tuple(dice.randint(0, held) for held in saved)
    whole = [sum(saved[stage] for _, stage in placement.stages(rank)) for rank in range(placement.num_ranks)]
    limits = Limits(tuple(dice.randint(held, 2 * held) for held in whole))
    return Problem(placement, MICROBATCHES, Costs(*times, comm, saved, left), limits)


def test_never_above_the_best_of_all_schedules() -> None:
    """From no bound at all; microbatches come in any order, and the first of a rank need not be that of the rank before it."""
    placement = Placement.linear(2)
    schedules = all_schedules(placement)
    met = 0
    for seed in range(4):
        problem = problem_of(Random(seed), placement)
        played = [metrics(one, problem.costs) for one in schedules if not memory_faults(one, problem.costs, problem.limits)]
        for objective in Objective:
            bound, best = sharper_bound(replace(problem, objective=objective), Bound(0, "nothing")), min(map(objective.measure, played))
            assert 0 < bound.time <= best
            met += bound.time == best
    assert met >= 4


@pytest.mark.sweep
@pytest.mark.parametrize("placement", [Placement.vee(2), Placement.looped(2, 2)], ids=str)
def test_never_above_the_best_of_all_schedules_of_several_stages_a_rank(placement: Placement) -> None:
    """With B and W in one pass, so that there are few enough to play all of them."""
    schedules = list(joined_schedules(placement))
    assert len(schedules) > 600
    for seed in range(3):
        problem = problem_of(Random(seed), placement)
        fitting = [one for one in schedules if not memory_faults(one, problem.costs, problem.limits)]
        for objective in Objective:
            bound = sharper_bound(replace(problem, objective=objective), Bound(0, "nothing"))
            assert 0 < bound.time <= min(objective.measure(metrics(one, problem.costs)) for one in fitting)


HEAD = Head((1, 1, 1))

NOT_COVERED = {
    "overlapped passes": lambda p: replace(p, costs=replace(p.costs, hidden=(1, 0))),
    "too many passes": lambda p: replace(p, num_microbatches=MOST_PASSES // 6 + 1),
    "weights in shards": lambda p: replace(p, sharded=Sharded(1000)),
    "a divided head": lambda p: replace(p, costs=HEAD.divided(p.costs, 2), head=Head.from_parts(HEAD.divided(p.costs, 2), p.placement)),
    "a link to the host": lambda p: replace(p, host=HostLink(1e9, 1e9)),
    "no room for one microbatch": lambda p: replace(p, limits=Limits((1, 1)), costs=replace(p.costs, held_after_f=(2, 2))),
    "sums of times beyond 2**56": lambda p: replace(p, costs=replace(p.costs, forward=(10**15, 1)), num_microbatches=80),
    "sums of bytes beyond 2**56": lambda p: replace(
        p, costs=replace(p.costs, held_after_f=(10**15, 1)), limits=Limits((10**15,) * 2), num_microbatches=80
    ),
}


@pytest.mark.parametrize("name", NOT_COVERED)
def test_not_used_where_the_proof_does_not_hold(name: str) -> None:
    problem = problem_of(Random(1), Placement.linear(2))
    assert is_covered(problem)
    other = NOT_COVERED[name](problem)
    known = other.bound()
    assert not is_covered(other)
    assert sharper_bound(other, known) is known


def test_columns_that_no_pass_of_the_problem_uses_change_nothing() -> None:
    problem = problem_of(Random(1), Placement.linear(2))
    measured = replace(problem, costs=problem.costs.with_columns(offloadable=(1, 1)))
    assert is_covered(measured)
    assert sharper_bound(measured, Bound(0, "nothing")) == sharper_bound(problem, Bound(0, "nothing"))


@pytest.mark.long
@every_and_all(10)
def test_never_above_the_proven_optima(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the benchmark's small problems, which CP-SAT proved knowing no bound; in some it is above the simple claims."""
    pytest.importorskip("ortools")
    monkeypatch.syspath_prepend(str(BENCHMARK))
    small_problem = import_module("small").small_problem
    optima = json.loads((BENCHMARK / "optima.json").read_text(encoding="utf-8"))
    raised = 0
    for number, proven in list(optima.items())[::nth]:
        if proven is not None:
            problem = small_problem(int(number))
            known = problem.bound()
            bound = sharper_bound(problem, known)
            assert known.time <= bound.time <= round(proven * 1e6)
            raised += bound.time > known.time
    assert raised > 5


@pytest.mark.sweep
@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 3.0), (0.5, 4.0)], ids=str)
def test_never_above_the_best_of_all_schedules_of_unequal_microbatches(shares: tuple[float, ...]) -> None:
    """Which come in any order on each rank; the bound by windows is the optimum of some."""
    placement = Placement.linear(2)
    schedules = all_schedules(placement)
    met = 0
    for seed in range(3):
        problem = problem_of(Random(seed), placement)
        limits = Limits(tuple(round(limit * max(shares)) for limit in problem.limits.memory))
        problem = replace(problem, costs=replace(problem.costs, shares=shares), limits=limits)
        met += bounds_met(problem, [one for one in schedules if not memory_faults(one, problem.costs, limits)])
    assert met >= 2


HALF = Level("half", 0.5, 0.5)


@pytest.mark.long
@pytest.mark.parametrize(("offered", "shares"), [((NONE, FULL), ()), ((NONE, HALF, FULL), (1.0, 2.0)), ((HALF,), (1.0, 2.0))], ids=len)
def test_never_above_the_best_of_all_schedules_that_recompute(offered: tuple[Level, ...], shares: tuple[float, ...]) -> None:
    """Any forwards, all at the same level, with B and W in one pass."""
    placement = Placement.linear(2)
    schedules = recomputing_schedules(placement)
    assert len(schedules) > 500
    problem = problem_of(Random(1), placement)
    limits = Limits(tuple(round(limit * max(shares, default=1)) for limit in problem.limits.memory))
    costs = replace(problem.costs, shares=shares, placement=placement)
    played = []
    for level in offered:
        problem = replace(problem, limits=limits, costs=costs.with_recompute(level), recomputation=Recomputation(offered, (level,) * 2))
        again = 0 if level == NONE else None if NONE in offered else 4
        fitting = [one for one in schedules if again in (None, count_again(one)) and not memory_faults(one, problem.costs, limits)]
        played += [metrics(one, problem.costs) for one in fitting]
    for objective in Objective:
        bound = sharper_bound(replace(problem, objective=objective), Bound(0, "nothing"))
        assert 0 < bound.time <= min(map(objective.measure, played))


def bounds_met(problem: Problem, schedules: list[Schedule]) -> int:
    """How many bounds by windows are the best of all `schedules`; none is above it."""
    met = 0
    for objective in Objective:
        bound = sharper_bound(replace(problem, objective=objective), Bound(0, "nothing"))
        best = min(objective.measure(metrics(one, problem.costs)) for one in schedules)
        assert 0 < bound.time <= best
        met += bound.time == best
    return met


@cache
def recomputing_schedules(placement: Placement) -> list[Schedule]:
    """Every schedule of two microbatches that runs, each forward computed again or not, with B and W in one pass."""
    rows = []
    for again in product((False, True), repeat=MICROBATCHES):
        kinds = [(Kind.F, Kind.R, Kind.BW) if each else (Kind.F, Kind.BW) for each in again]
        for order in set(permutations([j for j, own in enumerate(kinds) for _ in own])):
            left = [iter(own) for own in kinds]
            rows.append([(next(left[j]), j) for j in order])
    tried = []
    for chosen in product(rows, repeat=placement.num_ranks):
        passes = tuple(tuple(Op(kind, stage, j) for kind, j in row) for stage, row in enumerate(chosen))
        tried.append(Schedule("tried", placement, MICROBATCHES, passes))
    return [schedule for schedule in tried if not schedule_faults(schedule)]


def count_again(schedule: Schedule) -> int:
    return sum(op.kind is Kind.R for row in schedule.rows for op in row)


@every_and_all(15)
@pytest.mark.parametrize(("axis", "most"), [("recompute", 1.5), ("shares", 2.0), ("both", 2.0)])
def test_near_the_proven_optima_with_recomputation_and_shares(axis: str, most: float, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the benchmark's small problems: never above, and on average no more than so many % below."""
    pytest.importorskip("ortools")
    monkeypatch.syspath_prepend(str(BENCHMARK))
    small_problem = import_module("axes_small").small_problem
    optima = json.loads((BENCHMARK / "axes_optima.json").read_text(encoding="utf-8"))[axis]
    over = []
    for number, proven in list(optima.items())[::nth]:
        if proven is not None:
            problem = small_problem(axis, int(number))
            known = problem.bound()
            bound = sharper_bound(problem, known)
            assert known.time <= bound.time <= round(proven * 1e6)
            over.append(100 * (round(proven * 1e6) / bound.time - 1))
    assert len(over) > 55 / nth
    assert fmean(over) <= most


WORK = zb.Workload.uniform(3, times=(10, 10, 8), comm=1)
SIMPLE, PROVEN = 244_000_000, 250_000_000
"""What the simple claims prove of the span of `WORK` on three ranks in line, with memory for two microbatches of six, and windows (ns)."""


def problem_of_work() -> Problem:
    placement = Placement.linear(3)
    return Problem(placement, 6, WORK.costs(placement), WORK.limits(2), workload=WORK)


def test_a_plan_that_simple_claims_leave_open_is_proven_optimal() -> None:
    problem = problem_of_work()
    assert problem.bound().time == SIMPLE
    found = solve(problem, evaluations=2000)
    assert (found.status, found.time, found.bound.time) == (Status.OPTIMAL, PROVEN, PROVEN)
    states(found.bound.reason, "244 ms")
    assert solve(problem, evaluations=0).bound.time == SIMPLE  # nothing is compiled where nothing is searched


def test_plans_with_recomputation_and_shares_are_proven_optimal_as_windows_narrow() -> None:
    """Simple claims leave each of them open; a baseline has the same bound."""
    work = zb.Workload.uniform(2, (10, 10, 8), comm=1)
    for memory, microbatches, asked in ((1.3, 4, {"recompute": "auto"}), (4, 5, {"shares": (1, 2, 1, 3, 1)})):
        given: dict[str, Any] = {"placements": "linear", "evaluations": 1000, **asked}
        found = zb.plan(work, microbatches, memory, **given)
        assert found.problem.bound().time < found.bound.time == found.time
        assert found.status is Status.OPTIMAL
        assert zb.plan(work, microbatches, memory, baseline="zb-heuristic", **given).bound.time == found.bound.time


@pytest.mark.parametrize(
    ("budget", "bound"),
    [(Budget(0.0), SIMPLE), (Budget(0.01), SIMPLE), (Budget(5.0), PROVEN), (Budget(0.0, 0), SIMPLE), (Budget(0.0, 1), PROVEN)],
)
def test_windows_are_narrowed_where_they_take_a_small_part_of_the_budget(budget: Budget, bound: int) -> None:
    """The passes and the budget decide, never the clock, so that the answer is the same each time."""
    problem = problem_of_work()
    begun = start_attempt("linear", problem, Budget(0.0, 0), seeds=[])
    assert with_sharper_bound(begun, budget).plan.bound.time == bound


def test_one_problem_has_one_bound_in_every_output(tmp_path: Path) -> None:
    """In the plan, its text, its file, as JSON, of a baseline, among other placements, and in the explorer that shows the file."""
    problem, file = problem_of_work(), tmp_path / "plan.json"
    bubble = problem.bubble(PROVEN)
    asked = ["plan", "--ranks", "3", "--microbatches", "6", "--times", "10,10,8", "--comm", "1", "--memory", "2", "--evaluations", "2000"]
    linear = [*asked, "--placement", "linear"]

    def output(*options: str) -> str:
        result = CliRunner().invoke(main, [*options])
        assert result.exit_code == 0, result.output
        return result.stdout

    text = output(*linear, "-o", str(file))
    assert f"{100 * bubble:.2f} %" in text
    assert f"{100 * problem.bubble(SIMPLE):.2f} %" not in text
    for options in (linear, [*linear, "--baseline", "zb-heuristic"], [*asked, "--placement", "linear,looped-2"]):
        choices = {choice["placement"]: choice for choice in json.loads(output(*options, "--json"))["choices"]}
        assert choices["linear"]["lower_bound_span"] == bubble
        assert choices["linear"]["lower_bound_makespan"] >= bubble
    saved = zb.io.load_plan(file)
    assert saved.bound.time == PROVEN
    period, *_ = answer_to_dict(answer(Question(file=file.read_text(), file_name="plan.json")))["figures"]
    states(f"{period['value']}, {period['detail']}", "250 ms", "optimal", "bound")
