"""The moves of annealing: steps along their rows, and which passes share a step.

Moves are drawn from gaps, the critical path, or anywhere. A move changes the rows and notes the range of positions that it changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.play import Rows, step_stop
from zerobubble.planning.kernels.tables import Ints, Tables

MAX_SHIFT = 24
"""The most passes that a move crosses."""

INTO_GAP = 0.4
"""Fraction of shifts that pull a pass into idle time."""

ANY_PASS = 0.15
"""Fraction of shifts of any pass; the others move a pass of the critical path."""

SHIFT_BACK = 0.3
"""Fraction of shifts that exchange two passes: the last one passed over moves back."""

CHANGED_STEPS = 0.3
"""Fraction of moves that change which passes share a step, if any do; the others are shifts."""

OF_PAIRS = 0.6
"""Fraction of these that change a pair rather than a BW, if both can be better."""

ALONE = 0.5
"""Fraction of split pairs whose F then stays alone; other F's join another pair at once."""


@inlined
def shift(tables: Tables, rows: Rows, path: Ints, path_length: int, changed: Ints) -> tuple[int, int]:
    """Moves a random step along its row. Returns its rank and the length of the critical path in `path`, computed if needed and 0."""
    start, target, path_length = draw_shift(tables, rows, path, path_length)
    start = step_start(tables, rows, start)
    rank = tables.codes[rows.code[start]].rank
    now = shift_step(tables, rows, rank, start, target, changed)
    if now != start and np.random.random() < SHIFT_BACK:
        passed = step_start(tables, rows, now - 1) if now > start else step_stop(tables, rows, now)
        shift_step(tables, rows, rank, passed, start, changed)
    return rank, path_length


@inlined
def draw_shift(tables: Tables, rows: Rows, path: Ints, path_length: int) -> tuple[int, int, int]:
    """Returns a pass to move, its target, and the length of the critical path in `path`."""
    kind = np.random.random()
    if kind < INTO_GAP:
        start, target = draw_shift_into_gap(tables, rows)
        return start, target, path_length
    if kind < 1 - ANY_PASS:
        if path_length == 0:
            path_length = critical_path(tables, rows, path)
        start = path[np.random.randint(path_length)]
    else:
        start = np.random.randint(len(rows.code))
    return start, start + np.random.randint(-MAX_SHIFT, MAX_SHIFT + 1), path_length


@inlined
def draw_shift_into_gap(tables: Tables, rows: Rows) -> tuple[int, int]:
    """Returns a pass to pull into the first gap after a random position, and the position of the gap."""
    gap = np.random.randint(len(rows.code))
    last = tables.ranks[tables.codes[rows.code[gap]].rank].stop - 1
    while gap < last and (gap == 0 or not waits(tables, rows, gap)):
        gap += 1
    wish = rows.code[min(gap + 1 + np.random.randint(MAX_SHIFT), last)]
    start = gap
    while start < last and rows.code[start] != wish:
        start += 1
    return start, gap


@inlined
def waits(tables: Tables, rows: Rows, at: int) -> bool:
    """Whether the rank idles before the pass at a position."""
    if tables.steps:
        return bool(rows.end[at] - rows.time[rows.code[at] * tables.microbatches + rows.microbatch[at]] > rows.end[at - 1])
    return bool(rows.idle[at] != rows.idle[at - 1])


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
    """Fills `path` with the first positions of the steps on the critical path of the longest rank, last first. Returns their number.

    If both the pass before in the row and a message delay a step, either may be on the path.
    """
    at, length = last_of_longest(tables, rows), 0
    while True:
        at = step_start(tables, rows, at)
        path[length] = at
        length += 1
        one = rows.code[at] * tables.microbatches + rows.microbatch[at]
        start, source = rows.end[at] - rows.time[one], -1
        in_row = at > tables.ranks[tables.codes[rows.code[at]].rank].first and rows.end[at - 1] + tables.ahead[one] == start
        for k in range(at, step_stop(tables, rows, at)):
            need = tables.codes[rows.code[k]].maker
            if need >= 0:
                place = rows.where[need * tables.microbatches + rows.microbatch[k]]
                if rows.end[place] + tables.codes[rows.code[k]].lag == start:
                    source = place
        if source >= 0 and not (in_row and np.random.random() < 0.5):
            at = source
        elif in_row:
            at -= 1
        else:
            return length


@inlined
def step_start(tables: Tables, rows: Rows, at: int) -> int:
    """Returns the first position of the step of a pass."""
    while tables.steps and at > 0 and rows.glued[at - 1]:
        at -= 1
    return at


@compiled
def shift_step(tables: Tables, rows: Rows, rank: int, start: int, target: int, changed: Ints) -> int:
    """Moves the step that begins at `start` towards `target`, up to a step that it must not cross. Returns its new start."""
    first, last = tables.ranks[rank].first, tables.ranks[rank].stop
    target = max(first, min(target, last - 1))
    stop = step_stop(tables, rows, start)
    low, high = start, stop
    is_later = target > start
    while start < target and stop < last:
        end = step_stop(tables, rows, stop)
        if keeps_order(tables, rows, start, stop, end):
            break
        exchange(tables, rows, start, stop, end)
        start, stop = start + end - stop, end
    while start > target and not is_later:
        begin = step_start(tables, rows, start - 1)
        if keeps_order(tables, rows, begin, start, stop):
            break
        exchange(tables, rows, begin, start, stop)
        start, stop = begin, begin + stop - start
    if start != low:
        note(changed, min(low, start), max(high, stop))
    return start


@inlined
def note(changed: Ints, low: int, high: int) -> None:
    """Adds positions from `low` up to `high` to the changed range."""
    changed[0] = min(changed[0], low)
    changed[1] = max(changed[1], high)


@inlined
def keeps_order(tables: Tables, rows: Rows, start: int, middle: int, stop: int) -> bool:
    """Whether some pass of a step must precede some pass of the next step."""
    for one in range(start, middle):
        for other in range(middle, stop):
            if must_follow(tables, rows, one, other):
                return True
    return False


@inlined
def must_follow(tables: Tables, rows: Rows, before: int, following: int) -> bool:
    """Whether two passes of a row cannot be exchanged. With steps, W's of a stage can be: a BW may overtake an older W."""
    first, second = rows.code[before], rows.code[following]
    if first == second:
        return bool(tables.codes[first].successor >= 0) if tables.steps else True
    needs = tables.codes[second].predecessor == first or tables.codes[second].maker == first or tables.codes[first].successor == second
    if not needs or rows.microbatch[before] != rows.microbatch[following]:
        return False
    at = rows.microbatch[before]
    return not (tables.absent[first * tables.microbatches + at] or tables.absent[second * tables.microbatches + at])


@inlined
def exchange(tables: Tables, rows: Rows, start: int, middle: int, stop: int) -> None:
    """Exchanges two adjacent steps."""
    for at in range(middle, stop):
        for k in range(at, start + at - middle, -1):
            swap(tables, rows, k - 1, k)


@inlined
def swap(tables: Tables, rows: Rows, one: int, other: int) -> None:
    """Exchanges two passes."""
    code, microbatch, where = rows.code, rows.microbatch, rows.where
    code[one], code[other] = code[other], code[one]
    microbatch[one], microbatch[other] = microbatch[other], microbatch[one]
    if tables.steps:
        rows.glued[one], rows.glued[other] = rows.glued[other], rows.glued[one]
    where[code[one] * tables.microbatches + microbatch[one]] = one
    where[code[other] * tables.microbatches + microbatch[other]] = other


@inlined
def change_step(tables: Tables, rows: Rows, changed: Ints) -> int:
    """Changes which passes share a step, for a random microbatch on a random stage. Returns its rank."""
    stage, j = np.random.randint(len(tables.forwards)), np.random.randint(tables.microbatches)
    rank = tables.codes[stage].rank
    if tables.steps.pairs and (not tables.steps.joins[stage] or np.random.random() < OF_PAIRS):
        change_pair(tables, rows, rank, rows.where[stage * tables.microbatches + j], changed)
    else:
        change_backward(tables, rows, rank, stage, j, changed)
    return int(rank)


@compiled
def change_backward(tables: Tables, rows: Rows, rank: int, stage: int, j: int, changed: Ints) -> None:
    """Splits a BW, usually with a later W, or joins B and W at the position of B or sometimes of W."""
    backward = tables.codes[stage].successor
    at = rows.where[backward * tables.microbatches + j]
    if rows.glued[at]:
        rows.glued[at] = 0
        note(changed, at, at + 2)
        if np.random.random() < 0.7:
            shift_step(tables, rows, rank, at + 1, at + 2 + np.random.randint(MAX_SHIFT), changed)
        return
    weight = rows.where[tables.codes[backward].successor * tables.microbatches + j]
    if np.random.random() < 0.3:
        start = step_start(tables, rows, at)
        shift_step(tables, rows, rank, start, start + weight - step_stop(tables, rows, at), changed)
        at = rows.where[backward * tables.microbatches + j]
    for k in range(weight, at + 1, -1):
        swap(tables, rows, k - 1, k)
    rows.glued[at] = 1
    note(changed, at, weight + 1)


@compiled
def change_pair(tables: Tables, rows: Rows, rank: int, at: int, changed: Ints) -> None:
    """Splits the pair of the F at a position, if it has one. Then pairs it with a B or BW nearby that has no F, or leaves it alone."""
    skipped = np.random.randint(3)
    forward = np.random.random() < 0.5
    if rows.glued[at]:
        rows.glued[at] = 0
        note(changed, at, step_stop(tables, rows, at + 1))
        kind = np.random.random()
        if kind < ALONE:
            if kind < ALONE / 2:
                shift_step(tables, rows, rank, at, at + np.random.randint(-MAX_SHIFT, MAX_SHIFT + 1), changed)
            return
        skipped += forward  # not the B next to it
    other = nearby_backward(tables, rows, rank, at, skipped, forward)
    if other < 0:
        return
    if forward and np.random.random() < 0.5:
        shift_step(tables, rows, rank, other, at + 1, changed)
    else:
        at = shift_step(tables, rows, rank, at, other - 1 if forward else other, changed)
    follower = at + 1
    if follower >= tables.ranks[rank].stop or rows.microbatch[follower] == rows.microbatch[at]:
        return
    if is_backward(tables, rows, follower):
        rows.glued[at] = 1
        note(changed, at, at + 1)


@inlined
def is_backward(tables: Tables, rows: Rows, at: int) -> bool:
    """Whether the pass at a position is a B."""
    code = tables.codes[rows.code[at]]
    return bool(code.predecessor >= 0 and code.successor >= 0)


@inlined
def nearby_backward(tables: Tables, rows: Rows, rank: int, at: int, skipped: int, forward: bool) -> int:
    """Returns the start of a step that begins with B, after or before a position, past `skipped` others; -1 if there is none nearby."""
    first, last, count = tables.ranks[rank].first, tables.ranks[rank].stop, 0
    while count < MAX_SHIFT:
        at = step_stop(tables, rows, at) if forward else step_start(tables, rows, at - 1)
        if at < first or at >= last:
            return -1
        if is_backward(tables, rows, at):
            if skipped == 0:
                return at
            skipped -= 1
        count += 1
    return -1


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
