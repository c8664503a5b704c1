"""Annealing of orders: moves passes along their rows, and sometimes accepts longer schedules.

Every move is played exactly, but only from the first time that it can affect, and only until it is known to be rejected.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.play import PlayState, Rows, copy_into, initial_play_state, makespan_of, play_rows, update_held
from zerobubble.planning.kernels.tables import Ints, Tables

MAX_SHIFT = 24
"""The most passes that a move crosses."""

INTO_GAP = 0.4
"""Fraction of moves that pull a pass into idle time."""

ANY_PASS = 0.15
"""Fraction of moves of any pass; the others move a pass of the critical path."""

SHIFT_BACK = 0.3
"""Fraction of moves that exchange two passes: the last one passed over moves back."""


@compiled
def seed_random(seed: int) -> None:
    """Seeds the random numbers of the kernels, which are separate from those of numpy."""
    np.random.seed(seed)


class MoveScratch(NamedTuple):
    """Scratch space of moves: the times of the rows before the move, the position from which each rank is replayed, and a critical path."""

    end: Ints
    idle: Ints
    resume: Ints
    path: Ints
    play: PlayState
    makespan: Ints
    """One number: the makespan (ns) of the best order, which breaks ties. 0 disables this."""
    played: Ints
    """One number: the passes played again after moves, of rows that a move changes within the memory."""


def move_scratch(tables: Tables, rows: Rows) -> MoveScratch:
    """Returns scratch space to move passes of `rows`, which have been played."""
    resume, path = np.zeros_like(tables.ranks["first"]), np.zeros_like(rows.code)
    play, makespan, played = initial_play_state(tables), np.zeros(1, np.int64), np.zeros(1, np.int64)
    return MoveScratch(rows.end.copy(), rows.idle.copy(), resume, path, play, makespan, played)


# The loop over moves is one function, since what it keeps from move to move (cost, critical path) must stay in registers.
@compiled
def anneal(
    tables: Tables,
    rows: Rows,
    scratch: MoveScratch,
    best: Ints,
    goal: Any,
    target: Any,
    cost: float,
    share: float,
    hot: float,
    cold: float,
    moves: int,
) -> tuple[Any, float, int]:
    """Tries `moves` moves on `rows` while the temperature (ns) falls from `hot` to `cold`. `cost` is the current cost of `rows`.

    `scratch` holds the times of `rows`. `goal` is the time of the longest rank of the order `best` in ns. Better orders replace both. The
    search ends when `goal` reaches `target`. Returns the goal, the cost of `rows`, and the number of moves tried. `play_rows` describes the
    cost and its `share`.
    """
    path_length = 0
    for tried in range(moves):
        temperature = hot * (cold / hot) ** (tried / moves)
        start, stop, path_length = draw_move(tables, rows, scratch.path, path_length)
        rank = tables.codes[rows.code[start]].rank
        stop = move_pass(tables, rows, rank, start, stop)
        if stop == start:
            continue
        back_from, back_to = start, start
        if np.random.random() < SHIFT_BACK:
            back_from = stop - 1 if stop > start else stop + 1
            back_to = move_pass(tables, rows, rank, back_from, start)
        low, high = min(start, stop, back_from, back_to), max(start, stop, back_from, back_to) + 1
        if tables.joins:  # a neighbor of those that moved may now be next to its B or W, or no longer
            low, high = max(low - 1, tables.ranks[rank].first), min(high + 1, tables.ranks[rank].stop)
        accepted = update_held(tables, rows, rank, low, high)
        if accepted:
            cutoff = cost - temperature * np.log(np.random.random() + 1e-300)
            longest, new_cost = play_from(tables, rows, scratch, rank, low, share, cutoff)
            accepted = longest >= 0
        if not accepted:
            if back_to != back_from:
                move_pass(tables, rows, rank, back_to, back_from)
            move_pass(tables, rows, rank, stop, start)
            update_held(tables, rows, rank, low, high)
            continue
        path_length, cost = 0, new_cost
        if longest < goal or (longest == goal and makespan_of(tables, rows.end) < scratch.makespan[0]):
            goal = longest
            if scratch.makespan[0] > 0:
                scratch.makespan[0] = makespan_of(tables, rows.end)
            copy_into(best, rows.code)
            if goal <= target:
                return goal, cost, tried + 1
    return goal, cost, moves


@inlined
def play_from(tables: Tables, rows: Rows, scratch: MoveScratch, rank: int, low: int, share: float, cutoff: float) -> tuple[int, float]:
    """Replays the rows from position `low` of `rank`, and on other ranks from the time at which the pass before it ends.

    Returns the result of `play_rows`. Afterwards `rows` and `scratch` agree: on the new times, or on the old ones if the play is rejected.
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
            copy_times(scratch.end, scratch.idle, rows.end, rows.idle, resume[r], head[r])
        else:
            copy_times(rows.end, rows.idle, scratch.end, scratch.idle, resume[r], head[r])
    return longest, cost


@inlined
def copy_times(into_end: Ints, into_idle: Ints, end: Ints, idle: Ints, start: int, stop: int) -> None:
    """Copies both times of the positions from `start` to `stop` in one loop, because most ranges are too short for two."""
    for at in range(start, stop):
        into_end[at] = end[at]
        into_idle[at] = idle[at]


@inlined
def move_pass(tables: Tables, rows: Rows, rank: int, start: int, stop: int) -> int:
    """Moves the pass at position `start` towards `stop`, up to a pass that it must not cross. Returns its new position."""
    stop = max(tables.ranks[rank].first, min(stop, tables.ranks[rank].stop - 1))
    step = 1 if stop > start else -1
    at = start
    while at != stop:
        before, following = min(at, at + step), max(at, at + step)
        if must_follow(tables, rows, before, following):
            break
        swap(tables, rows, before, following)
        at += step
    return at


@inlined
def must_follow(tables: Tables, rows: Rows, before: int, following: int) -> bool:
    """Whether two adjacent passes of a row cannot be exchanged."""
    first, second = rows.code[before], rows.code[following]
    if first == second:
        return True
    needs = tables.codes[second].predecessor == first or tables.codes[second].maker == first or tables.codes[first].successor == second
    if not needs or rows.microbatch[before] != rows.microbatch[following]:
        return False
    at = rows.microbatch[before]
    return not (tables.absent[first * tables.microbatches + at] or tables.absent[second * tables.microbatches + at])


@inlined
def swap(tables: Tables, rows: Rows, one: int, other: int) -> None:
    """Exchanges two passes."""
    code, microbatch, where = rows.code, rows.microbatch, rows.where
    code[one], code[other] = code[other], code[one]
    microbatch[one], microbatch[other] = microbatch[other], microbatch[one]
    where[code[one] * tables.microbatches + microbatch[one]] = one
    where[code[other] * tables.microbatches + microbatch[other]] = other


@inlined
def first_start_from(tables: Tables, rows: Rows, rank: int, time: Any) -> int:
    """Returns the first position of `rank` whose pass starts at `time` or later. No earlier pass waits for one that starts then."""
    low, high = tables.ranks[rank].first, tables.ranks[rank].stop
    while low < high:
        middle = (low + high) // 2
        one = rows.code[middle] * tables.microbatches + rows.microbatch[middle]
        if rows.end[middle] - rows.time[one] < time:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def draw_move(tables: Tables, rows: Rows, path: Ints, path_length: int) -> tuple[int, int, int]:
    """Returns a pass to move, its target, and the length of the critical path in `path`, which is computed if needed and 0."""
    kind = np.random.random()
    if kind < INTO_GAP:
        start, stop = draw_move_into_gap(tables, rows)
        return start, stop, path_length
    if kind < 1 - ANY_PASS:
        if path_length == 0:
            path_length = critical_path(tables, rows, path)
        start = path[np.random.randint(path_length)]
    else:
        start = np.random.randint(len(rows.code))
    return start, start + np.random.randint(-MAX_SHIFT, MAX_SHIFT + 1), path_length


@inlined
def draw_move_into_gap(tables: Tables, rows: Rows) -> tuple[int, int]:
    """Returns a pass to pull into the first gap after a random position, and the position of the gap."""
    gap = np.random.randint(len(rows.code))
    last = tables.ranks[tables.codes[rows.code[gap]].rank].stop - 1
    while gap < last and (gap == 0 or rows.idle[gap] == rows.idle[gap - 1]):
        gap += 1
    wish = rows.code[min(gap + 1 + np.random.randint(MAX_SHIFT), last)]
    start = gap
    while start < last and rows.code[start] != wish:
        start += 1
    return start, gap


@inlined
def last_of_longest(tables: Tables, rows: Rows) -> int:
    """Returns the position of the last pass of the longest rank."""
    worst, longest = 0, -1
    for r in range(len(tables.ranks)):
        length = tables.ranks[r].work + rows.idle[tables.ranks[r].stop - 1]
        if length > longest:
            worst, longest = r, length
    return tables.ranks[worst].stop - 1


@inlined
def critical_path(tables: Tables, rows: Rows, path: Ints) -> int:
    """Fills `path` with the positions of the critical path of the longest rank, last first. Returns their number.

    If both the pass before in the row and a message delay a pass, either may be on the path.
    """
    at, length = last_of_longest(tables, rows), 0
    while True:
        path[length] = at
        length += 1
        code = rows.code[at]
        rank, need = tables.codes[code].rank, tables.codes[code].maker
        one = code * tables.microbatches + rows.microbatch[at]
        start = rows.end[at] - rows.time[one]
        ahead = tables.ahead[one]
        in_row = at > tables.ranks[rank].first and rows.end[at - 1] + ahead == start
        if need >= 0:
            source = rows.where[need * tables.microbatches + rows.microbatch[at]]
            by_message = rows.end[source] + tables.codes[code].lag == start
            if by_message and not (in_row and np.random.random() < 0.5):
                at = source
                continue
        if not in_row:
            return length
        at -= 1
