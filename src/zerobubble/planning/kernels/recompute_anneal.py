"""Annealing with recomputation: its moves also choose which forwards to recompute, and the level of each stage.

R is a pass of its own, anywhere between its F and its B. An R that is left out remains in its row as a pass without time and bytes, see
`Tables.absent`, so that rows keep their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from zerobubble.costs import NONE, Level
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.kernels.anneal import MoveScratch, anneal, copy_range, copy_times, move_scratch, seed_random
from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.moves import swap
from zerobubble.planning.kernels.play import Rows, copy_into, replay, rows_of
from zerobubble.planning.kernels.portfolio import SMALL, TEMPERATURES
from zerobubble.planning.kernels.priorities import mean_pass
from zerobubble.planning.kernels.search_state import BudgetMeter
from zerobubble.planning.kernels.tables import CODE, PLANNED, Ints, Tables, tables_of
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.transforms import fused_for_memory

KINDS = (*PLANNED, Kind.R)
"""The kinds of codes here: `k * stages + s` is the pass of `KINDS[k]` on stage s."""

RECOMPUTE = KINDS.index(Kind.R)

CHANGES, MOVES = 2, 40
"""Changes of recomputation and moves of passes that alternate."""

OTHER_LEVEL, EXCHANGE = 0.15, 0.4
"""Fraction of changes that give a stage another level, and of those that also exchange the recomputation with another forward of the rank.
"""

TRIES = 8
"""The number of random draws to find a forward for an exchange."""

FIRST_MOVES = 20_000
"""Moves of the first run, or twelve per pass if that is more. Each later run has twice as many."""

HOT_TEMPERATURES = (1.0, 0.5, 2.0)
"""Temperatures of runs on small problems, in mean pass times. Changes of recomputation need higher temperatures than moves."""

LONGEST_RUN = 0.4
"""Fraction of the budget after which a run ends."""

CHUNK_PASSES = 2_000_000
"""Passes of moved schedules between two checks of the clock: some hundredths of a second."""


class Choice(NamedTuple):
    """The allowed levels of recomputation, and the level of each stage. `Tables.absent` has the R's that are left out."""

    time: Ints
    """The ns of R of stage s at level l, at `l * stages + s`."""
    kept: Ints
    """The bytes that a recomputed forward keeps, at the same indices."""
    saved: Ints
    """The bytes that a forward of each stage saves."""
    level: Ints
    """The level of each stage."""
    is_optional: bool
    """Whether forwards may skip recomputation."""


class Best(NamedTuple):
    """The best rows so far, with their recomputation."""

    order: Ints
    absent: Ints
    level: Ints


def anneal_recompute(
    problem: Problem, schedule: Schedule, bound: int, budget: BudgetMeter, seed: int
) -> tuple[Schedule, tuple[Level, ...]]:
    """Returns the best order and recomputation found from `schedule`, which runs within the limits, and the levels of its stages.

    Annealing restarts from the best at several temperatures, until the objective meets `bound` (ns) or the budget is spent. If a schedule
    fits only because a BW precedes the W of an earlier microbatch of its stage, it is returned unchanged.
    """
    assert problem.recomputation is not None
    offered, chosen = problem.recomputation.offered, problem.recomputation.chosen
    levels = [level for level in offered if level != NONE]
    tables, choice = _tables_and_choice(problem, levels, schedule)
    best = Best(_order_of(schedule), tables.absent.copy(), choice.level.copy())
    share, mean, goal = 1 / len(tables.ranks), mean_pass(tables), 1 << 62
    moves = max(FIRST_MOVES, 12 * tables.size)
    chunk = max(1, CHUNK_PASSES // (tables.size * (CHANGES + MOVES)))
    for hot in cycle(HOT_TEMPERATURES if tables.size <= SMALL else TEMPERATURES):
        _take(tables, choice, best)
        rows = rows_of(tables, best.order)
        scratch = move_scratch(tables, rows)
        longest, cost = replay(tables, rows, scratch.play, share, np.inf)
        if longest < 0:
            return schedule, chosen
        goal = min(goal, int(longest))
        over, begun = 0.0, budget.spent
        while over < 1 and goal > bound and budget.spent < 1:
            counted = (budget.spent_after(chunk * (CHANGES + MOVES)) - begun) / LONGEST_RUN
            next_over = min(1.0, max(over + chunk * MOVES / moves, counted))
            seed_random(seed + budget.used)
            warm, cool = (mean * hot * 0.1**part for part in (over, next_over))
            goal, cost, used = change_and_move(tables, rows, scratch, choice, best, goal, bound, cost, share, warm, cool, chunk)
            budget.used += used
            over = max(next_over, (budget.spent - begun) / LONGEST_RUN)
        if goal <= bound or budget.spent >= 1:
            break
        moves *= 2
    _take(tables, choice, best)
    taken = _chosen(problem, tables, choice, levels)
    return _schedule_of(schedule.name, problem.with_levels(taken), tables, best.order), taken


def _plain(problem: Problem) -> Problem:
    """Returns the problem without levels. Layers and workload are dropped, because they give costs with more columns."""
    return replace(problem, costs=replace(problem.costs, further=()), recomputation=None, workload=None, cut=None)


def _tables_and_choice(problem: Problem, levels: Sequence[Level], schedule: Schedule) -> tuple[Tables, Choice]:
    """Returns the tables of `problem` with those R's of `schedule` as passes of their own, and the choice of levels."""
    stages, m = problem.placement.num_stages, problem.num_microbatches
    plain = tables_of(_plain(problem), joins=True)
    codes = np.concatenate([plain.codes, np.full(stages, -1, CODE)])
    ranks = plain.ranks.copy()
    for stage, home in enumerate(problem.placement.routes[0]):
        forward, backward, recompute = (KINDS.index(kind) * stages + stage for kind in (Kind.F, Kind.B, Kind.R))
        codes[recompute]["rank"], codes[recompute]["predecessor"], codes[recompute]["successor"] = home, forward, backward
        for name in ("time", "held", "ahead", "over", "lag", "grows"):
            codes[recompute][name] = 0
    for rank in range(len(ranks)):
        ranks[rank]["first"] += m * sum(home < rank for home in problem.placement.routes[0])
        ranks[rank]["stop"] += m * sum(home <= rank for home in problem.placement.routes[0])
    nothing = np.zeros(stages * m, np.int64)
    columns: dict[str, Any] = {name: np.concatenate([getattr(plain, name), nothing]) for name in ("time", "held", "ahead", "over")}
    absent = np.concatenate([np.zeros(plain.size, np.int64), nothing + 1])
    tables = plain._replace(codes=codes, ranks=ranks, absent=absent, **columns)
    costs = [problem.costs.with_recompute(level) for level in levels]
    now = problem.recomputation.chosen if problem.recomputation else ()
    choice = Choice(
        np.array([each.column("recompute") for each in costs], np.int64).ravel(),
        np.array([each.column("held_input") for each in costs], np.int64).ravel(),
        np.array(problem.costs.held_after_f, np.int64),
        np.array([levels.index(level) if level in levels else len(levels) - 1 for level in now], np.int64),
        problem.recomputation is not None and problem.recomputation.is_optional,
    )
    for row in schedule.rows:
        for kind, stage, j in row:
            if kind is Kind.R:
                set_recomputed(tables, choice, stage, j, True)
    return tables, choice


def _order_of(schedule: Schedule) -> Ints:
    """Returns the rows of `schedule` as codes, with an R before every B."""
    stages, order = schedule.num_stages, []
    first = {kind: k * stages for k, kind in enumerate(KINDS)}
    for row in schedule.rows:
        order += _with_every_recompute(row, first)
    return np.array(order, np.int64)


def _with_every_recompute(row: Sequence[Op], first: dict[Kind, int]) -> list[int]:
    """Returns the codes of a row, with the R's that are left out before their B, or before an earlier R of a later microbatch."""
    written: dict[int, int] = {}
    codes = []
    for kind, stage, j in row:
        if kind in (Kind.R, Kind.B, Kind.BW):
            missing = j + 1 - written.get(stage, 0)
            codes += [first[Kind.R] + stage] * missing
            written[stage] = written.get(stage, 0) + max(0, missing)
        if kind is Kind.BW:
            codes += [first[Kind.B] + stage, first[Kind.W] + stage]
        elif kind is not Kind.R:
            codes.append(first[kind] + stage)
    return codes


def _schedule_of(name: str, problem: Problem, tables: Tables, order: Ints) -> Schedule:
    """Returns the schedule of the rows `order`, without the R's that are left out."""
    stages, m, number = problem.placement.num_stages, tables.microbatches, [0] * len(tables.codes)
    rows, codes = [], order.tolist()
    for start, stop in tables.ranks[["first", "stop"]].tolist():
        row = []
        for code in codes[start:stop]:
            if not tables.absent[code * m + number[code]]:
                row.append(Op(KINDS[code // stages], code % stages, number[code]))
            number[code] += 1
        rows.append(tuple(row))
    schedule = Schedule(name, problem.placement, m, tuple(rows))
    return fused_for_memory(schedule, problem) if tables.joins else schedule


def _chosen(problem: Problem, tables: Tables, choice: Choice, levels: Sequence[Level]) -> tuple[Level, ...]:
    """Returns the level of each stage, `NONE` without recomputation."""
    stages, m = problem.placement.num_stages, tables.microbatches
    absent = tables.absent[-stages * m :].reshape(stages, m).tolist()
    return tuple(NONE if all(absent[stage]) else levels[choice.level[stage]] for stage in range(stages))


def _take(tables: Tables, choice: Choice, best: Best) -> None:
    """Writes the recomputation of `best` into the tables and the choice."""
    stages, m = len(choice.level), tables.microbatches
    choice.level[:] = best.level
    for stage in range(stages):
        for j in range(m):
            set_recomputed(tables, choice, stage, j, not best.absent[(RECOMPUTE * stages + stage) * m + j])


@compiled
def change_and_move(
    tables: Tables,
    rows: Rows,
    scratch: MoveScratch,
    choice: Choice,
    best: Best,
    goal: int,
    target: int,
    cost: float,
    share: float,
    hot: float,
    cold: float,
    rounds: int,
) -> tuple[int, float, int]:
    """Alternates changes of recomputation and moves of passes, `rounds` times, while the temperature (ns) falls to `cold`.

    `cost` is that of `rows`, which are within the limits. `goal` is the longest time of `best`. Both are replaced by better ones, and
    reaching `target` ends the search. Returns the goal, the cost of `rows`, and the number of changes and moves tried.
    """
    used = 0
    for turn in range(rounds):
        temperature = hot * (cold / hot) ** (turn / rounds)
        for _ in range(CHANGES):
            longest, new_cost = try_change(tables, rows, scratch, choice, share, cost - temperature * np.log(np.random.random() + 1e-300))
            used += 1
            if longest >= 0:
                cost = new_cost
                if longest < goal:
                    goal = longest
                    keep(tables, rows, choice, best)
        replay(tables, rows, scratch.play, share, np.inf)
        copy_range(tables, scratch.before, rows, 0, len(rows.code))
        copy_times(scratch.before.end, scratch.before.idle, rows.end, rows.idle, 0, len(rows.code))
        before = goal
        goal, cost, tried = anneal(tables, rows, scratch, best.order, goal, target, cost, share, temperature, temperature, MOVES)
        used += tried
        if goal < before:
            copy_into(best.absent, tables.absent)
            copy_into(best.level, choice.level)
        if goal <= target:
            break
    return goal, cost, used


@inlined
def keep(tables: Tables, rows: Rows, choice: Choice, best: Best) -> None:
    """Writes the rows and their recomputation into `best`."""
    copy_into(best.order, rows.code)
    copy_into(best.absent, tables.absent)
    copy_into(best.level, choice.level)


@compiled
def try_change(tables: Tables, rows: Rows, scratch: MoveScratch, choice: Choice, share: float, cutoff: float) -> tuple[int, float]:
    """Makes one random change of recomputation and returns the result of `play_rows`. If that rejects it, the change is undone.

    The times in `rows` must be replayed afterwards.
    """
    stages, m = len(choice.level), tables.microbatches
    levels = len(choice.time) // stages
    stage, j = np.random.randint(stages), np.random.randint(m)
    other_stage, other = -1, -1
    level = choice.level[stage]
    what = np.random.random()
    if levels > 1 and (what < OTHER_LEVEL or not choice.is_optional):
        set_level(tables, choice, stage, (level + np.random.randint(1, levels)) % levels)
    elif choice.is_optional:
        if what > 1 - EXCHANGE:
            other_stage, other = draw_exchange(tables, stages, stage, j)
        flip(tables, rows, choice, stage, j)
        if other >= 0:
            flip(tables, rows, choice, other_stage, other)
    else:
        return -1, np.inf
    longest, cost = replay(tables, rows, scratch.play, share, cutoff)
    if longest < 0:
        if choice.level[stage] != level:
            set_level(tables, choice, stage, level)
        else:
            flip(tables, rows, choice, stage, j)
            if other >= 0:
                flip(tables, rows, choice, other_stage, other)
    return longest, cost


@inlined
def draw_exchange(tables: Tables, stages: int, stage: int, j: int) -> tuple[int, int]:
    """Returns a stage of the same rank and a microbatch whose forward is recomputed if that of `stage` and `j` is not, or vice versa.

    Returns (-1, -1) if none is found.
    """
    m = tables.microbatches
    for _ in range(TRIES):
        other_stage, other = np.random.randint(stages), np.random.randint(m)
        alike = tables.codes[other_stage].rank == tables.codes[stage].rank
        if alike and is_recomputed(tables, stages, other_stage, other) != is_recomputed(tables, stages, stage, j):
            return other_stage, other
    return -1, -1


@inlined
def is_recomputed(tables: Tables, stages: int, stage: int, j: int) -> bool:
    """Returns whether a forward is recomputed."""
    return tables.absent[(RECOMPUTE * stages + stage) * tables.microbatches + j] == 0


@compiled
def flip(tables: Tables, rows: Rows, choice: Choice, stage: int, j: int) -> None:
    """Toggles the recomputation of a forward."""
    put_in_place(tables, rows, len(choice.level), stage)
    set_recomputed(tables, choice, stage, j, not is_recomputed(tables, len(choice.level), stage, j))


@compiled
def set_level(tables: Tables, choice: Choice, stage: int, level: int) -> None:
    """Changes the level of a stage."""
    choice.level[stage] = level
    for j in range(tables.microbatches):
        set_recomputed(tables, choice, stage, j, is_recomputed(tables, len(choice.level), stage, j))


@compiled
def set_recomputed(tables: Tables, choice: Choice, stage: int, j: int, recomputed: bool) -> None:
    """Sets whether a forward is recomputed, at the level of its stage."""
    stages, m = len(choice.level), tables.microbatches
    forward, own = stage * m + j, (RECOMPUTE * stages + stage) * m + j
    at, rank = choice.level[stage] * stages + stage, tables.codes[stage].rank
    time, kept = (choice.time[at], choice.kept[at]) if recomputed else (0, choice.saved[stage])
    tables.ranks[rank].work += time - tables.time[own]
    tables.time[own] = time
    tables.held[forward] = kept
    tables.held[own] = choice.saved[stage] - kept
    tables.absent[own] = 0 if recomputed else 1


@compiled
def put_in_place(tables: Tables, rows: Rows, stages: int, stage: int) -> None:
    """Moves the R's of a stage that are left out to where they might run: right before their B, or the next R if that is earlier."""
    m = tables.microbatches
    backward, recompute = (stages + stage) * m, (RECOMPUTE * stages + stage) * m
    before = len(rows.code)
    for j in range(m - 1, -1, -1):
        at = rows.where[recompute + j]
        if tables.absent[recompute + j]:
            before = min(before, rows.where[backward + j])
            while at + 1 < before:
                swap(tables, rows, at, at + 1)
                at += 1
            while at > before:
                swap(tables, rows, at, at - 1)
                at -= 1
        before = at
