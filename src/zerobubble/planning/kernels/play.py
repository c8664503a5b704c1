"""The compiled simulator: each pass runs as soon as its rank is free and its message has arrived. It can resume a partial play.

If `Tables.steps` says so, passes may share a step: neighbors of a row that run as one. Then all passes of a step wait for the inputs of
each, and their outputs leave when the step ends.
"""

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
    time: Ints
    """The ns of code c for microbatch j, at the same index. A B joined with its W takes the time of both, and that W takes none. A pass
    that shares a step takes the time of that step.
    """
    held: Ints
    """Bytes that the rank holds after the pass if no B and W are joined."""
    end: Ints
    """When the pass ends, in ns."""
    idle: Ints
    """The idle time of the rank before the pass, in ns, and what its steps so far take beyond `RANK.work`."""
    glued: Ints
    """1 if the pass shares its step with the next pass, else 0; empty if passes run one at a time."""


class PlayState(NamedTuple):
    """The progress of a play, by rank."""

    head: Ints
    """The position of the next pass."""
    blocked: Ints
    """The position of the pass whose message the next one waits for, or -1."""
    stack: Ints
    """Scratch space for the ranks that can continue."""


def initial_play_state(tables: Tables) -> PlayState:
    """Returns the initial state of a play."""
    first = tables.ranks["first"].copy()
    return PlayState(first, np.zeros_like(first), np.zeros_like(first))


def rows_of(tables: Tables, order: Ints) -> Rows:
    """Returns the rows of `order`, not played yet."""
    microbatch, where, held, end, idle = (np.zeros(len(order), np.int64) for _ in range(5))
    time = tables.time.copy() if tables.joins or tables.steps else tables.time
    rows = Rows(order.copy(), microbatch, where, time, held, end, idle, np.zeros(len(order) if tables.steps else 0, np.int64))
    number_microbatches(tables, rows, np.zeros(len(tables.codes), np.int64))
    return rows


def copy_of(order: Any) -> Any:
    """Returns a copy of codes, or of rows and their times."""
    return Rows(*(column.copy() for column in order)) if isinstance(order, Rows) else order.copy()


@inlined
def copy_into(into: NDArray[Any], values: NDArray[Any]) -> None:
    """Writes `values` into another array."""
    for at in range(len(values)):
        into[at] = values[at]


@inlined
def place_of(tables: Tables, code: int, number: int) -> int:
    """Returns the place of the microbatch for which a code occurs for the `number`-th time, counted from 0. It is its own inverse."""
    if tables.slices == 1 or code < len(tables.forwards):
        return number
    return number + tables.slices - 1 - 2 * (number % tables.slices)


@compiled
def number_microbatches(tables: Tables, rows: Rows, count: Ints) -> None:
    """Fill in `microbatch` and `where` from the codes, given a zero per code."""
    for i in range(len(rows.code)):
        code = rows.code[i]
        place = place_of(tables, code, count[code])
        rows.microbatch[i] = place
        rows.where[code * tables.microbatches + place] = i
        count[code] += 1


@compiled
def update_held(tables: Tables, rows: Rows, rank: int, start: int, stop: int) -> bool:
    """Fill in `held` from position `start` up to `stop` of the row of `rank`; False if the rank's limit is passed there.

    If B and W may be joined, also fills in `time`, from the position before `start`. In this case, `stop` must be the end of the row, or a
    position that follows an unchanged pass. If passes may share steps, fills in `time`, too, and both positions are where steps begin.
    """
    held = rows.held[start - 1] if start > tables.ranks[rank].first else 0
    if tables.steps:
        at = start
        while at < stop:
            at = set_step_time(tables, rows, at)
    for i in range(start, stop):
        one = rows.code[i] * tables.microbatches + rows.microbatch[i]
        held += tables.held[one]
        rows.held[i] = held
        if tables.joins:
            rows.time[one] = tables.time[one]
            if i > tables.ranks[rank].first and joined(tables, rows, rank, i - 1):
                rows.time[one] = 0
        if held + tables.over[one] > tables.ranks[rank].limit:
            if tables.steps and is_with_weight(tables, rows, i):
                continue
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


@inlined
def step_stop(tables: Tables, rows: Rows, at: int) -> int:
    """Returns the position after the step of a pass."""
    while tables.steps and rows.glued[at]:
        at += 1
    return at + 1


@inlined
def is_with_weight(tables: Tables, rows: Rows, at: int) -> bool:
    """Whether the pass at a position is a B that shares a step with its W, as a BW."""
    return bool(rows.glued[at] and tables.codes[rows.code[at]].predecessor >= 0)


@compiled
def set_step_time(tables: Tables, rows: Rows, start: int) -> int:
    """Fills in the time of the step that begins at a position. Returns the position after it."""
    stages, m, stop = len(tables.forwards), tables.microbatches, step_stop(tables, rows, start)
    total, longest, parts, at = 0, 0, 0, start
    while at < stop:
        code = rows.code[at]
        time = tables.time[code * m + rows.microbatch[at]]
        if is_with_weight(tables, rows, at):
            time = tables.steps.fused[code % stages]
            at += 1
        total += time
        longest = max(longest, time)
        parts += 1
        at += 1
    if parts > 1:
        total = max(longest, total - tables.steps.hidden[rows.code[start] % stages])
    for k in range(start, stop):
        rows.time[rows.code[k] * m + rows.microbatch[k]] = total
    return stop


@compiled
def all_ranks_fit(tables: Tables, rows: Rows) -> bool:
    """Whether every rank is within its limit. Fills in `held`."""
    within = True
    for rank in range(len(tables.ranks)):
        within &= update_held(tables, rows, rank, tables.ranks[rank].first, tables.ranks[rank].stop)
    return within


# One long loop, because its clocks must stay in registers: taken apart, the state would go through memory at every pass.
@compiled
def play_rows(tables: Tables, rows: Rows, state: PlayState, share: float, cutoff: float) -> tuple[int, float]:
    """Plays every row from the head of its rank and advances the heads. Earlier passes must have been played.

    Returns the time of the longest rank (span, or makespan if `from_start`) in ns and the cost: that time plus `share` times the sum over
    ranks. Returns (-1, inf) if the rows deadlock, or as soon as the cost is sure to exceed `cutoff`.
    """
    ranks, m = len(tables.ranks), tables.microbatches
    head, blocked, stack = state.head, state.blocked, state.stack
    longest, total = 0, 0  # both grow with every wait, so they are lower bounds on the complete play
    for r in range(ranks):
        blocked[r] = -1
        stack[ranks - 1 - r] = r
        known = tables.ranks[r].work
        if head[r] > tables.ranks[r].first:
            known += rows.idle[head[r] - 1]
        total += known
        longest = max(longest, known)
    depth = ranks
    while depth > 0:
        depth -= 1
        r = stack[depth]
        i = head[r]
        first, last = tables.ranks[r].first, tables.ranks[r].stop
        free, idle = 0, 0
        if i > first:
            free, idle = rows.end[i - 1], rows.idle[i - 1]
        while i < last:
            code = rows.code[i]
            one = code * m + rows.microbatch[i]
            free += tables.ahead[one]
            need, gap = tables.codes[code].maker, 0
            if need >= 0:
                at = rows.where[need * m + rows.microbatch[i]]
                head[r] = i
                if at >= head[tables.codes[need].rank]:
                    blocked[r] = at
                    break
                gap = rows.end[at] + tables.codes[code].lag - free
            if tables.steps:
                head[r] = i
                at, gap = wait_of_others(tables, rows, head, i, free, gap)
                if at >= 0:
                    blocked[r] = at
                    break
                beyond = beyond_least(tables, rows, i)
                idle += beyond
                total += beyond
                longest = max(longest, tables.ranks[r].work + idle)
                if longest + share * total > cutoff:
                    return -1, np.inf
            if gap > 0:
                free += gap
                if i > first or tables.from_start:
                    idle += gap
                    total += gap
                    longest = max(longest, tables.ranks[r].work + idle)
                    if longest + share * total > cutoff:
                        return -1, np.inf
            free += rows.time[one]
            rows.end[i] = free
            rows.idle[i] = idle
            depth = wake(tables, state, depth, code, i)
            while tables.steps and rows.glued[i]:
                i += 1
                rows.end[i] = free
                rows.idle[i] = idle
                depth = wake(tables, state, depth, rows.code[i], i)
            i += 1
        head[r] = i
    for r in range(ranks):
        if head[r] < tables.ranks[r].stop:
            return -1, np.inf
    return longest, longest + share * total


@inlined
def wait_of_others(tables: Tables, rows: Rows, head: Ints, start: int, free: int, gap: int) -> tuple[int, int]:
    """Returns the position of a pass that has not been played and whose message the others of a step need, -1 if there is none, and the
    ns for which the step waits: `gap` if the first one waits longest.
    """
    at = start
    while rows.glued[at]:
        at += 1
        code = rows.code[at]
        need = tables.codes[code].maker
        if need >= 0:
            source = rows.where[need * tables.microbatches + rows.microbatch[at]]
            if source >= head[tables.codes[need].rank]:
                return source, gap
            gap = max(gap, rows.end[source] + tables.codes[code].lag - free)
    return -1, gap


@inlined
def wake(tables: Tables, state: PlayState, depth: int, code: int, at: int) -> int:
    """Adds the rank that waits for the pass at a position, if any, to the stack of `depth` ranks. Returns the new depth."""
    if tables.codes[code].user >= 0:
        reader = tables.codes[tables.codes[code].user].rank
        if state.blocked[reader] == at:
            state.blocked[reader] = -1
            state.stack[depth] = reader
            return depth + 1
    return depth


@inlined
def beyond_least(tables: Tables, rows: Rows, start: int) -> int:
    """The ns that a step takes beyond what `RANK.work` counts for its passes."""
    more = rows.time[rows.code[start] * tables.microbatches + rows.microbatch[start]]
    for k in range(start, step_stop(tables, rows, start)):
        more -= tables.steps.least[rows.code[k]]
    return int(more)


@inlined
def makespan_of(tables: Tables, end: Ints) -> int:
    """Returns the end of the last rank (ns) from the ends of passes."""
    last = 0
    for r in range(len(tables.ranks)):
        last = max(last, end[tables.ranks[r].stop - 1])
    return last


def longest_time(tables: Tables, rows: Rows) -> int:
    """Returns the time of the longest rank in ns, -1 if the rows deadlock."""
    return int(play_rows(tables, rows, initial_play_state(tables), 0.0, np.inf)[0])


@compiled
def replay(tables: Tables, rows: Rows, state: PlayState, share: float, cutoff: float) -> tuple[int, float]:
    """Plays all rows from their beginning. Returns the result of `play_rows`, or (-1, inf) if a rank exceeds its limit."""
    if not all_ranks_fit(tables, rows):
        return -1, np.inf
    for r in range(len(tables.ranks)):
        state.head[r] = tables.ranks[r].first
    return play_rows(tables, rows, state, share, cutoff)
