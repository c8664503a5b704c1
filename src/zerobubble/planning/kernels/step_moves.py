"""Annealing of rows with shared steps: moves steps along their rows, and joins passes into steps or splits them.

As in `anneal`, every move is played exactly, from the first time that it can affect. Moves are drawn from gaps, the critical path, or
anywhere. Other moves join a W with its B, pair an F with a B or BW of another microbatch, or split such steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import numpy as np

from zerobubble.ir import Schedule
from zerobubble.planning.kernels.anneal import seed_random
from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.search_state import BudgetMeter, counted_plays
from zerobubble.planning.kernels.short_search import FEW
from zerobubble.planning.kernels.step_rows import (
    BACKWARD,
    FORWARD,
    SMALL,
    WEIGHT,
    StepPlay,
    StepRows,
    StepTables,
    fits,
    maker_of,
    new_play,
    play_steps,
    schedule_of_steps,
    step_rows,
    step_stop,
    step_tables,
    time_of_row,
)
from zerobubble.planning.kernels.tables import Ints
from zerobubble.planning.problem.problem import Objective, Problem

CHANGED_STEPS = 0.3
"""Fraction of moves that change which passes share a step."""

INTO_GAP, ON_PATH = 0.4, 0.45
"""Fractions of the other moves that pull a step into idle time, and that move a step of the critical path."""

ALONE = 0.5
"""Fraction of split pairs whose F then stays alone; other F's join another pair at once."""

TEMPERATURES, HOT_TEMPERATURES = (0.05, 0.02, 0.2, 0.01), (0.3, 1.0)
"""Starting temperatures of runs in turn, in mean pass times; each falls to a tenth."""

RUN_SHARE = 0.1
"""Fraction of the budget for each run: a few long runs find shorter schedules than many short ones."""

FEW_TEMPERATURES = (0.2, 0.05)
"""Starting temperatures of the only runs, all from the best schedule, if the evaluations are few."""

CHUNK_PASSES, CHUNKS_OF_A_RUN = 1_000_000, 50
"""Passes of moved schedules between two checks of the clock, a hundredth of a second, and such checks in a run of counted evaluations."""


class StepScratch(NamedTuple):
    """Scratch space of moves: the rows before the move with their times, the position from which each rank is replayed, and a critical
    path.
    """

    before: StepRows
    resume: Ints
    path: Ints
    play: StepPlay


class Found(NamedTuple):
    """The best schedule of a search, and whether Ctrl-C ended it."""

    schedule: Schedule
    interrupted: bool


def anneal_in_steps(problem: Problem, schedules: Sequence[Schedule], bound: int, budget: BudgetMeter, seed: int) -> Found | None:
    """Returns the best schedule that annealing finds from `schedules`; None if none of them runs within the limits.

    Annealing restarts from one of them or the best at several temperatures, until the objective meets `bound` (ns) or the budget is spent.
    """
    tables = step_tables(problem)
    share, mean = 1 / len(tables.limit), max(1.0, float(tables.time.mean()))
    played = (_shorter_apart(tables, start) for each in schedules if (start := _played(tables, step_rows(tables, each))) is not None)
    starts = sorted(played, key=lambda start: start[0])
    if not starts:
        return None
    goal, best = starts[0][0], _copy(starts[0][1])
    size = len(best.code)
    is_few = budget.evaluations is not None and budget.evaluations < FEW
    temperatures = FEW_TEMPERATURES if is_few else HOT_TEMPERATURES + TEMPERATURES if size <= SMALL else TEMPERATURES
    run_share = 1 / len(FEW_TEMPERATURES) if is_few else RUN_SHARE
    counted = int(run_share * budget.left) // CHUNKS_OF_A_RUN
    interrupted = False
    seed_random(seed)
    try:
        for turn, hot in enumerate(cycle(temperatures)):
            if goal <= bound or budget.spent >= 1:
                break
            rows = _copy(best if is_few or turn % 2 or turn // 2 >= len(starts) else starts[turn // 2][1])
            scratch = StepScratch(_copy(rows), tables.first[:-1].copy(), np.zeros(size, np.int64), new_play(tables))
            _, cost = play_steps(tables, rows, new_play(tables), share, np.inf)
            begun = budget.spent
            while (over := (budget.spent - begun) / run_share) < 1 and goal > bound and budget.spent < 1:
                chunk = max(1, min(counted, CHUNK_PASSES // size, budget.left))
                warmth = mean * hot * 0.1**over
                arguments = (tables, rows, scratch, best)
                goal, cost, tried, passes = anneal_steps(*arguments, goal, bound, cost, share, warmth, warmth, chunk)
                budget.used += counted_plays(passes, size, tried) if is_few else tried
    except KeyboardInterrupt:
        interrupted = True
    return Found(schedule_of_steps("planned", problem, tables, best), interrupted)


def play_in_steps(problem: Problem, schedule: Schedule) -> tuple[int, int, bool]:
    """Returns the span and makespan of `schedule` in ns (-1 if it cannot run), and whether it fits the limits."""
    spans, makespans = (step_tables(replace(problem, objective=aim)) for aim in (Objective.PERIOD, Objective.MAKESPAN))
    rows = step_rows(spans, schedule)
    span, makespan = (int(play_steps(tables, rows, new_play(tables), 0.0, np.inf)[0]) for tables in (spans, makespans))
    return span, makespan, all(fits(spans, rows, rank) for rank in range(len(spans.limit)))


def _played(tables: StepTables, rows: StepRows) -> tuple[int, StepRows] | None:
    """Returns the objective of `rows` in ns, and these, played; None if they do not run within the limits."""
    if not all(fits(tables, rows, rank) for rank in range(len(tables.limit))):
        return None
    longest, _ = play_steps(tables, rows, new_play(tables), 0.0, np.inf)
    return (int(longest), rows) if longest >= 0 else None


def _shorter_apart(tables: StepTables, start: tuple[int, StepRows]) -> tuple[int, StepRows]:
    """Returns `start` with its BW split into B and W, so that gradients are sent earlier: all of them, or only those that gain nothing as
    BW. Takes the first variant that fits and is no longer.
    """
    is_backward, stage = start[1].code // tables.stages == BACKWARD, start[1].code % tables.stages
    for apart in (is_backward, is_backward & (tables.joins[stage] == 0)):
        rows = _copy(start[1])
        rows.glued[apart] = 0
        played = _played(tables, rows)
        if played is not None and played[0] <= start[0]:
            return played
    return start


def _copy(rows: StepRows) -> StepRows:
    return StepRows(*(column.copy() for column in rows))


# One function, as `anneal` is: what it keeps from move to move must stay in registers.
@compiled
def anneal_steps(
    tables: StepTables,
    rows: StepRows,
    scratch: StepScratch,
    best: StepRows,
    goal: int,
    target: int,
    cost: float,
    share: float,
    hot: float,
    cold: float,
    moves: int,
) -> tuple[int, float, int, int]:
    """Tries `moves` moves on `rows` while the temperature (ns) falls from `hot` to `cold`. `cost` is the current cost of `rows`.

    `goal` is the longest time of `best` in ns. Both are replaced by better ones, and reaching `target` ends the search. Returns the goal,
    the cost of `rows`, the number of moves tried, and the passes played again.
    """
    path_length, passes = 0, 0
    copy_all(scratch.before, rows)
    for tried in range(moves):
        temperature = hot * (cold / hot) ** (tried / moves)
        rank, path_length = change(tables, rows, scratch.path, path_length)
        low = first_difference(tables, rows, scratch.before, rank)
        if low < 0:
            continue
        longest = -1
        if fits(tables, rows, rank):
            cutoff = cost - temperature * np.log(np.random.random() + 1e-300)
            longest, new_cost = play_from(tables, rows, scratch, rank, low, share, cutoff)
            for r in range(len(tables.limit)):
                passes += scratch.play.head[r] - scratch.resume[r]
        else:
            put_back(tables, rows, scratch.before, rank)
        if longest < 0:
            continue
        path_length, cost = 0, new_cost
        if longest < goal:
            goal = longest
            copy_all(best, rows)
            if goal <= target:
                return goal, cost, tried + 1, passes
    return goal, cost, moves, passes


@inlined
def copy_all(into: StepRows, rows: StepRows) -> None:
    """Write `rows` into other ones."""
    for at in range(len(rows.code)):
        into.code[at] = rows.code[at]
        into.microbatch[at] = rows.microbatch[at]
        into.glued[at] = rows.glued[at]
        into.where[at] = rows.where[at]
        into.begin[at] = rows.begin[at]
        into.end[at] = rows.end[at]


@inlined
def first_difference(tables: StepTables, rows: StepRows, before: StepRows, rank: int) -> int:
    """Returns the first step of a rank that has changed, -1 if none has."""
    first = tables.first[rank]
    for at in range(first, tables.first[rank + 1]):
        same = rows.code[at] == before.code[at] and rows.microbatch[at] == before.microbatch[at]
        if not same or rows.glued[at] != before.glued[at]:
            while at > first and rows.glued[at - 1]:
                at -= 1
            return at
    return -1


@inlined
def put_back(tables: StepTables, rows: StepRows, before: StepRows, rank: int) -> None:
    """Restores the row of a rank."""
    for at in range(tables.first[rank], tables.first[rank + 1]):
        rows.code[at] = before.code[at]
        rows.microbatch[at] = before.microbatch[at]
        rows.glued[at] = before.glued[at]
        rows.where[rows.code[at] * tables.microbatches + rows.microbatch[at]] = at


@inlined
def play_from(
    tables: StepTables, rows: StepRows, scratch: StepScratch, rank: int, low: int, share: float, cutoff: float
) -> tuple[int, float]:
    """Replays the rows from position `low` of `rank`, and on other ranks from the time at which the step before it ends.

    Afterwards `rows` and `scratch.before` agree: on the new rows and times, or on the old ones if the play is rejected.
    """
    before, play, resume = scratch.before, scratch.play, scratch.resume
    free = rows.end[low - 1] if low > tables.first[rank] else 0
    for r in range(len(tables.limit)):
        resume[r] = low if r == rank else first_from(tables, rows, r, free)
        play.head[r] = resume[r]
    longest, cost = play_steps(tables, rows, play, share, cutoff)
    if longest < 0:
        put_back(tables, rows, before, rank)
    for r in range(len(tables.limit)):
        for at in range(resume[r], tables.first[r + 1]):
            if longest < 0:
                rows.begin[at] = before.begin[at]
                rows.end[at] = before.end[at]
            else:
                before.begin[at] = rows.begin[at]
                before.end[at] = rows.end[at]
    if longest >= 0:
        for at in range(low, tables.first[rank + 1]):
            before.code[at] = rows.code[at]
            before.microbatch[at] = rows.microbatch[at]
            before.glued[at] = rows.glued[at]
            before.where[rows.code[at] * tables.microbatches + rows.microbatch[at]] = at
    return longest, cost


@inlined
def first_from(tables: StepTables, rows: StepRows, rank: int, time: int) -> int:
    """Returns the first position of `rank` whose step begins at `time` or later."""
    low, high = tables.first[rank], tables.first[rank + 1]
    while low < high:
        middle = (low + high) // 2
        if rows.begin[middle] < time:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def change(tables: StepTables, rows: StepRows, path: Ints, path_length: int) -> tuple[int, int]:
    """Changes the row of a rank at random. Returns the rank, and the length of the critical path in `path`, which is computed if needed and
    0.
    """
    kind = np.random.random()
    if kind < CHANGED_STEPS and (tables.fuses or tables.pairs):
        stage, j = np.random.randint(tables.stages), np.random.randint(tables.microbatches)
        if tables.pairs and (not tables.joins[stage] or np.random.random() < 0.6):
            change_pair(tables, rows, stage, j)
        else:
            change_backward(tables, rows, stage, j)
        return tables.rank[stage], path_length
    kind = np.random.random()
    shift = np.random.randint(-tables.reach, tables.reach + 1)
    if kind < INTO_GAP:
        start, shift = draw_into_gap(tables, rows)
    elif kind < INTO_GAP + ON_PATH:
        if path_length == 0:
            path_length = critical_path(tables, rows, path)
        start = path[np.random.randint(path_length)]
    else:
        start = np.random.randint(len(rows.code))
    rank = tables.rank[rows.code[start] % tables.stages]
    shift_step(tables, rows, rank, step_start(tables, rows, rank, start), shift)
    return rank, path_length


@inlined
def step_start(tables: StepTables, rows: StepRows, rank: int, at: int) -> int:
    """Returns the first position of the step of a pass."""
    while at > tables.first[rank] and rows.glued[at - 1]:
        at -= 1
    return at


@compiled
def shift_step(tables: StepTables, rows: StepRows, rank: int, start: int, count: int) -> int:
    """Moves the step that begins at `start` past up to `count` others, to the left if negative. Returns its new start."""
    stop = step_stop(rows, start)
    while count > 0 and stop < tables.first[rank + 1]:
        end = step_stop(rows, stop)
        if keeps_order(tables, rows, start, stop, end):
            return start
        exchange(tables, rows, start, stop, end)
        start, stop = start + end - stop, end
        count -= 1
    while count < 0 and start > tables.first[rank]:
        begin = step_start(tables, rows, rank, start - 1)
        if keeps_order(tables, rows, begin, start, stop):
            return start
        exchange(tables, rows, begin, start, stop)
        start, stop = begin, begin + stop - start
        count += 1
    return start


@inlined
def keeps_order(tables: StepTables, rows: StepRows, start: int, middle: int, stop: int) -> bool:
    """Whether some pass of a step must precede some pass of the next step."""
    for one in range(start, middle):
        for other in range(middle, stop):
            if must_follow(tables, rows, one, other):
                return True
    return False


@inlined
def must_follow(tables: StepTables, rows: StepRows, before: int, following: int) -> bool:
    """Whether two passes of a row cannot be exchanged. W's of a stage can be: a BW may overtake an older W."""
    one, other, stages = rows.code[before], rows.code[following], tables.stages
    if one == other:
        return one // stages != WEIGHT
    if rows.microbatch[before] != rows.microbatch[following]:
        return False
    kind, kind_of_other = one // stages, other // stages
    next_stage = kind == FORWARD and kind_of_other == FORWARD and other == one + 1
    return other == one + stages or next_stage or (kind == BACKWARD and kind_of_other == BACKWARD and other == one - 1)


@inlined
def exchange(tables: StepTables, rows: StepRows, start: int, middle: int, stop: int) -> None:
    """Exchanges two steps."""
    for at in range(middle, stop):
        for k in range(at, start + at - middle, -1):
            swap(tables, rows, k - 1, k)


@inlined
def swap(tables: StepTables, rows: StepRows, one: int, other: int) -> None:
    """Exchanges two passes."""
    code, microbatch, glued, m = rows.code, rows.microbatch, rows.glued, tables.microbatches
    code[one], code[other] = code[other], code[one]
    microbatch[one], microbatch[other] = microbatch[other], microbatch[one]
    glued[one], glued[other] = glued[other], glued[one]
    rows.where[code[one] * m + microbatch[one]] = one
    rows.where[code[other] * m + microbatch[other]] = other


@compiled
def change_backward(tables: StepTables, rows: StepRows, stage: int, j: int) -> None:
    """Splits a BW, usually with a later W, or joins B and W at the position of B or sometimes of W."""
    m, rank = tables.microbatches, tables.rank[stage]
    at = rows.where[(BACKWARD * tables.stages + stage) * m + j]
    if rows.glued[at]:
        rows.glued[at] = 0
        if np.random.random() < 0.7:
            shift_step(tables, rows, rank, at + 1, 1 + np.random.randint(tables.reach))
        return
    weight = rows.where[(WEIGHT * tables.stages + stage) * m + j]
    if np.random.random() < 0.3:
        moved = step_start(tables, rows, rank, at)
        while step_stop(rows, moved) < weight:
            further = shift_step(tables, rows, rank, moved, 1)
            if further == moved:
                break
            moved = further
        at = rows.where[(BACKWARD * tables.stages + stage) * m + j]
    for k in range(weight, at + 1, -1):
        swap(tables, rows, k - 1, k)
    rows.glued[at] = 1


@compiled
def change_pair(tables: StepTables, rows: StepRows, stage: int, j: int) -> None:
    """Splits the pair of an F, if it has one. Then pairs it with an adjacent B or BW that has no F, or leaves it alone."""
    rank = tables.rank[stage]
    at = rows.where[(FORWARD * tables.stages + stage) * tables.microbatches + j]
    skipped = np.random.randint(3)
    forward = np.random.random() < 0.5
    if rows.glued[at]:
        rows.glued[at] = 0
        kind = np.random.random()
        if kind < ALONE:
            if kind < ALONE / 2:
                shift_step(tables, rows, rank, at, np.random.randint(-tables.reach, tables.reach + 1))
            return
        skipped += forward  # not the B next to it
    if forward:
        other, count = at + 1, 0
        while other < tables.first[rank + 1] and count < tables.reach:
            if rows.code[other] // tables.stages == BACKWARD:
                if skipped == 0:
                    break
                skipped -= 1
            other = step_stop(rows, other)
            count += 1
        if other >= tables.first[rank + 1] or count == tables.reach:
            return
        if np.random.random() < 0.5:
            at = shift_step(tables, rows, rank, at, count)
        else:
            shift_step(tables, rows, rank, other, -count)
    else:
        other, count = at, 0
        while other > tables.first[rank] and count < tables.reach:
            other = step_start(tables, rows, rank, other - 1)
            count += 1
            if rows.code[other] // tables.stages == BACKWARD:
                if skipped == 0:
                    break
                skipped -= 1
        at = shift_step(tables, rows, rank, at, -count)
    follower = at + 1
    if follower >= tables.first[rank + 1] or rows.microbatch[follower] == rows.microbatch[at]:
        return
    if rows.code[follower] // tables.stages == BACKWARD:
        rows.glued[at] = 1


@inlined
def draw_into_gap(tables: StepTables, rows: StepRows) -> tuple[int, int]:
    """Returns a step to pull into the first gap after a random position, and the number of steps to move it."""
    at = np.random.randint(len(rows.code))
    rank = tables.rank[rows.code[at] % tables.stages]
    last = tables.first[rank + 1]
    at = step_stop(rows, at)
    while at < last and rows.begin[at] == rows.end[at - 1]:
        at = step_stop(rows, at)
    count, wish = 0, np.random.randint(1, tables.reach + 1)
    start = min(at, last - 1)
    while at < last and count < wish:
        start = at
        at = step_stop(rows, at)
        count += 1
    return start, 1 - count


@inlined
def critical_path(tables: StepTables, rows: StepRows, path: Ints) -> int:
    """Fills `path` with the starts of the steps on the critical path of the longest rank, last first. Returns their number."""
    worst, longest = 0, -1
    for r in range(len(tables.limit)):
        time = time_of_row(tables, rows, r)
        if time > longest:
            worst, longest = r, time
    rank, length = worst, 0
    at = step_start(tables, rows, rank, tables.first[rank + 1] - 1)
    while True:
        path[length] = at
        length += 1
        in_row = at > tables.first[rank] and rows.end[at - 1] == rows.begin[at]
        source = -1
        for k in range(at, step_stop(rows, at)):
            need, lag = maker_of(tables, rows, k)
            if need >= 0 and rows.end[need] + lag == rows.begin[at]:
                source = need
        if source >= 0 and not (in_row and np.random.random() < 0.5):
            rank = tables.rank[rows.code[source] % tables.stages]
            at = step_start(tables, rows, rank, source)
        elif in_row:
            at = step_start(tables, rows, rank, at - 1)
        else:
            return length
