"""Joint search over the orders of passes and of microbatches of unequal cost, by annealing.

Microbatches exchange their places, which does not change the gradients. A place is an index of `Tables.time` and other tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.anneal import anneal, move_scratch, seed_random
from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.play import PlayState, Rows, copy_into, initial_play_state, replay, rows_of
from zerobubble.planning.kernels.priorities import mean_pass
from zerobubble.planning.kernels.search_state import BudgetMeter
from zerobubble.planning.kernels.tables import Ints, Tables

ROUNDS = 3
"""Number of restarts from the best order, each with a falling temperature."""

HOT, COLD = 0.1, 0.005
"""First and last temperature of a round, in mean pass times."""

SWAPPED_PASSES, MOVED_PASSES = 50_000, 1_000_000
"""Passes replayed between two checks of the clock (some milliseconds), after exchanges of places and after moves of a pass."""


class JointOrder(NamedTuple):
    """An order of passes, the microbatch `assignment[j]` of each place j, and its time in ns."""

    order: Ints
    assignment: Ints
    time: int


def first_orders(tables: Tables, order: Ints, several: Sequence[Sequence[int]]) -> list[JointOrder]:
    """Returns `order` with each of `several` assignments that keep it within the limits."""
    found = []
    for assignment in several:
        arranged = with_assignment(tables, assignment)
        rows = rows_of(arranged, order)
        longest, _ = replay(arranged, rows, initial_play_state(arranged), 0.0, np.inf)
        if longest >= 0:
            found.append(JointOrder(order, np.array(assignment, np.int64), int(longest)))
    return found


def improve_jointly(tables: Tables, best: JointOrder, bound: int, budget: BudgetMeter, seed: int, moves_passes: bool) -> JointOrder:
    """Returns the best order found by exchanging microbatches, and if `moves_passes` by moving passes.

    The search ends when the budget is spent or `bound` (ns) is met. `tables` have the microbatches in the order of their numbers.
    """
    random, mean, share = Random(seed), mean_pass(tables), 1 / len(tables.ranks)
    for turn in range(ROUNDS):
        if best.time <= bound or budget.spent >= 1:
            break
        arranged, assignment = with_assignment(tables, best.assignment.tolist()), best.assignment.copy()
        rows = rows_of(arranged, best.order)
        state = initial_play_state(arranged)
        _, cost = replay(arranged, rows, state, share, np.inf)
        while (part := budget.spent * ROUNDS - turn) < 1 and best.time > bound:
            seed_random(random.getrandbits(32))
            found, moves = best.assignment.copy(), max(8, SWAPPED_PASSES // tables.size)
            middle, end = (budget.spent_after(counted) * ROUNDS - turn for counted in (moves, moves + max(8, MOVED_PASSES // tables.size)))
            warm, mild, cool = (mean * HOT * (COLD / HOT) ** min(1.0, over) for over in (part, middle, end))
            goal, cost, used = swap_places(arranged, rows, state, assignment, found, best.time, bound, cost, share, warm, mild, moves)
            best = JointOrder(rows.code.copy(), found, int(goal)) if goal < best.time else best
            budget.used += used
            _, cost = replay(arranged, rows, state, share, np.inf)
            if moves_passes:
                code, moves = best.order.copy(), max(8, MOVED_PASSES // tables.size)
                scratch = move_scratch(arranged, rows)
                goal, cost, used = anneal(arranged, rows, scratch, code, best.time, bound, cost, share, mild, cool, moves)
                best = JointOrder(code, assignment.copy(), int(goal)) if goal < best.time else best
                budget.used += used
    return best


def with_assignment(tables: Tables, assignment: Sequence[int]) -> Tables:
    """Returns tables with microbatch `assignment[j]` in place j, from tables in the order of the numbers of microbatches."""
    shape, order = (len(tables.codes), tables.microbatches), list(assignment)
    return tables._replace(**{name: getattr(tables, name).reshape(shape)[:, order].ravel() for name in ("time", "held", "ahead", "over")})


@compiled
def swap_places(
    tables: Tables,
    rows: Rows,
    state: PlayState,
    assignment: Ints,
    best: Ints,
    goal: int,
    target: int,
    cost: float,
    share: float,
    hot: float,
    cold: float,
    moves: int,
) -> tuple[int, float, int]:
    """Exchanges two microbatches of the `assignment`, `moves` times, while the temperature (ns) falls from `hot` to `cold`.

    `cost` is that of `rows`. `goal` is the longest time of the rows with the assignment `best`. Both are replaced by better ones. Reaching
    `target` ends the search. Returns the goal, the cost of the rows and the number of moves tried. The caller must replay the times in
    `rows`.
    """
    for tried in range(moves):
        temperature = hot * (cold / hot) ** (tried / moves)
        one, other = np.random.randint(len(assignment)), np.random.randint(len(assignment))
        exchange(tables, assignment, one, other)
        cutoff = cost - temperature * np.log(np.random.random() + 1e-300)
        longest, new_cost = replay(tables, rows, state, share, cutoff)
        if longest < 0:
            exchange(tables, assignment, one, other)
            continue
        cost = new_cost
        if longest < goal:
            goal = longest
            copy_into(best, assignment)
            if goal <= target:
                return goal, cost, tried + 1
    return goal, cost, moves


@inlined
def exchange(tables: Tables, assignment: Ints, one: int, other: int) -> None:
    """Exchanges the microbatches in two places."""
    assignment[one], assignment[other] = assignment[other], assignment[one]
    for code in range(len(tables.codes)):
        here, there = code * tables.microbatches + one, code * tables.microbatches + other
        tables.time[here], tables.time[there] = tables.time[there], tables.time[here]
        tables.held[here], tables.held[there] = tables.held[there], tables.held[here]
        tables.ahead[here], tables.ahead[there] = tables.ahead[there], tables.ahead[here]
        tables.over[here], tables.over[there] = tables.over[there], tables.over[here]
