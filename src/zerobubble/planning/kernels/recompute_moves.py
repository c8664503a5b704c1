"""The moves that change recomputation: which forwards to recompute, and the level of each stage."""

from __future__ import annotations

import numpy as np

from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.moves import note, swap
from zerobubble.planning.kernels.play import Rows
from zerobubble.planning.kernels.tables import PLANNED, Ints, Tables

RECOMPUTE = len(PLANNED)
"""The kind of R in codes: `RECOMPUTE * stages + s` is R of stage s."""

CHANGED_RECOMPUTE = 0.05
"""Fraction of moves that change recomputation, if it is chosen."""

OTHER_LEVEL, EXCHANGE = 0.15, 0.4
"""Fraction of changes that give a stage another level, and of those that also exchange the recomputation with another forward of the rank.
"""

TRIES = 8
"""The number of random draws to find a forward for an exchange."""

STAGE, LEVEL, FORWARD, OTHER = range(4)
"""What a change is: the stage, its level before, and the forwards whose recomputation is toggled, as `stage * microbatches + j`, or -1."""


@compiled
def change_recompute(tables: Tables, rows: Rows, change: Ints, changed: Ints) -> int:
    """Makes one random change of recomputation and describes it in `change`. Returns its rank."""
    choice, m = tables.choice, tables.microbatches
    stages = len(choice.level)
    levels = len(choice.time) // stages
    stage, j = np.random.randint(stages), np.random.randint(m)
    rank, what = tables.codes[stage].rank, np.random.random()
    change[STAGE], change[LEVEL], change[FORWARD], change[OTHER] = stage, choice.level[stage], -1, -1
    if levels > 1 and (what < OTHER_LEVEL or not choice.is_optional):
        set_level(tables, stage, (choice.level[stage] + np.random.randint(1, levels)) % levels)
        note(changed, tables.ranks[rank].first, tables.ranks[rank].stop)
    elif choice.is_optional:
        change[FORWARD] = stage * m + j
        if what > 1 - EXCHANGE:
            change[OTHER] = draw_exchange(tables, stages, stage, j)
        toggle(tables, rows, change[FORWARD], changed)
        if change[OTHER] >= 0:
            toggle(tables, rows, change[OTHER], changed)
    return int(rank)


@compiled
def undo_recompute(tables: Tables, change: Ints) -> None:
    """Undoes a change in the tables. The rows must be restored by themselves."""
    if tables.choice.level[change[STAGE]] != change[LEVEL]:
        set_level(tables, change[STAGE], change[LEVEL])
    for at in (FORWARD, OTHER):
        if change[at] >= 0:
            stage, j = change[at] // tables.microbatches, change[at] % tables.microbatches
            set_recomputed(tables, stage, j, not is_recomputed(tables, stage, j))


@inlined
def draw_exchange(tables: Tables, stages: int, stage: int, j: int) -> int:
    """Returns a forward of the same rank that is recomputed if that of `stage` and `j` is not, or vice versa; -1 if none is found."""
    m = tables.microbatches
    for _ in range(TRIES):
        other_stage, other = np.random.randint(stages), np.random.randint(m)
        alike = tables.codes[other_stage].rank == tables.codes[stage].rank
        if alike and is_recomputed(tables, other_stage, other) != is_recomputed(tables, stage, j):
            return int(other_stage * m + other)
    return -1


@inlined
def is_recomputed(tables: Tables, stage: int, j: int) -> bool:
    """Returns whether a forward is recomputed."""
    return bool(tables.absent[(RECOMPUTE * len(tables.forwards) + stage) * tables.microbatches + j] == 0)


@compiled
def toggle(tables: Tables, rows: Rows, forward: int, changed: Ints) -> None:
    """Toggles the recomputation of a forward."""
    stage, j = forward // tables.microbatches, forward % tables.microbatches
    put_in_place(tables, rows, stage, changed)
    set_recomputed(tables, stage, j, not is_recomputed(tables, stage, j))
    recompute = (RECOMPUTE * len(tables.forwards) + stage) * tables.microbatches + j
    note(changed, rows.where[forward], rows.where[recompute] + 1)


@compiled
def set_level(tables: Tables, stage: int, level: int) -> None:
    """Changes the level of a stage."""
    tables.choice.level[stage] = level
    for j in range(tables.microbatches):
        set_recomputed(tables, stage, j, is_recomputed(tables, stage, j))


@compiled
def set_recomputed(tables: Tables, stage: int, j: int, recomputed: bool) -> None:
    """Sets whether a forward is recomputed, at the level of its stage."""
    choice, stages, m = tables.choice, len(tables.forwards), tables.microbatches
    forward, own = stage * m + j, (RECOMPUTE * stages + stage) * m + j
    at, rank = choice.level[stage] * stages + stage, tables.codes[stage].rank
    time, kept = (choice.time[at], choice.kept[at]) if recomputed else (0, choice.saved[stage])
    tables.ranks[rank].work += time - tables.time[own]
    tables.time[own] = time
    tables.held[forward] = kept
    tables.held[own] = choice.saved[stage] - kept
    tables.absent[own] = 0 if recomputed else 1


@compiled
def put_in_place(tables: Tables, rows: Rows, stage: int, changed: Ints) -> None:
    """Moves the R's of a stage that are left out to where they might run: right before their B, or the next R if that is earlier."""
    m, stages = tables.microbatches, len(tables.forwards)
    backward, recompute = (stages + stage) * m, (RECOMPUTE * stages + stage) * m
    before = len(rows.code)
    for j in range(m - 1, -1, -1):
        at = rows.where[recompute + j]
        if tables.absent[recompute + j]:
            before = min(before, rows.where[backward + j])
            start = at
            while at + 1 < before:
                swap(tables, rows, at, at + 1)
                at += 1
            while at > before:
                swap(tables, rows, at, at - 1)
                at -= 1
            if at != start:
                note(changed, min(at, start), max(at, start) + 1)
        before = at
