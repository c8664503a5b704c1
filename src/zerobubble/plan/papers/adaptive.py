"""The adaptive scheduler of controllable memory: the building block that suits the memory and the times."""

from __future__ import annotations

from dataclasses import replace

from zerobubble.blocks import search
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.plan.papers.board import refuse_shortage
from zerobubble.plan.problem import Problem
from zerobubble.simulate import simulate


def adaptive(problem: Problem) -> Schedule:
    """The shortest schedule under the problem's costs that is made of one building block of equal slots and fits the limits.

    Memory counts stage activations, each as large as the largest of its rank and held until its W, up to the p microbatches beyond
    which blocks gain nothing. Hops wait up to an interval with two stages per rank and up to a slot with more, since there are too
    many blocks otherwise. Raises `InputError` where the limits hold no microbatch or no block.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362, appendix A.
    """
    refuse_shortage(problem)
    placement = problem.placement
    memory = min(placement.num_stages, *(_activations(problem, rank) for rank in range(placement.num_ranks)))
    slack = {1: None, 2: None, 3: 1}.get(placement.stages_per_rank, 0)
    found = search(placement, max(1, memory), problem.num_microbatches, costs=problem.costs, slack=slack)
    if not found:
        raise InputError(
            f"no building block on {placement.name!r} makes do with {memory} stage activations per rank: raise the memory limit"
        )
    best = min((one.layout.schedule for one in found), key=lambda schedule: problem.objective.of(simulate(schedule, problem.costs)))
    return replace(best, name="adaptive")


def _activations(problem: Problem, rank: int) -> int:
    """How many stage activations a rank has room for."""
    costs = problem.costs
    largest = max(max(costs.held_after_f[stage], costs.held_after_b[stage]) for _, stage in problem.placement.stages(rank))
    return problem.limits.memory[rank] // max(1, largest)
