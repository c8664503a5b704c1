"""Search for schedules whose passes may share steps: fused backward passes and overlapped pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import numpy as np

from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.kernels.anneal import anneal, copy_of, move_scratch, seed_random
from zerobubble.planning.kernels.play import Rows, all_ranks_fit, initial_play_state, longest_time, replay, rows_of
from zerobubble.planning.kernels.priorities import mean_pass
from zerobubble.planning.kernels.search_state import BudgetMeter, counted_plays
from zerobubble.planning.kernels.short_search import FEW, SMALL
from zerobubble.planning.kernels.tables import PLANNED, Tables, order_of, tables_of
from zerobubble.planning.problem.problem import Objective, Problem

TEMPERATURES, HOT_TEMPERATURES = (0.05, 0.02, 0.2, 0.01), (0.3, 1.0)
"""Starting temperatures of runs in turn, in mean pass times; each falls to a tenth."""

RUN_SHARE = 0.1
"""Fraction of the budget for each run: a few long runs find shorter schedules than many short ones."""

FEW_TEMPERATURES = (0.2, 0.05)
"""Starting temperatures of the only runs, all from the best schedule, if the evaluations are few."""

CHUNK_PASSES, CHUNKS_OF_A_RUN = 1_000_000, 50
"""Passes of moved schedules between two checks of the clock, a hundredth of a second, and such checks in a run of counted evaluations."""


class Found(NamedTuple):
    """The best schedule of a search, and whether Ctrl-C ended it."""

    schedule: Schedule
    interrupted: bool


def anneal_in_steps(problem: Problem, schedules: Sequence[Schedule], bound: int, budget: BudgetMeter, seed: int) -> Found | None:
    """Returns the best schedule that annealing finds from `schedules`; None if none of them runs within the limits.

    Annealing restarts from one of them or the best at several temperatures, until the objective meets `bound` (ns) or the budget is spent.
    """
    tables = tables_of(problem, steps=True)
    share, mean, size = 1 / len(tables.ranks), mean_pass(tables), tables.size
    played = ((_time(tables, rows), rows) for rows in (_shorter_apart(tables, step_rows(tables, each)) for each in schedules))
    starts = sorted((start for start in played if start[0] >= 0), key=lambda start: start[0])
    if not starts:
        return None
    goal, best = starts[0][0], copy_of(starts[0][1])
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
            rows = copy_of(best if is_few or turn % 2 or turn // 2 >= len(starts) else starts[turn // 2][1])
            _, cost = replay(tables, rows, initial_play_state(tables), share, np.inf)
            scratch, begun = move_scratch(tables, rows), budget.spent
            while (over := (budget.spent - begun) / run_share) < 1 and goal > bound and budget.spent < 1:
                chunk, before = max(1, min(counted, CHUNK_PASSES // size, budget.left)), int(scratch.played[0])
                warmth = mean * hot * 0.1**over
                goal, cost, tried = anneal(tables, rows, scratch, best, goal, bound, cost, share, warmth, warmth, chunk)
                budget.used += counted_plays(int(scratch.played[0]) - before, size, tried) if is_few else tried
    except KeyboardInterrupt:
        interrupted = True
    return Found(schedule_of_steps("planned", problem, tables, best), interrupted)


def play_in_steps(problem: Problem, schedule: Schedule) -> tuple[int, int, bool]:
    """Returns the span and makespan of `schedule` in ns (-1 if it cannot run), and whether it fits the limits."""
    both = [tables_of(replace(problem, objective=aim), steps=True) for aim in (Objective.PERIOD, Objective.MAKESPAN)]
    rows = step_rows(both[0], schedule)
    fits = all_ranks_fit(both[0], rows)
    span, makespan = (longest_time(tables, rows) for tables in both)
    return span, makespan, fits


def step_rows(tables: Tables, schedule: Schedule) -> Rows:
    """Returns the rows of `schedule`, not played yet. A pair that is not F with B or BW of another microbatch is split."""
    rows, at = rows_of(tables, order_of(schedule)), 0
    for row in schedule.rows:
        for op, follower in zip(row, (*row[1:], None), strict=True):
            is_pair = follower is not None and (op, follower) in schedule.overlaps and can_overlap(op, follower)
            for shares in (1, int(is_pair)) if op.kind is Kind.BW else (int(is_pair),):
                rows.microbatch[at], rows.glued[at] = op.microbatch, shares
                rows.where[rows.code[at] * tables.microbatches + op.microbatch] = at
                at += 1
    return rows


def can_overlap(one: Op, other: Op) -> bool:
    """Whether these two passes may share a step, in this order."""
    return one.kind is Kind.F and other.kind in (Kind.B, Kind.BW) and one.microbatch != other.microbatch


def schedule_of_steps(name: str, problem: Problem, tables: Tables, rows: Rows) -> Schedule:
    """The schedule whose rows are `rows`."""
    stages = len(tables.forwards)
    ops = [Op(PLANNED[code // stages], code % stages, j) for code, j in zip(rows.code.tolist(), rows.microbatch.tolist(), strict=True)]
    made, overlaps = [], set()
    for start, stop in tables.ranks[["first", "stop"]].tolist():
        row: list[Op] = []
        for at in range(start, stop):
            shares = at > start and bool(rows.glued[at - 1])
            if shares and ops[at].kind is Kind.W:
                row[-1] = row[-1]._replace(kind=Kind.BW)
            else:
                row.append(ops[at])
            if shares and ops[at].kind is Kind.B:
                whole = bool(rows.glued[at])
                overlaps.add((row[-2], row[-1]._replace(kind=Kind.BW) if whole else row[-1]))
        made.append(tuple(row))
    return Schedule(name, problem.placement, problem.num_microbatches, tuple(made), overlaps=frozenset(overlaps))


def _time(tables: Tables, rows: Rows) -> int:
    """Plays `rows`. Returns their objective in ns, -1 if they do not run within the limits."""
    return int(replay(tables, rows, initial_play_state(tables), 0.0, np.inf)[0])


def _shorter_apart(tables: Tables, start: Rows) -> Rows:
    """Returns `start` with its BW split into B and W, so that gradients are sent earlier: all of them, or only those that gain nothing as
    BW. Takes the first variant that fits and is no longer.
    """
    codes, time = tables.codes[start.code], _time(tables, start)
    is_backward, stage = (codes["predecessor"] >= 0) & (codes["successor"] >= 0), start.code % len(tables.forwards)
    for apart in (is_backward, is_backward & (tables.steps.joins[stage] == 0)):
        rows = copy_of(start)
        rows.glued[apart] = 0
        if 0 <= _time(tables, rows) <= time:
            return rows
    return start
