"""Schedules extended to more microbatches: legal, within the same memory, and as long as their period implies."""

from __future__ import annotations

from itertools import islice

import pytest

import zerobubble as zb
from zerobubble.planning.lengthening import extend_by_simulation, with_few_microbatches
from zerobubble.planning.placements import family
from zerobubble.planning.problem.problem import Problem
from zerobubble.simulation import memory_faults

V_HALF = zb.Workload.uniform(8, (18.546, 18.097, 9.321), 0.762, held=0.366412)


def problem(microbatches: int, *, placement: str = "vee", share: float = 0.625) -> Problem:
    where = family(placement, 8)
    return Problem(where, microbatches, V_HALF.costs(where), V_HALF.limits(share * 8))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "v-half", "v-min"])
def test_a_published_schedule_is_lengthened_to_itself(name: str) -> None:
    short, long = (zb.make(name, 4, microbatches) for microbatches in (12, 20))
    costs = zb.Costs.uniform(short.placement.num_stages)
    assert next(extend_by_simulation(short, costs, 20)).rows == long.rows


@pytest.mark.parametrize(("placement", "share"), [("vee", 0.625), ("linear", 0.75), ("looped-2", 1)])
def test_what_a_search_found_stays_legal_and_within_memory(placement: str, share: float) -> None:
    few = problem(18, placement=placement, share=share)
    many = problem(30, placement=placement, share=share)
    short = zb.planning.solve(few, evaluations=1029, seed=1).schedule  # some rows repeat
    assert short is not None
    longer = list(islice(extend_by_simulation(short, few.costs, 30), 5))
    assert longer
    for long in longer:
        assert not zb.schedule_faults(long)
        assert not memory_faults(long, many.costs, many.limits)
        assert {op[:2] for row in long.rows for op in row} == {op[:2] for row in short.rows for op in row}


def test_none_where_nothing_that_fits_is_repeated() -> None:
    short = zb.make("gpipe", 4, 12)
    assert not list(extend_by_simulation(short, zb.Costs.uniform(4), 20))


def test_few_microbatches_only_for_many() -> None:
    assert with_few_microbatches(problem(24)) is None
    few = with_few_microbatches(problem(64))
    assert few is not None
    assert few.num_microbatches == 22


def test_a_long_problem_is_solved_by_a_short_one() -> None:
    solved = zb.planning.solve(problem(64), evaluations=150_000, seed=0)
    assert solved.status.value == "optimal"
    assert "for 22 microbatches, lengthened" in solved.how
