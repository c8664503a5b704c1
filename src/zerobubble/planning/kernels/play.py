"""The compiled simulator: exact, each pass as soon as its rank is free and its message is there; it can take up a play half way."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.tables import Ints, Tables


class Rows(NamedTuple):
    """The rows of a schedule and their times, by position in the concatenation of all rows."""

    code: Ints
    microbatch: Ints
    where: Ints
    """The position of code c for microbatch j, at `c * microbatches + j`."""
    held: Ints
    """Bytes the rank holds once the pass has run."""
    end: Ints
    idle: Ints
    """The ns the rank has idled, up to the pass."""


class PlayState(NamedTuple):
    """How far a play has come, by rank."""

    head: Ints
    """The position of the next pass."""
    blocked: Ints
    """The position of the pass whose message the next one waits for, or -1."""
    stack: Ints
    """Room for the ranks that can go on."""


def initial_play_state(tables: Tables) -> PlayState:
    """Where every play begins."""
    first = tables.ranks["first"].copy()
    return PlayState(first, np.zeros_like(first), np.zeros_like(first))


def rows_of(tables: Tables, order: Ints) -> Rows:
    """Rows that have not been played yet."""
    size = len(order)
    rows = Rows(order.copy(), *(np.zeros(size, np.int64) for _ in range(5)))
    number_microbatches(tables, rows, np.zeros(len(tables.codes), np.int64))
    return rows


@inlined
def copy_into(into: NDArray[Any], values: NDArray[Any]) -> None:
    """Write `values` into another array."""
    for at in range(len(values)):
        into[at] = values[at]


@compiled
def number_microbatches(tables: Tables, rows: Rows, count: Ints) -> None:
    """Fill in `microbatch` and `where` from the word, given a zero per code."""
    for i in range(len(rows.code)):
        code = rows.code[i]
        rows.microbatch[i] = count[code]
        rows.where[code * tables.microbatches + count[code]] = i
        count[code] += 1


@compiled
def update_held(tables: Tables, rows: Rows, rank: int, start: int, stop: int) -> bool:
    """Fill in `held` from position `start` up to `stop` of the row of `rank`; False if the limit is passed."""
    held = rows.held[start - 1] if start > tables.ranks[rank].first else 0
    for i in range(start, stop):
        held += tables.codes[rows.code[i]].held
        rows.held[i] = held
        if held > tables.ranks[rank].limit:
            return False
    return True


@compiled
def all_ranks_fit(tables: Tables, rows: Rows) -> bool:
    """Whether every rank stays within its limit; fills in `held`."""
    within = True
    for rank in range(len(tables.ranks)):
        within &= update_held(tables, rows, rank, tables.ranks[rank].first, tables.ranks[rank].stop)
    return within


@compiled
def play_rows(tables: Tables, rows: Rows, play_state: PlayState, share: float, cutoff: float) -> tuple[int, int]:
    """Play every row from the head of its rank on, what stands before being played already.

    Gives the longest time of a rank (span, or makespan if `from_start`) and the sum over ranks; (-1, 0) where the rows stop, or as soon
    as longest + share * sum must pass `cutoff`. Moves the heads to where it came.
    """
    ranks, m = len(tables.ranks), tables.microbatches
    head, blocked, stack = play_state.head, play_state.blocked, play_state.stack
    longest, total, depth = 0, 0, ranks
    for r in range(ranks):
        blocked[r], stack[ranks - 1 - r] = -1, r
        length = tables.ranks[r].work
        if head[r] > tables.ranks[r].first:
            length += rows.idle[head[r] - 1]
        total += length
        longest = max(longest, length)
    while depth > 0:
        depth -= 1
        r = stack[depth]
        i = head[r]
        first, last = tables.ranks[r].first, tables.ranks[r].stop
        free = rows.end[i - 1] if i > first else 0
        idle = rows.idle[i - 1] if i > first else 0
        while i < last:
            code = rows.code[i]
            need = tables.codes[code].maker
            if need >= 0:
                at = rows.where[need * m + rows.microbatch[i]]
                head[r] = i
                if at >= head[tables.codes[need].rank]:
                    blocked[r] = at
                    break
                arrival = rows.end[at] + tables.codes[code].lag
                if arrival > free:
                    if i > first or tables.from_start:
                        idle += arrival - free
                        total += arrival - free
                        longest = max(longest, tables.ranks[r].work + idle)
                        if longest + share * total > cutoff:
                            return -1, 0
                    free = arrival
            free += tables.codes[code].time
            rows.end[i] = free
            rows.idle[i] = idle
            if tables.codes[code].user >= 0:
                reader = tables.codes[tables.codes[code].user].rank
                if blocked[reader] == i:
                    blocked[reader] = -1
                    stack[depth] = reader
                    depth += 1
            i += 1
        head[r] = i
    for r in range(ranks):
        if head[r] < tables.ranks[r].stop:
            return -1, 0
    return longest, total


def longest_time(tables: Tables, rows: Rows) -> int:
    """The longest time of a rank, -1 if the rows stop."""
    return int(play_rows(tables, rows, initial_play_state(tables), 0.0, np.inf)[0])
