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
from zerobubble.planning.kernels.anneal import anneal, move_scratch, seed_random
from zerobubble.planning.kernels.play import initial_play_state, replay, rows_of
from zerobubble.planning.kernels.portfolio import SMALL, TEMPERATURES
from zerobubble.planning.kernels.priorities import mean_pass
from zerobubble.planning.kernels.recompute_moves import RECOMPUTE, set_recomputed
from zerobubble.planning.kernels.search_state import BudgetMeter
from zerobubble.planning.kernels.tables import CODE, PLANNED, Choice, Ints, Tables, tables_of
from zerobubble.planning.problem.problem import Problem
from zerobubble.planning.transforms import fused_for_memory

KINDS = (*PLANNED, Kind.R)
"""The kinds of codes here: `k * stages + s` is the pass of `KINDS[k]` on stage s."""

assert KINDS.index(Kind.R) == RECOMPUTE

FIRST_MOVES = 20_000
"""Moves of the first run, or twelve per pass if that is more. Each later run has twice as many."""

HOT_TEMPERATURES = (1.0, 0.5, 2.0)
"""Temperatures of runs on small problems, in mean pass times. Changes of recomputation need higher temperatures than moves."""

LONGEST_RUN = 0.4
"""Fraction of the budget after which a run ends."""

CHUNK_PASSES = 2_000_000
"""Passes of moved schedules between two checks of the clock: some hundredths of a second."""


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
    tables = _tables_with_choice(problem, levels, schedule)
    best = Best(_order_of(schedule), tables.absent.copy(), tables.choice.level.copy())
    share, mean, goal = 1 / len(tables.ranks), mean_pass(tables), 1 << 62
    moves = max(FIRST_MOVES, 12 * tables.size)
    chunk = max(1, CHUNK_PASSES // tables.size)
    for hot in cycle(HOT_TEMPERATURES if tables.size <= SMALL else TEMPERATURES):
        _take(tables, best)
        rows = rows_of(tables, best.order)
        longest, cost = replay(tables, rows, initial_play_state(tables), share, np.inf)
        if longest < 0:
            return schedule, chosen
        scratch = move_scratch(tables, rows)
        goal = min(goal, int(longest))
        over, begun = 0.0, budget.spent
        while over < 1 and goal > bound and budget.spent < 1:
            counted = (budget.spent_after(chunk) - begun) / LONGEST_RUN
            next_over = min(1.0, max(over + chunk / moves, counted))
            seed_random(seed + budget.used)
            warm, cool = (mean * hot * 0.1**part for part in (over, next_over))
            goal, cost, used = anneal(tables, rows, scratch, best, goal, bound, cost, share, warm, cool, chunk)
            budget.used += used
            over = max(next_over, (budget.spent - begun) / LONGEST_RUN)
        if goal <= bound or budget.spent >= 1:
            break
        moves *= 2
    _take(tables, best)
    taken = _chosen(problem, tables, levels)
    return _schedule_of(schedule.name, problem.with_levels(taken), tables, best.order), taken


def _plain(problem: Problem) -> Problem:
    """Returns the problem without levels. Layers and workload are dropped, because they give costs with more columns."""
    return replace(problem, costs=replace(problem.costs, further=()), recomputation=None, workload=None, cut=None)


def _tables_with_choice(problem: Problem, levels: Sequence[Level], schedule: Schedule) -> Tables:
    """Returns the tables of `problem` with those R's of `schedule` as passes of their own, and with the choice of levels."""
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
    costs = [problem.costs.with_recompute(level) for level in levels]
    now = problem.recomputation.chosen if problem.recomputation else ()
    choice = Choice(
        np.array([each.column("recompute") for each in costs], np.int64).ravel(),
        np.array([each.column("held_input") for each in costs], np.int64).ravel(),
        np.array(problem.costs.held_after_f, np.int64),
        np.array([levels.index(level) if level in levels else len(levels) - 1 for level in now], np.int64),
        problem.recomputation is not None and problem.recomputation.is_optional,
    )
    tables = plain._replace(codes=codes, ranks=ranks, absent=absent, choice=choice, **columns)
    for row in schedule.rows:
        for kind, stage, j in row:
            if kind is Kind.R:
                set_recomputed(tables, stage, j, True)
    return tables


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


def _chosen(problem: Problem, tables: Tables, levels: Sequence[Level]) -> tuple[Level, ...]:
    """Returns the level of each stage, `NONE` without recomputation."""
    stages, m = problem.placement.num_stages, tables.microbatches
    absent = tables.absent[-stages * m :].reshape(stages, m).tolist()
    return tuple(NONE if all(absent[stage]) else levels[tables.choice.level[stage]] for stage in range(stages))


def _take(tables: Tables, best: Best) -> None:
    """Writes the recomputation of `best` into the tables."""
    stages, m = len(best.level), tables.microbatches
    tables.choice.level[:] = best.level
    for stage in range(stages):
        for j in range(m):
            set_recomputed(tables, stage, j, not best.absent[(RECOMPUTE * stages + stage) * m + j])
