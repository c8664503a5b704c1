"""Coarse to fine: finds policies on a problem of few ranks and microbatches, and carries them to twice the ranks, level by level.

A policy applies to any number of ranks. Schedules of few ranks take so little time that thousands of policies can be tried.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from zerobubble.costs import Costs, Limits
from zerobubble.ir import Placement
from zerobubble.planning.kernels.policy import AS_1F1B, NEVER, for_twice_the_ranks, full_speed_policy, grouped_policies
from zerobubble.planning.kernels.priorities import num_legs
from zerobubble.planning.kernels.search_state import BudgetMeter, PolicyPool, SearchState
from zerobubble.planning.kernels.tables import Floats, Tables, tables_of
from zerobubble.planning.problem.problem import Problem

POOL_SIZE = 8
"""Policies in the pool of a search: the best so far, from which new ones are made."""

ISLANDS = 3
"""Searches on the coarsest level, each with its own pool, so that policies of different kinds survive."""

AT_RANDOM = 0.4
"""Fraction of each search on the coarsest level that draws random policies, before the pool is improved."""

SMALL = 8
"""Ranks of the coarsest problem on the way to a larger one; a problem of no more ranks starts at half of them."""

TRIES = 40_000
"""Policies tried by one search, at most."""

BATCH = 25
"""Policies tried between two checks of the budget."""

STEADY = 3
"""Microbatches per rank at which warm-up, steady state and cool-down all show."""


def coarsened(problem: Problem, ranks: int, microbatches: int) -> Problem:
    """Returns `problem` reduced to `ranks` of its ranks, evenly spread, and to `microbatches` whole microbatches.

    A rank that stays keeps its stages. Its memory limit shrinks with the number of ranks, like the number of microbatches in flight, but
    still fits one microbatch. A message between two stages takes as long as the slowest of the messages that it represents.
    """
    full = problem.placement.num_ranks
    kept = [round(i * (full - 1) / max(1, ranks - 1)) for i in range(ranks)]
    new_rank = {rank: i for i, rank in enumerate(kept)}
    route, costs = problem.placement.routes[0], problem.costs
    stages = [stage for stage, rank in enumerate(route) if rank in new_rank]
    held = {rank: sum(max(costs.held_after_f[s], costs.held_after_b[s]) for s in stages if route[s] == rank) for rank in kept}
    recomputation = problem.recomputation
    limits = Limits(tuple(max(problem.limits.memory[rank] * ranks // full, held[rank], 1) for rank in kept))
    columns = (costs.forward, costs.backward, costs.weight, costs.held_after_f, costs.held_after_b)
    forward, backward, weight, after_f, after_b = (tuple(column[stage] for stage in stages) for column in columns)
    comm = tuple(max(costs.comm[stage:next_stage]) for stage, next_stage in pairwise(stages))
    placement = Placement("custom", ranks, (tuple(new_rank[route[stage]] for stage in stages),))
    reduced = Costs(forward, backward, weight, comm, after_f, after_b, slices=costs.slices)
    small = Problem(placement, microbatches * problem.slices, reduced, limits, problem.objective)
    if recomputation is None:
        return small
    offered = tuple(level.on(stages) for level in recomputation.offered)
    chosen = tuple(recomputation.chosen[stage].on(stages) for stage in stages)
    return replace(small, costs=small.costs.with_recompute(chosen), recomputation=replace(recomputation, offered=offered, chosen=chosen))


def coarse_problems(problem: Problem) -> list[Problem]:
    """Returns the coarser problems, each with twice the ranks of the previous one and as many stages per rank. Empty for a small `problem`.

    The last of them may have all the ranks of `problem` and fewer microbatches.
    """
    full, microbatches = problem.placement.num_ranks, problem.whole_microbatches
    sizes = []
    ranks = SMALL if full > SMALL else SMALL // 2
    while ranks < full:
        sizes.append(ranks)
        ranks *= 2
    if not sizes or microbatches > 2 * STEADY * full:
        sizes.append(full)
    sizes = [ranks for ranks in sizes if ranks < full or microbatches > STEADY * ranks]
    smaller = [coarsened(problem, ranks, min(microbatches, STEADY * ranks)) for ranks in sizes]
    return [small for small in smaller if small.placement.stages_per_rank == problem.placement.stages_per_rank]


def policies_from_coarse(state: SearchState, problem: Problem, share: float) -> PolicyPool:
    """Good policies for `problem`, found on coarser problems and not yet tried on it itself.

    The search ends when the `share` of the budget of `state` is spent.
    """
    legs = num_legs(state.tables)
    # Mostly without leads: with half of them, the bound of the V in V-Half's memory (p=8, m=64) is not met in 150,000 schedules.
    leads = (NEVER, NEVER, NEVER, AS_1F1B)
    plain = np.array([full_speed_policy(legs, allowance, lead) for lead in leads for allowance in (1.0, NEVER)])
    grouped = grouped_policies(legs)
    pool = PolicyPool.from_policies(np.concatenate([plain, grouped]))
    levels = coarse_problems(problem)
    for level, small in enumerate(levels):
        budget = _budget_until(state.budget, share * (level + 1) / len(levels))
        best = _search_level(tables_of(small, joins=state.tables.joins), small.bound().time, pool, budget, is_coarsest=level == 0)
        state.budget.used += budget.used
        wider = [best] if small.placement.num_ranks == problem.placement.num_ranks else [best, for_twice_the_ranks(best)]
        pool = PolicyPool.from_policies(np.concatenate([*wider, grouped]))  # the next level shows which of them are better
    return pool


def _search_level(tables: Tables, bound: int, pool: PolicyPool, budget: BudgetMeter, is_coarsest: bool) -> Floats:
    """Searches one of the coarser problems, starting from the policies of `pool`. Returns its best policies, best first."""
    state = SearchState(tables, bound, budget, lambda time, how: None)
    state.improve_policies(pool, len(pool.costs))  # as many tries as policies: each is tried as it is
    islands = [pool.best(POOL_SIZE) for _ in range(ISLANDS if is_coarsest else 1)]
    for n, island in enumerate(islands):
        start, stop = n / len(islands), (n + 1) / len(islands)
        _search_island(state, island, start, stop, at_random=AT_RANDOM if is_coarsest else 0.0)
    found = PolicyPool(np.concatenate([island.policies for island in islands]), np.concatenate([island.costs for island in islands]))
    return found.best(len(found.costs)).policies


def _search_island(state: SearchState, pool: PolicyPool, start: float, stop: float, *, at_random: float) -> None:
    """Improves the policies of `pool` while the spent fraction of the budget goes from `start` to `stop`.

    The first `at_random` of this search draws random policies.
    """
    for _ in range(TRIES // BATCH):
        if state.done or state.budget.spent >= stop:
            return
        draws = state.budget.spent < start + at_random * (stop - start)
        state.improve_policies(pool, BATCH, BATCH if draws else 0)


def _budget_until(budget: BudgetMeter, share: float) -> BudgetMeter:
    """Returns a new budget with the part of `budget` that remains until the given fraction of it is spent."""
    left = max(0.0, share - budget.spent)
    return BudgetMeter(left * budget.seconds, None if budget.evaluations is None else int(left * budget.evaluations))
