"""Annealing of the places of microbatches of unequal cost: exchanges two of them, and sometimes accepts longer schedules.

Gradients do not depend on the places of microbatches in a schedule. The places are those of `Tables.time` and the like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.play import PlayState, Rows, all_ranks_fit, copy_into, play_rows
from zerobubble.planning.kernels.tables import Ints, Tables


def with_takers(tables: Tables, takers: Sequence[int]) -> Tables:
    """Returns tables with microbatch `takers[j]` in place j, from tables in the order of the numbers of microbatches."""
    shape, order = (len(tables.codes), tables.microbatches), list(takers)
    return tables._replace(**{name: getattr(tables, name).reshape(shape)[:, order].ravel() for name in ("time", "held", "ahead", "over")})


@compiled
def replay(tables: Tables, rows: Rows, state: PlayState, share: float, cutoff: float) -> tuple[Any, float]:
    """Plays all rows from their beginning. Returns the result of `play_rows`, or (-1, inf) if a rank exceeds its limit."""
    if not all_ranks_fit(tables, rows):
        return -1, np.inf
    for r in range(len(tables.ranks)):
        state.head[r] = tables.ranks[r].first
    return play_rows(tables, rows, state, share, np.inf, cutoff)


@compiled
def swap_places(
    tables: Tables,
    rows: Rows,
    state: PlayState,
    takers: Ints,
    best: Ints,
    goal: int,
    target: int,
    cost: float,
    share: float,
    hot: float,
    cold: float,
    moves: int,
) -> tuple[int, float, int]:
    """Exchanges two of the `takers`, `moves` times, while the temperature (ns) falls from `hot` to `cold`.

    `cost` is that of `rows`. `goal` is the longest time of the rows with the takers `best`. Both are replaced by better ones, and reaching
    `target` ends the search. Returns the goal, the cost of the rows and the number of moves tried. The times in `rows` must be replayed
    afterwards.
    """
    for tried in range(moves):
        temperature = hot * (cold / hot) ** (tried / moves)
        one, other = np.random.randint(len(takers)), np.random.randint(len(takers))
        exchange(tables, takers, one, other)
        cutoff = cost - temperature * np.log(np.random.random() + 1e-300)
        longest, new_cost = replay(tables, rows, state, share, cutoff)
        if longest < 0:
            exchange(tables, takers, one, other)
            continue
        cost = new_cost
        if longest < goal:
            goal = longest
            copy_into(best, takers)
            if goal <= target:
                return goal, cost, tried + 1
    return goal, cost, moves


@inlined
def exchange(tables: Tables, takers: Ints, one: int, other: int) -> None:
    """Exchanges the microbatches in two places."""
    takers[one], takers[other] = takers[other], takers[one]
    for code in range(len(tables.codes)):
        here, there = code * tables.microbatches + one, code * tables.microbatches + other
        tables.time[here], tables.time[there] = tables.time[there], tables.time[here]
        tables.held[here], tables.held[there] = tables.held[there], tables.held[here]
        tables.ahead[here], tables.ahead[there] = tables.ahead[there], tables.ahead[here]
        tables.over[here], tables.over[there] = tables.over[there], tables.over[here]
