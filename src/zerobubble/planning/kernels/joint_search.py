"""Joint search over the orders of passes and of microbatches of unequal cost."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.anneal import anneal, move_scratch, seed_random
from zerobubble.planning.kernels.place_swaps import replay, swap_places, with_takers
from zerobubble.planning.kernels.play import initial_play_state, rows_of
from zerobubble.planning.kernels.priorities import mean_pass
from zerobubble.planning.kernels.search_state import BudgetMeter
from zerobubble.planning.kernels.tables import Ints, Tables

ROUNDS = 3
"""How often the search begins anew from the best, with a temperature that falls."""

HOT, COLD = 0.1, 0.005
"""Temperatures at the beginning and at the end of a round, in mean pass times."""

SWAPPED_PASSES, MOVED_PASSES = 50_000, 1_000_000
"""Passes of rows with swapped places, and of rows with a moved pass, between two looks at the clock: some milliseconds."""


class JointOrder(NamedTuple):
    """An order of passes, the microbatches in its places, and its time in ns."""

    order: Ints
    takers: Ints
    time: int


def first_orders(tables: Tables, order: Ints, several: Sequence[Sequence[int]]) -> list[JointOrder]:
    """`order` with each of `several` lists of takers with which it runs within the limits."""
    found = []
    for takers in several:
        arranged = with_takers(tables, takers)
        rows = rows_of(arranged, order)
        longest, _ = replay(arranged, rows, initial_play_state(arranged, rows), 0.0, np.inf)
        if longest >= 0:
            found.append(JointOrder(order, np.array(takers, np.int64), int(longest)))
    return found


def improve_jointly(tables: Tables, best: JointOrder, bound: int, budget: BudgetMeter, seed: int, moves_passes: bool) -> JointOrder:
    """The best that swapping microbatches and, if wanted, moving passes leads to until the budget is spent or `bound` (ns) is met.

    `tables` have the microbatches in the order of their numbers.
    """
    random, mean, share = Random(seed), mean_pass(tables), 1 / len(tables.ranks)
    for turn in range(ROUNDS):
        if best.time <= bound or budget.spent >= 1:
            break
        arranged, takers = with_takers(tables, best.takers.tolist()), best.takers.copy()
        rows = rows_of(arranged, best.order)
        state = initial_play_state(arranged, rows)
        _, cost = replay(arranged, rows, state, share, np.inf)
        while (part := budget.spent * ROUNDS - turn) < 1 and best.time > bound:
            temperature = mean * HOT * (COLD / HOT) ** part
            seed_random(random.getrandbits(32))
            found, moves = best.takers.copy(), max(8, SWAPPED_PASSES // tables.size)
            goal, cost, used = swap_places(
                arranged, rows, state, takers, found, best.time, bound, cost, share, temperature, temperature, moves
            )
            best = JointOrder(rows.code.copy(), found, int(goal)) if goal < best.time else best
            budget.used += used
            _, cost = replay(arranged, rows, state, share, np.inf)
            if moves_passes:
                code, moves = best.order.copy(), max(8, MOVED_PASSES // tables.size)
                scratch = move_scratch(arranged, rows)
                goal, cost, used = anneal(
                    arranged, rows, scratch, code, best.time, bound, cost, share, np.inf, temperature, temperature, moves
                )
                best = JointOrder(code, takers.copy(), int(goal)) if goal < best.time else best
                budget.used += used
    return best
