"""Plans with few evaluations, for the small problems that were furthest above their optimum after the first round of the search."""

import pytest

import zerobubble as zb
from tests.pure.few_problems import PROBLEMS
from tests.thinned import every
from zerobubble.planning.answer import Status
from zerobubble.planning.papers import exact


@pytest.mark.parametrize("name", every(9, PROBLEMS))
def test_200_evaluations_come_within_3_percent_of_the_optimum(name: str) -> None:
    pytest.importorskip("ortools")
    problem = PROBLEMS[name]
    _, bound, status = exact(problem, seconds=60)
    assert status is Status.OPTIMAL
    found = zb.plan(
        problem.costs,
        problem.num_microbatches,
        problem.limits,
        placements=problem.placement,
        objective=problem.objective.value,
        evaluations=200,
    )
    assert found.time is not None
    assert bound.time <= found.time <= 1.03 * bound.time
