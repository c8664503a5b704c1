"""The order in which the means of search are tried: seeds as they are, policies, due dates, and annealing of the best of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerobubble.planning.kernels.anneal import sow
from zerobubble.planning.kernels.dates import num_legs
from zerobubble.planning.kernels.desk import Budget, Desk, Pool
from zerobubble.planning.kernels.ladder import KEPT, climbed
from zerobubble.planning.kernels.policy import plain
from zerobubble.planning.kernels.tables import Ints, tables_of
from zerobubble.planning.problem import Problem

HEATS, HOTTER = (0.02, 0.01, 0.05, 0.004), (0.3, 1.0)
"""Starting temperatures of annealing runs in turn, in mean pass times, and those that only small problems have the time for."""

SMALL = 1000
"""Passes of a small problem."""

TRIED = 3
"""Seeds that are annealed."""

GUESSES = 20
"""Policies tried at random where no seed fits."""

NEAR = 1.02
"""How long a seed may be as a multiple of the bound to be annealed at length before anything else."""

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
    size, turn = desk.tables.size, 0
    near = bool(words) and desk.time <= NEAR * desk.bound
    moves = max(20_000, 12 * size) if near or size <= SMALL else 60_000_000 // size
    tries = max(20, moves // 80 if near else min(1000, 1_000_000 // size))
    for word in words[:TRIED]:
        _polish(desk, word, 20_000_000 // size, 0, 0.05)
    if near:
        _polish(desk, desk.word, moves, 0, 0.2)
    pool = climbed(desk, problem, 0.4 if near else 0.8 if size > LARGE else 0.5)
    desk.climb(pool, len(pool.costs))
    pool = pool.best(KEPT)
    while not desk.done:
        desk.climb(pool, tries)
        if near or (words and turn > 0):
            _polish(desk, words[turn % min(len(words), TRIED)], moves, turn + 1, 0.2)
        if not desk.done:
            _polish(desk, desk.redate(pool.best(KEPT).policies[turn % KEPT], tries // 2), moves, turn, 0.2)
        _polish(desk, desk.word, moves, turn, 0.2)
        moves, tries, turn = 2 * moves, 2 * tries, turn + 1


def rehearse(problem: Problem) -> None:
    """Call everything compiled once, which compiles it or loads what was compiled before."""
    desk = Desk(tables_of(problem), 0, Budget(0.0, 1 << 62), lambda time, how: None)
    sow(0)
    pool = Pool.of(plain(num_legs(desk.tables), 1.0)[None])
    desk.climb(pool, 2)
    desk.polish(desk.redate(pool.policies[0], 1), 1, 1.0)


def _polish(desk: Desk, word: Ints, moves: int, turn: int, share: float) -> None:
    if not desk.done:
        heats = HOTTER + HEATS if desk.tables.size <= SMALL else HEATS
        desk.polish(word, moves, heats[turn % len(heats)], share)


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
