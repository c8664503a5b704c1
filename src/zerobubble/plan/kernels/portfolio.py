"""The order in which the means of search are tried: seeds as they are, policies, due dates, and annealing of the best of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerobubble.plan.kernels.anneal import sow
from zerobubble.plan.kernels.dates import num_legs
from zerobubble.plan.kernels.desk import Budget, Desk, Pool
from zerobubble.plan.kernels.ladder import KEPT, climbed
from zerobubble.plan.kernels.policy import plain
from zerobubble.plan.kernels.tables import Ints, tables_of
from zerobubble.plan.problem import Problem

HEATS = (0.03, 0.01, 0.1, 0.004)
"""Starting temperatures of annealing runs in turn, in mean pass times."""

TRIED = 3
"""Seeds that are annealed."""

GUESSES = 20
"""Policies tried at random where no seed fits."""

LARGE = 50_000
"""Passes from which the list scheduler is too slow to learn much on the problem itself."""


def run(desk: Desk, problem: Problem, seeds: Sequence[Ints], seed: int) -> None:
    """Search until the bound is met or the budget is spent; the best stays on the desk."""
    sow(seed)
    roots = sorted(((desk.offer(word, "seed"), k) for k, word in enumerate(seeds)))
    words = [seeds[k] for time, k in roots if time >= 0]
    if desk.word is None:
        _begin(desk)
    if desk.word is None or desk.done:
        return
    size = desk.tables.size
    moves = max(500, 20_000_000 // size)
    for turn, word in enumerate(words[:TRIED]):
        _polish(desk, word, moves, turn)
    pool = climbed(desk, problem, 0.4 if words else 0.8 if size > LARGE else 0.5)
    desk.climb(pool, len(pool.costs))
    pool, turn, moves = pool.best(KEPT), 0, 3 * moves
    while not desk.done:
        desk.climb(pool, max(20, moves // 40))
        if words and turn > 0:
            _polish(desk, words[turn % min(len(words), TRIED)], moves, turn)
        if not desk.done:
            _polish(desk, desk.redate(pool.best(KEPT).policies[turn % KEPT], max(20, moves // 100)), moves, turn)
        _polish(desk, desk.word, moves, turn + 1)
        moves, turn = min(2 * moves, 1_000_000_000 // size), turn + 1


def rehearse(problem: Problem) -> None:
    """Call everything compiled once, which compiles it or loads what was compiled before."""
    desk = Desk(tables_of(problem), 0, Budget(0.0, 1 << 62), lambda time, how: None)
    sow(0)
    pool = Pool.of(plain(num_legs(desk.tables), 1.0)[None])
    desk.climb(pool, 2)
    desk.polish(desk.redate(pool.policies[0], 1), 1, 1.0, "annealing")


def _polish(desk: Desk, word: Ints, moves: int, turn: int) -> None:
    if not desk.done:
        desk.polish(word, moves, HEATS[turn % len(HEATS)], "annealing")


def _begin(desk: Desk) -> None:
    """A few passes of the list scheduler; failing that, one microbatch after the other, which fits if anything does."""
    desk.climb(Pool.of(plain(num_legs(desk.tables), 1.0)[None]), GUESSES, GUESSES)
    if desk.word is None:
        desk.offer(serial(desk), "one microbatch after the other")


def serial(desk: Desk) -> Ints:
    """Rows in which every microbatch ends before the next begins."""
    tables, row = desk.tables, []
    then = tables.codes["then"]
    for start, stop in tables.ranks[["lane", "lane_stop"]].tolist():
        lane = tables.lanes[start:stop]
        back = then[lane][::-1]
        once = [*lane, *(code for pair in zip(back, then[back], strict=True) for code in pair)]
        row += once * tables.microbatches
    return np.array(row, np.int64)
