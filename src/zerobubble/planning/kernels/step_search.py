"""Search for schedules whose passes may share steps: fused backward passes and overlapped pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.kernels.anneal import seed_random
from zerobubble.planning.kernels.play import Rows, copy_of, rows_of
from zerobubble.planning.kernels.search_state import BudgetMeter, SearchState
from zerobubble.planning.kernels.short_search import FEW, SMALL
from zerobubble.planning.kernels.tables import PLANNED, Tables, order_of, tables_of
from zerobubble.planning.problem.problem import Problem

TEMPERATURES, HOT_TEMPERATURES = (0.05, 0.02, 0.2, 0.01), (0.3, 1.0)
"""Starting temperatures of runs in turn, in mean pass times; each falls to a tenth."""

RUN_SHARE = 0.1
"""Fraction of the budget for each run: a few long runs find shorter schedules than many short ones."""

MOST_MOVES = 1 << 40
"""Moves of a run that ends by the clock."""

FEW_TEMPERATURES = (0.2, 0.05)
"""Starting temperatures of the only runs, all from the best schedule, if the evaluations are few."""


class Found(NamedTuple):
    """The best schedule of a search, and whether Ctrl-C ended it."""

    schedule: Schedule
    interrupted: bool


def anneal_in_steps(problem: Problem, schedules: Sequence[Schedule], bound: int, budget: BudgetMeter, seed: int) -> Found | None:
    """Returns the best schedule that annealing finds from `schedules`; None if none of them runs within the limits.

    Annealing restarts from one of them or the best at several temperatures, until the objective meets `bound` (ns) or the budget is spent.
    """
    tables = tables_of(problem, steps=True)
    state = SearchState(tables, bound, budget, lambda time, how: None)
    rows = [_shorter_apart(state, step_rows(tables, schedule)) for schedule in schedules]
    played = [(state.offer(start, "seed"), place) for place, start in enumerate(rows)]
    starts = [rows[place] for time, place in sorted(played) if time >= 0]
    if not starts:
        return None
    evaluations, interrupted = budget.evaluations, False
    is_few = evaluations is not None and evaluations < FEW
    temperatures = FEW_TEMPERATURES if is_few else HOT_TEMPERATURES + TEMPERATURES if tables.size <= SMALL else TEMPERATURES
    seed_random(seed)
    try:
        for turn, hot in enumerate(cycle(temperatures)):
            if state.done:
                break
            if is_few:
                state.anneal_played(state.order, budget.left // (len(temperatures) - turn % len(temperatures)), hot)
            else:
                start = state.order if turn % 2 or turn // 2 >= len(starts) else starts[turn // 2]
                state.anneal_order(start, MOST_MOVES if evaluations is None else int(RUN_SHARE * evaluations), hot, RUN_SHARE)
    except KeyboardInterrupt:
        interrupted = True
    return Found(schedule_of_steps("planned", problem, tables, state.order), interrupted)


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


def _shorter_apart(state: SearchState, start: Rows) -> Rows:
    """Returns `start` with its BW split into B and W, so that gradients are sent earlier: all of them, or only those that gain nothing as
    BW. Takes the first variant that fits and is no longer.
    """
    codes, stage = state.tables.codes[start.code], start.code % len(state.tables.forwards)
    is_backward, time = (codes["predecessor"] >= 0) & (codes["successor"] >= 0), state.time_of(start)
    for apart in (is_backward, is_backward & (state.tables.steps.joins[stage] == 0)):
        rows = copy_of(start)
        rows.glued[apart] = 0
        if 0 <= state.time_of(rows) <= time:
            return rows
    return start
