"""Large problems by way of small ones: policies found for a few ranks and microbatches, carried up by doubling both."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from zerobubble.bounds import lower_bounds
from zerobubble.costs import Costs, Limits
from zerobubble.ir import Placement
from zerobubble.planning.kernels.policy import NEVER, for_twice_the_ranks, full_speed_policy
from zerobubble.planning.kernels.priorities import num_legs
from zerobubble.planning.kernels.search_state import BudgetMeter, PolicyPool, SearchState
from zerobubble.planning.kernels.tables import tables_of
from zerobubble.planning.problem import Objective, Problem

KEPT, NICHES = 8, 3
"""Policies that go up from rung to rung, and searches for them on the lowest rung, each by itself."""

SMALL = 8
"""Ranks of the smallest problem on the way to a larger one; a problem of so many starts at half of them."""

TRIES, BATCH = 40_000, 25
"""Policies tried in a search on a rung at most, and between two looks at how much of its time is left."""

STEADY = 3
"""Microbatches per rank at which warm-up, steady state and end all show."""


def coarsened(problem: Problem, ranks: int, microbatches: int) -> Problem:
    """`problem` with only so many of its ranks, evenly spread, each with its stages and memory in proportion, and fewer microbatches."""
    full = problem.placement.num_ranks
    kept = [round(i * (full - 1) / max(1, ranks - 1)) for i in range(ranks)]
    number_microbatches = {rank: i for i, rank in enumerate(kept)}
    route, costs = problem.placement.routes[0], problem.costs
    stages = [stage for stage, rank in enumerate(route) if rank in number_microbatches]
    held = {rank: sum(max(costs.held_after_f[s], costs.held_after_b[s]) for s in stages if route[s] == rank) for rank in kept}
    limits = Limits(tuple(max(problem.limits.memory[rank] * ranks // full, held[rank], 1) for rank in kept))
    columns = (costs.forward, costs.backward, costs.weight, costs.held_after_f, costs.held_after_b)
    forward, backward, weight, after_f, after_b = (tuple(column[stage] for stage in stages) for column in columns)
    comm = tuple(max(costs.comm[here:there]) for here, there in pairwise(stages))
    placement = Placement("custom", ranks, (tuple(number_microbatches[route[stage]] for stage in stages),))
    few = Costs(forward, backward, weight, comm, after_f, after_b)
    return Problem(placement, microbatches, few, limits, problem.objective)


def coarse_problems(problem: Problem) -> list[Problem]:
    """Smaller problems with as many stages on the fullest rank, each twice the one before; none where the problem itself is small."""
    full, m = problem.placement.num_ranks, problem.num_microbatches
    sizes, ranks = [], SMALL if full > SMALL else SMALL // 2
    while ranks < full:
        sizes.append(ranks)
        ranks *= 2
    if not sizes or m > 2 * STEADY * full:
        sizes.append(full)
    sizes = [ranks for ranks in sizes if ranks < full or m > STEADY * ranks]
    smaller = [coarsened(problem, ranks, min(m, STEADY * ranks)) for ranks in sizes]
    return [small for small in smaller if small.placement.stages_per_rank == problem.placement.stages_per_rank]


def policies_from_coarse(state: SearchState, problem: Problem, share: float) -> PolicyPool:
    """Good policies for `problem`, found on the rungs below it within the given share of the whole budget, not tried on it yet."""
    legs = num_legs(state.tables)
    pool = PolicyPool.of(np.array([full_speed_policy(legs, 1.0), full_speed_policy(legs, NEVER)] * (KEPT // 2)))
    below = coarse_problems(problem)
    for level, small in enumerate(below):
        bounds = lower_bounds(small.placement, small.num_microbatches, small.costs, small.limits)
        bound = bounds.span if small.objective is Objective.SPAN else bounds.makespan
        part = _budget_until(state.budget, share * (level + 1) / len(below))
        coarse_state = SearchState(tables_of(small), bound.time, part, lambda time, how: None)
        coarse_state.improve_policies(pool, len(pool.costs))
        niches = [pool.best(KEPT) for _ in range(1 if level else NICHES)]
        for n, niche in enumerate(niches):
            _search_niche(coarse_state, niche, n / len(niches), (n + 1) / len(niches), 0.0 if level else 0.4)
        found = PolicyPool(np.concatenate([niche.policies for niche in niches]), np.concatenate([niche.costs for niche in niches]))
        best = found.best(len(found.costs)).policies
        state.budget.used += part.used
        pool = PolicyPool.of(np.concatenate([best, for_twice_the_ranks(best)]))
    return pool


def _search_niche(coarse_state: SearchState, pool: PolicyPool, start: float, stop: float, fresh: float) -> None:
    """Better policies in the pool, by a search over that part of the budget, in the first `fresh` of it at random."""
    for _ in range(TRIES // BATCH):
        if coarse_state.done or coarse_state.budget.spent >= stop:
            return
        coarse_state.improve_policies(pool, BATCH, BATCH if coarse_state.budget.spent < start + fresh * (stop - start) else 0)


def _budget_until(budget: BudgetMeter, upto: float) -> BudgetMeter:
    """What is left of `budget` before the given share of it is spent."""
    left = max(0.0, upto - budget.spent)
    return BudgetMeter(left * budget.seconds, None if budget.evaluations is None else int(left * budget.evaluations))
