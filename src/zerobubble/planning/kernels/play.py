"""The compiled simulator: each pass runs as soon as its rank is free and its message has arrived. It can resume a partial play.

It plays the measured times, or many samples of noisy ones at once: see `samples`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.samples import (
    SampledTimes,
    Times,
    begin_visit,
    end_visit,
    exceeds,
    is_refused,
    known_times,
    new_clocks,
    outcome,
    run_ahead,
    run_pass,
    wait_for,
)
from zerobubble.planning.kernels.tables import Ints, Tables


class Rows(NamedTuple):
    """The rows of a schedule and their times, by position in the concatenation of all rows. With samples, `end` and `idle` have a second
    axis for them.
    """

    code: Ints
    microbatch: Ints
    where: Ints
    """The position of code c for microbatch j, at `c * microbatches + j`."""
    time: Ints
    """The ns of code c for microbatch j, at the same index. A B joined with its W takes the time of both, and that W takes none."""
    held: Ints
    """Bytes that the rank holds after the pass if no B and W are joined."""
    end: Times
    """When the pass ends, in ns."""
    idle: Times
    """The idle time of the rank before the pass, in ns."""
    sampled: Any
    """The noisy times, `SampledTimes`; an empty tuple if the times are those of the tables."""


class PlayState(NamedTuple):
    """The progress of a play, by rank."""

    head: Ints
    """The position of the next pass."""
    blocked: Ints
    """The position of the pass whose message the next one waits for, or -1."""
    stack: Ints
    """Scratch space for the ranks that can continue."""
    clocks: Any
    """Scratch space for the `Clocks` of noisy samples; an empty tuple if the times are those of the tables."""


def initial_play_state(tables: Tables, rows: Rows) -> PlayState:
    """Returns the initial state of a play of `rows`."""
    first = tables.ranks["first"].copy()
    clocks = new_clocks(len(first), rows.end.shape[1]) if rows.end.ndim == 2 else ()
    return PlayState(first, np.zeros_like(first), np.zeros_like(first), clocks)


def rows_of(tables: Tables, order: Ints, sampled: SampledTimes | None = None) -> Rows:
    """Returns the rows of `order`, not played yet, with the times of the tables or sampled ones."""
    size = len(order)
    microbatch, where, held = (np.zeros(size, np.int64) for _ in range(3))
    time = tables.time.copy() if tables.joins else tables.time
    if sampled is None:
        rows = Rows(order.copy(), microbatch, where, time, held, np.zeros(size, np.int64), np.zeros(size, np.int64), ())
    else:
        end, idle = np.zeros_like(sampled.duration), np.zeros_like(sampled.duration)
        rows = Rows(order.copy(), microbatch, where, time, held, end, idle, sampled)
    number_microbatches(tables, rows, np.zeros(len(tables.codes), np.int64))
    return rows


@inlined
def copy_into(into: NDArray[Any], values: NDArray[Any]) -> None:
    """Writes `values` into another array."""
    for at in range(len(values)):
        into[at] = values[at]


@compiled
def number_microbatches(tables: Tables, rows: Rows, count: Ints) -> None:
    """Fill in `microbatch` and `where` from the codes, given a zero per code."""
    for i in range(len(rows.code)):
        code = rows.code[i]
        rows.microbatch[i] = count[code]
        rows.where[code * tables.microbatches + count[code]] = i
        count[code] += 1


@compiled
def update_held(tables: Tables, rows: Rows, rank: int, start: int, stop: int) -> bool:
    """Fill in `held` from position `start` up to `stop` of the row of `rank`; False if the rank's limit is passed there.

    If B and W may be joined, also fills in `time`, from the position before `start`. In this case, `stop` must be the end of the row, or a
    position that follows an unchanged pass.
    """
    held = rows.held[start - 1] if start > tables.ranks[rank].first else 0
    for i in range(start, stop):
        one = rows.code[i] * tables.microbatches + rows.microbatch[i]
        held += tables.held[one]
        rows.held[i] = held
        if tables.joins:
            rows.time[one] = tables.time[one]
            if i > tables.ranks[rank].first and joined(tables, rows, rank, i - 1):
                rows.time[one] = 0
        if held + tables.over[one] > tables.ranks[rank].limit:
            if not (tables.joins and i + 1 < tables.ranks[rank].stop and joined(tables, rows, rank, i)):
                return False
            if held - tables.codes[rows.code[i]].grows > tables.ranks[rank].limit:
                return False
            rows.time[one] += tables.time[rows.code[i + 1] * tables.microbatches + rows.microbatch[i + 1]]
    return True


@inlined
def joined(tables: Tables, rows: Rows, rank: int, at: int) -> bool:
    """Whether the pass at a position is a B joined with its W: the W comes next, and B alone exceeds the memory."""
    code, limit = rows.code[at], tables.ranks[rank].limit
    has_weight = tables.codes[code].successor == rows.code[at + 1] and rows.microbatch[at] == rows.microbatch[at + 1]
    return bool(tables.codes[code].grows > 0 and has_weight and rows.held[at] > limit)


@compiled
def all_ranks_fit(tables: Tables, rows: Rows) -> bool:
    """Whether every rank is within its limit. Fills in `held`."""
    within = True
    for rank in range(len(tables.ranks)):
        within &= update_held(tables, rows, rank, tables.ranks[rank].first, tables.ranks[rank].stop)
    return within


# One loop for both kinds of times. It is long because the clocks of the measured case must stay in registers: taken apart, the state
# would go through memory at every pass.
@compiled
def play_rows(tables: Tables, rows: Rows, state: PlayState, share: float, most: float, cutoff: float) -> tuple[Any, float]:
    """Plays every row from the head of its rank and advances the heads. Earlier passes must have been played.

    Returns the time of the longest rank (span, or makespan if `from_start`) in ns and the cost: that time plus `share` times the sum over
    ranks. With samples, the time is computed with the measured times, and the cost is the mean over the noisy samples. Returns (-1, inf) if
    the rows deadlock, or as soon as the cost is sure to exceed `cutoff` or, with samples, the measured time `most`.
    """
    ranks, m = len(tables.ranks), tables.microbatches
    head, blocked, stack = state.head, state.blocked, state.stack
    for r in range(ranks):
        blocked[r] = -1
        stack[ranks - 1 - r] = r
    longest, total = known_times(tables, head, rows.idle, rows.sampled, state.clocks, share)
    depth = ranks
    while depth > 0:
        depth -= 1
        r = stack[depth]
        i = head[r]
        first, last = tables.ranks[r].first, tables.ranks[r].stop
        free, idle = begin_visit(rows.end, rows.idle, i, first, state.clocks)
        while i < last:
            code = rows.code[i]
            one = code * m + rows.microbatch[i]
            free = run_ahead(rows.end, free, tables.ahead[one])
            need = tables.codes[code].maker
            if need >= 0:
                at = rows.where[need * m + rows.microbatch[i]]
                head[r] = i
                if at >= head[tables.codes[need].rank]:
                    blocked[r] = at
                    break
                counts = i > first or tables.from_start
                waited, free, idle, longest, total = wait_for(
                    rows.end, at, tables.codes[code].lag, counts, free, idle, tables.ranks[r].work, longest, total
                )
                if waited and exceeds(rows.end, longest, total, share, cutoff):
                    return -1, np.inf
            free = run_pass(rows.end, rows.idle, rows.sampled, i, one, rows.time[one], free, idle)
            if tables.codes[code].user >= 0:
                reader = tables.codes[tables.codes[code].user].rank
                if blocked[reader] == i:
                    blocked[reader] = -1
                    stack[depth] = reader
                    depth += 1
            i += 1
        head[r] = i
        total = end_visit(rows.end, rows.sampled, r, state.clocks, share, total)
        if is_refused(rows.end, longest, total, most, cutoff):
            return -1, np.inf
    for r in range(ranks):
        if head[r] < tables.ranks[r].stop:
            return -1, np.inf
    return outcome(rows.end, longest, total, share)


@inlined
def makespan_of(tables: Tables, end: Times) -> int:
    """Returns the end of the last rank (ns) from the ends of passes; 0 with samples, which do not use it."""
    last = 0
    if end.ndim == 1:
        for r in range(len(tables.ranks)):
            last = max(last, end[tables.ranks[r].stop - 1])
    return last


def longest_time(tables: Tables, rows: Rows) -> int:
    """Returns the time of the longest rank in ns, -1 if the rows deadlock."""
    return int(play_rows(tables, rows, initial_play_state(tables, rows), 0.0, np.inf, np.inf)[0])


@compiled
def replay(tables: Tables, rows: Rows, state: PlayState, share: float, cutoff: float) -> tuple[Any, float]:
    """Plays all rows from their beginning. Returns the result of `play_rows`, or (-1, inf) if a rank exceeds its limit."""
    if not all_ranks_fit(tables, rows):
        return -1, np.inf
    for r in range(len(tables.ranks)):
        state.head[r] = tables.ranks[r].first
    return play_rows(tables, rows, state, share, np.inf, cutoff)
