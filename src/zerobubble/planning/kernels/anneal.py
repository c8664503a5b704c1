"""Annealing of orders: makes the moves of `moves`, and sometimes accepts longer schedules.

Every move is played exactly, but only from the first time that it can affect, and only until it is known to be rejected.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.moves import CHANGED_STEPS, change_step, first_start_from, shift
from zerobubble.planning.kernels.play import PlayState, Rows, copy_into, copy_of, initial_play_state, makespan_of, play_rows, update_held
from zerobubble.planning.kernels.recompute_moves import CHANGED_RECOMPUTE, change_recompute, undo_recompute
from zerobubble.planning.kernels.tables import Ints, Tables


@compiled
def seed_random(seed: int) -> None:
    """Seeds the random numbers of the kernels, which are separate from those of numpy."""
    np.random.seed(seed)


class MoveScratch(NamedTuple):
    """Scratch space of moves: the rows before the move with their times, the position from which each rank is replayed, and a critical
    path.
    """

    before: Rows
    resume: Ints
    path: Ints
    play: PlayState
    changed: Ints
    """Two numbers: the first position that the move changes, and the position after the last."""
    change: Ints
    """What the move changes in recomputation: see `recompute_moves`."""
    makespan: Ints
    """One number: the makespan (ns) of the best order, which breaks ties. 0 disables this."""
    played: Ints
    """One number: the passes played again after moves, of rows that a move changes within the memory."""


def move_scratch(tables: Tables, rows: Rows) -> MoveScratch:
    """Returns scratch space to move passes of `rows`, which have been played."""
    resume, path = np.zeros_like(tables.ranks["first"]), np.zeros_like(rows.code)
    changed, change, makespan, played = (np.zeros(count, np.int64) for count in (2, 4, 1, 1))
    return MoveScratch(copy_of(rows), resume, path, initial_play_state(tables), changed, change, makespan, played)


# The loop over moves is one function, since what it keeps from move to move (cost, critical path) must stay in registers.
@compiled
def anneal(
    tables: Tables,
    rows: Rows,
    scratch: MoveScratch,
    best: Any,
    goal: Any,
    target: Any,
    cost: float,
    share: float,
    hot: float,
    cold: float,
    moves: int,
) -> tuple[Any, float, int]:
    """Tries `moves` moves on `rows` while the temperature (ns) falls from `hot` to `cold`. `cost` is the current cost of `rows`.

    `scratch` holds a copy of `rows`. `goal` is the time of the longest rank in ns of `best`, for which see `keep`. Better rows replace
    both. The search ends when `goal` reaches `target`. Returns the goal, the cost of `rows`, and the number of moves tried. `play_rows`
    describes the cost and its `share`.
    """
    path_length = 0
    for tried in range(moves):
        temperature = hot * (cold / hot) ** (tried / moves)
        scratch.changed[0], scratch.changed[1], recomputes = len(rows.code), 0, False
        if tables.choice and np.random.random() < CHANGED_RECOMPUTE:
            recomputes = True
            rank = change_recompute(tables, rows, scratch.change, scratch.changed)
        elif tables.steps and np.random.random() < CHANGED_STEPS:
            rank = change_step(tables, rows, scratch.changed)
        else:
            rank, path_length = shift(tables, rows, scratch.path, path_length, scratch.changed)
        low, high = changed_range(tables, rows, scratch, rank)
        if low >= high:
            continue
        accepted = update_held(tables, rows, rank, low, high)
        if accepted:
            cutoff = cost - temperature * np.log(np.random.random() + 1e-300)
            longest, new_cost = play_from(tables, rows, scratch, rank, low, share, cutoff)
            accepted = longest >= 0
        if not accepted:
            copy_range(tables, rows, scratch.before, low, high)
            if tables.choice and recomputes:
                undo_recompute(tables, scratch.change)
            continue
        copy_range(tables, scratch.before, rows, low, high)
        path_length, cost = 0, new_cost
        if longest < goal or (longest == goal and makespan_of(tables, rows.end) < scratch.makespan[0]):
            goal = longest
            if scratch.makespan[0] > 0:
                scratch.makespan[0] = makespan_of(tables, rows.end)
            keep(tables, rows, best)
            if goal <= target:
                return goal, cost, tried + 1
    return goal, cost, moves


@inlined
def keep(tables: Tables, rows: Rows, best: Any) -> None:
    """Writes the codes of `rows` into `best`, with which passes share steps and what is recomputed, if moves change these."""
    if tables.choice:
        copy_into(best.order, rows.code)
        copy_into(best.absent, tables.absent)
        copy_into(best.level, tables.choice.level)
    elif tables.steps:
        copy_into(best.code, rows.code)
        copy_into(best.microbatch, rows.microbatch)
        copy_into(best.where, rows.where)
        copy_into(best.glued, rows.glued)
    else:
        copy_into(best, rows.code)


@inlined
def changed_range(tables: Tables, rows: Rows, scratch: MoveScratch, rank: int) -> tuple[int, int]:
    """Returns the first position whose memory or time a move may change, and the position after the last."""
    low, high = scratch.changed[0], scratch.changed[1]
    first, stop = tables.ranks[rank].first, tables.ranks[rank].stop
    if tables.joins and low < high:  # a neighbor of those that moved may now be next to its B or W, or no longer
        low, high = max(low - 1, first), min(high + 1, stop)
    while tables.steps and first < low < high and (rows.glued[low - 1] or scratch.before.glued[low - 1]):
        low -= 1
    while tables.steps and low < high < stop and (rows.glued[high - 1] or scratch.before.glued[high - 1]):
        high += 1
    return low, high


@inlined
def copy_range(tables: Tables, into: Rows, rows: Rows, low: int, high: int) -> None:
    """Copies the passes of a range and their memory, which are a permutation of those in `into`."""
    for at in range(low, high):
        one = rows.code[at] * tables.microbatches + rows.microbatch[at]
        into.code[at] = rows.code[at]
        into.microbatch[at] = rows.microbatch[at]
        into.held[at] = rows.held[at]
        into.where[one] = at
        if tables.joins or tables.steps:
            into.time[one] = rows.time[one]
        if tables.steps:
            into.glued[at] = rows.glued[at]


@inlined
def play_from(tables: Tables, rows: Rows, scratch: MoveScratch, rank: int, low: int, share: float, cutoff: float) -> tuple[int, float]:
    """Replays the rows from position `low` of `rank`, and on other ranks from the time at which the pass before it ends.

    Returns the result of `play_rows`. Afterwards `rows` and `scratch` agree on the times: the new ones, or the old ones if the play is
    rejected.
    """
    resume, head = scratch.resume, scratch.play.head
    free = rows.end[low - 1] if low > tables.ranks[rank].first else 0
    for r in range(len(tables.ranks)):
        resume[r] = low if r == rank else first_start_from(tables, rows, r, free)
        head[r] = resume[r]
    longest, cost = play_rows(tables, rows, scratch.play, share, cutoff)
    for r in range(len(tables.ranks)):
        scratch.played[0] += head[r] - resume[r]
        if longest >= 0:
            copy_times(scratch.before.end, scratch.before.idle, rows.end, rows.idle, resume[r], head[r])
        else:
            copy_times(rows.end, rows.idle, scratch.before.end, scratch.before.idle, resume[r], head[r])
    return longest, cost


@inlined
def copy_times(into_end: Ints, into_idle: Ints, end: Ints, idle: Ints, start: int, stop: int) -> None:
    """Copies both times of the positions from `start` to `stop` in one loop, because most ranges are too short for two."""
    for at in range(start, stop):
        into_end[at] = end[at]
        into_idle[at] = idle[at]
