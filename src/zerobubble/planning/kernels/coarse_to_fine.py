"""Coarse to fine: policies are found on few ranks and microbatches, and carried to finer problems, of twice the ranks each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from zerobubble.bounds import lower_bounds
from zerobubble.costs import Costs, Limits
from zerobubble.ir import Placement
from zerobubble.planning.kernels.policy import NEVER, for_twice_the_ranks, full_speed_policy
from zerobubble.planning.kernels.priorities import num_legs
from zerobubble.planning.kernels.search_state import BudgetMeter, PolicyPool, SearchState
from zerobubble.planning.kernels.tables import Floats, tables_of
from zerobubble.planning.problem import Objective, Problem

KEPT = 8
"""Policies that go from a level to the next finer one."""

NICHES = 3
"""Searches on the coarsest level, each in a pool of its own, so that policies of different kinds survive."""

SMALL = 8
"""Ranks of the coarsest problem on the way to a larger one; a problem of no more ranks starts at half of them."""

TRIES = 40_000
"""Policies tried in a search on one level, at most."""

BATCH = 25
"""Policies tried between two looks at how much of the level's budget is left."""

STEADY = 3
"""Microbatches per rank at which warm-up, steady state and cool-down all show."""


def coarsened(problem: Problem, ranks: int, microbatches: int) -> Problem:
    """`problem` on `ranks` of its ranks, evenly spread, for `microbatches` microbatches.

    A rank that stays keeps its stages, and the share of its memory that the smaller pipeline needs, at least room for one microbatch.
    """
    full = problem.placement.num_ranks
    kept = [round(i * (full - 1) / max(1, ranks - 1)) for i in range(ranks)]
    new_rank = {rank: i for i, rank in enumerate(kept)}
    route, costs = problem.placement.routes[0], problem.costs
    stages = [stage for stage, rank in enumerate(route) if rank in new_rank]
    held = {rank: sum(max(costs.held_after_f[s], costs.held_after_b[s]) for s in stages if route[s] == rank) for rank in kept}
    limits = Limits(tuple(max(problem.limits.memory[rank] * ranks // full, held[rank], 1) for rank in kept))
    columns = (costs.forward, costs.backward, costs.weight, costs.held_after_f, costs.held_after_b)
    forward, backward, weight, after_f, after_b = (tuple(column[stage] for stage in stages) for column in columns)
    comm = tuple(max(costs.comm[here:there]) for here, there in pairwise(stages))
    placement = Placement("custom", ranks, (tuple(new_rank[route[stage]] for stage in stages),))
    few = Costs(forward, backward, weight, comm, after_f, after_b)
    return Problem(placement, microbatches, few, limits, problem.objective)


def coarse_problems(problem: Problem) -> list[Problem]:
    """The coarser problems, each of twice the ranks of the one before, with as many stages per rank; none for a small `problem`."""
    full, m = problem.placement.num_ranks, problem.num_microbatches
    sizes = []
    ranks = SMALL if full > SMALL else SMALL // 2
    while ranks < full:
        sizes.append(ranks)
        ranks *= 2
    if not sizes or m > 2 * STEADY * full:
        sizes.append(full)
    sizes = [ranks for ranks in sizes if ranks < full or m > STEADY * ranks]
    smaller = [coarsened(problem, ranks, min(m, STEADY * ranks)) for ranks in sizes]
    return [small for small in smaller if small.placement.stages_per_rank == problem.placement.stages_per_rank]


def policies_from_coarse(state: SearchState, problem: Problem, share: float) -> PolicyPool:
    """Good policies for `problem`, found on coarser problems within `share` of the whole budget, and not yet tried on it."""
    legs = num_legs(state.tables)
    pool = PolicyPool.of(np.array([full_speed_policy(legs, 1.0), full_speed_policy(legs, NEVER)] * (KEPT // 2)))
    levels = coarse_problems(problem)
    for level, small in enumerate(levels):
        budget = _budget_until(state.budget, share * (level + 1) / len(levels))
        best = _search_level(small, pool, budget, is_coarsest=level == 0)
        state.budget.used += budget.used
        pool = PolicyPool.of(np.concatenate([best, for_twice_the_ranks(best)]))
    return pool


def _search_level(problem: Problem, pool: PolicyPool, budget: BudgetMeter, is_coarsest: bool) -> Floats:
    """The best policies for one of the coarser problems, best first, after a search that starts from those of the pool."""
    bounds = lower_bounds(problem.placement, problem.num_microbatches, problem.costs, problem.limits)
    bound = bounds.span if problem.objective is Objective.SPAN else bounds.makespan
    state = SearchState(tables_of(problem), bound.time, budget, lambda time, how: None)
    state.improve_policies(pool, len(pool.costs))
    niches = [pool.best(KEPT) for _ in range(NICHES if is_coarsest else 1)]
    for n, niche in enumerate(niches):
        _search_niche(state, niche, n / len(niches), (n + 1) / len(niches), 0.4 if is_coarsest else 0.0)
    found = PolicyPool(np.concatenate([niche.policies for niche in niches]), np.concatenate([niche.costs for niche in niches]))
    return found.best(len(found.costs)).policies


def _search_niche(state: SearchState, pool: PolicyPool, start: float, stop: float, fresh: float) -> None:
    """Improve the policies of the pool from the share `start` of the budget to the share `stop`; at random in the first `fresh` of that."""
    for _ in range(TRIES // BATCH):
        if state.done or state.budget.spent >= stop:
            return
        at_random = state.budget.spent < start + fresh * (stop - start)
        state.improve_policies(pool, BATCH, BATCH if at_random else 0)


def _budget_until(budget: BudgetMeter, share: float) -> BudgetMeter:
    """A budget of its own for what is left of `budget` until the given share of it is spent."""
    left = max(0.0, share - budget.spent)
    return BudgetMeter(left * budget.seconds, None if budget.evaluations is None else int(left * budget.evaluations))
