"""Order annealing: move passes along their rows where that shortens the schedule, now and then where it does not.

Every move is played exactly, but only from the time it can matter and only until it is known to be refused.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.play import PlayState, Rows, copy_into, initial_play_state, play_rows, update_held
from zerobubble.planning.kernels.tables import Ints, Tables

MAX_SHIFT = 24
"""A move takes a pass past at most so many others."""


@compiled
def seed_random(seed: int) -> None:
    """Seed the dice of the kernels."""
    np.random.seed(seed)


class MoveScratch(NamedTuple):
    """Room for moves: the times of the rows as they were, where each rank is played from, and a critical path."""

    end: Ints
    idle: Ints
    resume: Ints
    path: Ints
    play_state: PlayState


def move_scratch(tables: Tables, rows: Rows) -> MoveScratch:
    """Room to move passes of `rows`, played before."""
    return MoveScratch(
        rows.end.copy(), rows.idle.copy(), np.zeros_like(tables.ranks["first"]), np.zeros_like(rows.code), initial_play_state(tables)
    )


@compiled
def anneal(
    tables: Tables, rows: Rows, scratch: MoveScratch, best: Ints, goal: int, target: int, share: float, hot: float, cold: float, moves: int
) -> tuple[int, int]:
    """Try `moves` moves on `rows`, played before, while the temperature (ns) falls from `hot` to `cold`.

    `scratch` holds the times of `rows`. `goal` is the longest time of the word `best`; both are replaced by what is better, and reaching
    `target` ends the search. Gives the goal and the number of moves tried. Cost is longest + share * sum, see `play_rows`.
    """
    ranks = len(tables.ranks)
    end, idle, resume, path, path_length = scratch.end, scratch.idle, scratch.resume, scratch.path, 0
    head = scratch.play_state.head
    longest, total = lengths(tables, rows)
    cost = longest + share * total
    for tried in range(moves):
        temperature = hot * (cold / hot) ** (tried / moves)
        dice = np.random.random()
        if dice < 0.4:
            start, stop = draw_move_into_gap(tables, rows)
        elif dice < 0.85:
            if path_length == 0:
                path_length = critical_path(tables, rows, path)
            start = path[np.random.randint(path_length)]
            stop = start + np.random.randint(-MAX_SHIFT, MAX_SHIFT + 1)
        else:
            start = np.random.randint(len(rows.code))
            stop = start + np.random.randint(-MAX_SHIFT, MAX_SHIFT + 1)
        r = tables.codes[rows.code[start]].rank
        stop = move_pass(tables, rows, r, start, stop)
        if stop == start:
            continue
        back_from, back_to = start, start
        if np.random.random() < 0.3:
            back_from = stop - 1 if stop > start else stop + 1
            back_to = move_pass(tables, rows, r, back_from, start)
        low, high = min(start, stop, back_from, back_to), max(start, stop, back_from, back_to) + 1
        accepted = update_held(tables, rows, r, low, high)
        if accepted:
            free = rows.end[low - 1] if low > tables.ranks[r].first else 0
            for q in range(ranks):
                resume[q] = low if q == r else first_start_from(tables, rows, q, free)
                head[q] = resume[q]
            cutoff = cost - temperature * np.log(np.random.random() + 1e-300)
            longest, total = play_rows(tables, rows, scratch.play_state, share, cutoff)
            accepted = longest >= 0
            for q in range(ranks):
                for at in range(resume[q], head[q]):
                    if accepted:
                        end[at], idle[at] = rows.end[at], rows.idle[at]
                    else:
                        rows.end[at], rows.idle[at] = end[at], idle[at]
        if not accepted:
            if back_to != back_from:
                move_pass(tables, rows, r, back_to, back_from)
            move_pass(tables, rows, r, stop, start)
            update_held(tables, rows, r, low, high)
            continue
        path_length, cost = 0, longest + share * total
        if longest < goal:
            goal = longest
            copy_into(best, rows.code)
            if goal <= target:
                return goal, tried + 1
    return goal, moves


@inlined
def lengths(tables: Tables, rows: Rows) -> tuple[int, int]:
    """The longest time of a rank and the sum over ranks, of rows played to the end."""
    longest, total = 0, 0
    for r in range(len(tables.ranks)):
        length = tables.ranks[r].work + rows.idle[tables.ranks[r].stop - 1]
        longest = max(longest, length)
        total += length
    return longest, total


@inlined
def move_pass(tables: Tables, rows: Rows, rank: int, start: int, stop: int) -> int:
    """Move the pass at position `start` towards `stop`, up to a pass it must not change places with; where it comes to stand."""
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
    """Whether two neighbours of a row stand in the only order they can have."""
    first, second = rows.code[before], rows.code[following]
    needs = tables.codes[second].predecessor == first or tables.codes[second].maker == first
    return first == second or (needs and rows.microbatch[before] == rows.microbatch[following])


@inlined
def swap(tables: Tables, rows: Rows, one: int, other: int) -> None:
    """Let two passes change places."""
    order, microbatch, where = rows.code, rows.microbatch, rows.where
    order[one], order[other] = order[other], order[one]
    microbatch[one], microbatch[other] = microbatch[other], microbatch[one]
    where[order[one] * tables.microbatches + microbatch[one]] = one
    where[order[other] * tables.microbatches + microbatch[other]] = other


@inlined
def first_start_from(tables: Tables, rows: Rows, rank: int, time: int) -> int:
    """The first position of `rank` whose pass starts at `time` or later."""
    low, high = tables.ranks[rank].first, tables.ranks[rank].stop
    while low < high:
        middle = (low + high) // 2
        if rows.end[middle] - tables.codes[rows.code[middle]].time < time:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def draw_move_into_gap(tables: Tables, rows: Rows) -> tuple[int, int]:
    """A pass to pull into the first gap after a random position, and that gap's position."""
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
def critical_path(tables: Tables, rows: Rows, path: Ints) -> int:
    """Fill `path` with the positions that hold up the end of the longest rank, last first; their number."""
    worst, longest = 0, -1
    for r in range(len(tables.ranks)):
        length = tables.ranks[r].work + rows.idle[tables.ranks[r].stop - 1]
        if length > longest:
            worst, longest = r, length
    at, path_length = tables.ranks[worst].stop - 1, 0
    while True:
        path[path_length] = at
        path_length += 1
        code = rows.code[at]
        r, need = tables.codes[code].rank, tables.codes[code].maker
        start = rows.end[at] - tables.codes[code].time
        in_row = at > tables.ranks[r].first and rows.end[at - 1] == start
        if need >= 0:
            source = rows.where[need * tables.microbatches + rows.microbatch[at]]
            if rows.end[source] + tables.codes[code].lag == start and not (in_row and np.random.random() < 0.5):
                at = source
                continue
        if not in_row:
            return path_length
        at -= 1
