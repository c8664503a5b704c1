"""The portfolio: the turns of the search methods.

First the seeds, then policies from coarse to fine. Then policies, due dates of good policies, and annealing of the best order of each take
turns, each longer than the previous one. `short_search` replaces this for few evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerobubble.bounds import Bound
from zerobubble.planning.kernels.anneal import seed_random
from zerobubble.planning.kernels.coarse_to_fine import POOL_SIZE, policies_from_coarse
from zerobubble.planning.kernels.policy import AS_1F1B, MOST_UNGROUPED, NEVER, full_speed_policy, grouped_policy
from zerobubble.planning.kernels.priorities import num_legs
from zerobubble.planning.kernels.search_state import BudgetMeter, PolicyPool, SearchState
from zerobubble.planning.kernels.short_search import is_short, search_shortly
from zerobubble.planning.kernels.tables import Ints, tables_of
from zerobubble.planning.kernels.window_bound import sharper_bound
from zerobubble.planning.problem.problem import Problem

TEMPERATURES = (0.02, 0.01, 0.05, 0.004)
"""Starting temperatures of annealing runs in turn, in mean pass times; each falls to a tenth."""

HOT_TEMPERATURES = (0.3, 1.0)
"""Starting temperatures for which only small problems have time."""

SMALL = 1000
"""Passes of a small problem."""

ANNEALED_SEEDS = 3
"""Seeds that are annealed."""

RANDOM_POLICIES = 20
"""Random policies tried if no seed fits. Large problems skip them: each takes long, and coarser problems find better ones."""

NEAR_BOUND = 1.02
"""Seeds up to this multiple of the bound get a long annealing first."""

LARGE = 50_000
"""Above this number of passes, the list scheduler is too slow to learn much on the problem itself."""


def search_portfolio(state: SearchState, problem: Problem, seeds: Sequence[Ints], seed: int) -> None:
    """Searches until the bound is met or the budget is spent. The best order is in `state`."""
    seed_random(seed)
    played = sorted((state.offer(order, "seed"), k) for k, order in enumerate(seeds))
    fitting = [seeds[k] for time, k in played if time >= 0]
    is_few = is_short(state)
    if is_few:
        search_shortly(state, problem)
    if state.order is None:
        _first_order(state)
    if state.order is None or state.done or is_few:
        return
    near_bound = bool(fitting) and state.time <= NEAR_BOUND * state.bound
    moves, tries = _first_turn(state, near_bound)
    for order in fitting[:ANNEALED_SEEDS]:
        _anneal(state, order, 20_000_000 // state.tables.size, 0, 0.05)
    if near_bound:
        _anneal(state, state.order, moves, 0, 0.2)
    pool = policies_from_coarse(state, problem, 0.4 if near_bound else 0.8 if state.tables.size > LARGE else 0.5)
    state.improve_policies(pool, len(pool.costs))
    _take_turns(state, pool.best(POOL_SIZE), fitting, near_bound, moves, tries)


def _first_turn(state: SearchState, near_bound: bool) -> tuple[int, int]:
    """Returns the annealing moves and the policy tries of the first turn, fewer if they take long."""
    size = state.tables.size
    moves = max(20_000, 12 * size) if near_bound or size <= SMALL else 60_000_000 // size
    tries = max(20, moves // 80 if near_bound else min(1000, 1_000_000 // size))
    return moves, tries


def _take_turns(state: SearchState, pool: PolicyPool, seeds: Sequence[Ints], near_bound: bool, moves: int, tries: int) -> None:
    """Searches policies, a seed, due dates and the best order in turn, each time with twice the effort, until the search is over."""
    turn = 0
    while not state.done:
        state.improve_policies(pool, tries)
        if near_bound or (seeds and turn > 0):
            _anneal(state, seeds[turn % min(len(seeds), ANNEALED_SEEDS)], moves, turn + 1, 0.2)
        if not state.done:
            redated = state.improve_due_dates(pool.best(POOL_SIZE).policies[turn % POOL_SIZE], tries // 2)
            _anneal(state, redated, moves, turn, 0.2)
        assert state.order is not None
        _anneal(state, state.order, moves, turn, 0.2)
        moves, tries, turn = 2 * moves, 2 * tries, turn + 1


def compile_all(problem: Problem) -> None:
    """Calls every kernel once, which compiles or loads it."""
    state = SearchState(tables_of(problem), 0, BudgetMeter(0.0, 1 << 62), lambda time, how: None)
    seed_random(0)
    pool = PolicyPool.from_policies(full_speed_policy(num_legs(state.tables), 1.0, AS_1F1B)[None])
    state.improve_policies(pool, 2)
    state.anneal_order(state.improve_due_dates(pool.policies[0], 1), 1, 1.0)
    sharper_bound(problem, Bound(0, "no time is negative"))


def _anneal(state: SearchState, order: Ints, moves: int, turn: int, share: float) -> None:
    """Anneals `order` from the temperature of this turn, for `moves` moves or a `share` of the budget, unless the search is over."""
    if not state.done:
        temperatures = HOT_TEMPERATURES + TEMPERATURES if state.tables.size <= SMALL else TEMPERATURES
        state.anneal_order(order, moves, temperatures[turn % len(temperatures)], share)


def _first_order(state: SearchState) -> None:
    """Returns an order that fits: from a few runs of the list scheduler or, if they fail, one microbatch after the other.

    If that does not fit, nothing does.
    """
    fresh = RANDOM_POLICIES if state.tables.size <= LARGE else 0
    legs = num_legs(state.tables)
    start = grouped_policy(legs, 0.5) if legs > MOST_UNGROUPED else full_speed_policy(legs, NEVER, AS_1F1B)
    state.improve_policies(PolicyPool.from_policies(start[None]), max(1, fresh), fresh)
    if state.order is None:
        state.offer(serial_order(state), "one microbatch after the other")


def serial_order(state: SearchState) -> Ints:
    """The order in which every microbatch ends before the next begins, each W right after its B."""
    tables, order = state.tables, []
    successor = tables.codes["successor"]
    for start, stop in tables.ranks[["forward", "forward_stop"]].tolist():
        forwards = tables.forwards[start:stop]
        backwards = successor[forwards][::-1]
        weights, slices = successor[backwards], tables.slices
        pairs = [code for pair in zip(backwards, weights, strict=True) for code in slices * pair]
        order += [*np.repeat(forwards, slices), *pairs] * (tables.microbatches // slices)
    return np.array(order, np.int64)
