"""Plans with faster fused BW passes or overlapped pairs: as short as brute force finds, with correct figures."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import zerobubble as zb
from tests.pure.compiled import simulate_compiled
from tests.pure.smallest import optimum
from zerobubble import Costs, Kind, Limits, Placement
from zerobubble.costs import UNIT_BYTES
from zerobubble.planning import Objective, Problem, solve
from zerobubble.planning.search import search_in_steps
from zerobubble.planning.seeds import overlapped_seeds

EVALUATIONS = 30_000


def small_problem(seed: int, *, pairs: bool) -> Problem:
    """Unequal stages, little memory; a BW takes 5, 10 or 20 % less than B and W, or a pair up to 60 ms less than its passes."""
    random = Random(seed)
    placement, most = random.choice(
        [(Placement.linear(2), 3 if pairs else 4), (Placement.linear(3), 2 if pairs else 3), (Placement.vee(2), 2)]
    )
    m, stages = random.randint(2, most), placement.num_stages
    forward, backward, weight = ([random.randint(20, 100) for _ in range(stages)] for _ in range(3))
    saving = random.choice((0.05, 0.1, 0.2))
    after_f = [random.randint(3, 6) for _ in range(stages)]
    costs = Costs.from_ms(
        forward,
        backward,
        weight,
        comm=random.choice((0, 5, 15)),
        held_after_f=after_f,
        held_after_b=[random.randint(1, held + 1) for held in after_f],
        fused=() if pairs else [(1 - saving) * (b + w) for b, w in zip(backward, weight, strict=True)],
        hidden=[random.randint(10, 60) for _ in range(stages)] if pairs else (),
    )
    one = [sum(held for stage, held in enumerate(after_f) if placement.routes[0][stage] == rank) for rank in range(placement.num_ranks)]
    limits = Limits(tuple(held * random.randint(1, m) + random.randint(0, 4) for held in one))
    return Problem(placement, m, costs, limits, random.choice(list(Objective)))


def require_honest(problem: Problem, found: zb.planning.Plan) -> None:
    schedule = found.schedule
    assert zb.schedule_faults(schedule) == ()
    assert zb.simulation.memory_faults(schedule, problem.costs, problem.limits) == ()
    assert found.time == problem.objective.measure(zb.simulate(schedule, problem.costs))
    assert simulate_compiled(problem, schedule) == (*zb.simulation.metrics(schedule, problem.costs), True)


@pytest.mark.sweep
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.long(all=True)] * (seed >= 6)) for seed in range(40)])
def test_as_short_as_brute_force(seed: int, pairs: bool) -> None:
    problem = small_problem(seed, pairs=pairs)
    best = optimum(problem)
    assert problem.bound().time <= best
    found = solve(problem, evaluations=EVALUATIONS)
    require_honest(problem, found)
    assert found.bound.time <= best
    assert found.time == best


def test_splits_where_it_pays_and_fuses_elsewhere() -> None:
    costs = Costs.uniform(4, (10, 10, 8), fused=15)
    problem = Problem(Placement.linear(4), 6, costs, Limits((4 * UNIT_BYTES,) * 4))
    found = solve(problem, evaluations=EVALUATIONS)
    require_honest(problem, found)
    kinds = {op.kind for row in found.schedule.rows for op in row}
    assert kinds == {Kind.F, Kind.B, Kind.W, Kind.BW}
    apart = solve(replace(problem, costs=Costs.uniform(4, (10, 10, 8))), evaluations=EVALUATIONS)
    whole = solve(replace(problem, costs=Costs.uniform(4, (10, 15, 0), held=0)), evaluations=EVALUATIONS)
    assert (found.time or 0) < min(apart.time or 0, whole.time or 0)


def test_a_bw_that_saves_nothing_changes_no_plan() -> None:
    plain = Costs.uniform(4, (10, 10, 8))
    same = plain.with_columns(fused=[18_000_000] * 4)
    plans = [solve(Problem(Placement.linear(4), 6, costs, Limits((4 * UNIT_BYTES,) * 4)), evaluations=500) for costs in (plain, same)]
    assert plans[0].schedule == plans[1].schedule
    assert plans[0].bound == plans[1].bound


def test_without_a_search_published_schedules_are_fused_or_split() -> None:
    work = zb.Workload.uniform(4, (10, 10, 8), fused=11)
    found = zb.plan(work, 6, memory=4, placements="linear", evaluations=0)
    assert "fused" in found.how


@pytest.mark.parametrize("objective", ["period", "makespan"])
def test_pairs_are_searched_for_where_the_first_schedule_never_idles(objective: str) -> None:
    """Without pairs a period may have no idle time at all, and pairs still make it shorter."""
    costs = zb.Costs.from_ms([10.0] * 4, [10.0] * 4, [6.0] * 4, hidden=[8.0] * 4)
    limits = zb.Limits((6 * costs.held_after_f[0],) * 2)
    found = zb.plan(costs, 8, limits, placements=zb.Placement.vee(2), objective=objective, evaluations=100_000)
    published = zb.plan(costs, 8, limits, placements=zb.Placement.vee(2), objective=objective, seconds=0)
    assert found.time is not None
    assert published.time is not None
    assert found.time < published.time
    assert found.choices[0].searched


def test_pairs_of_f_and_bw_begin_as_f_and_b_with_w_behind() -> None:
    """A BW that saves nothing holds up its gradient: B's of dualpipe-v that are apart from their W's make it shorter at once."""
    costs = Costs.uniform(16, (10, 10, 6), stages_per_rank=2, overlap=20)
    problem = Problem(Placement.vee(8), 24, costs, Limits((18 * UNIT_BYTES,) * 8))
    (published,) = overlapped_seeds(problem)
    found = search_in_steps(problem, 0, [published], seconds=0.0, evaluations=1)
    assert found is not None
    assert zb.simulate(published, costs).span == 594_000_000
    assert zb.simulate(found.schedule, costs).span <= 580_000_000
    longer = search_in_steps(problem, 0, [published], seconds=0.0, evaluations=100_000)
    assert longer is not None
    assert zb.simulate(longer.schedule, costs).span <= 578_000_000
