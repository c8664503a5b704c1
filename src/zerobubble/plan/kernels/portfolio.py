"""The order in which the means of search are tried: seeds as they are, policies, due dates, and annealing of the best of each."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from zerobubble.plan.kernels.anneal import sow
from zerobubble.plan.kernels.climb import Ranked, ranked, search_keys, search_policies
from zerobubble.plan.kernels.dates import keys_of, num_legs
from zerobubble.plan.kernels.desk import Desk
from zerobubble.plan.kernels.greedy import greedy
from zerobubble.plan.kernels.ladder import climbed
from zerobubble.plan.kernels.tables import Ints
from zerobubble.plan.policy import Policy
from zerobubble.plan.problem import Problem

HEATS = (0.03, 0.01, 0.1, 0.004)
"""Starting temperatures of annealing runs in turn, in mean pass times."""

LARGE = 50_000
"""Passes from which the list scheduler is too slow to learn much on the problem itself."""


def run(desk: Desk, problem: Problem, seeds: Sequence[Ints], seed: int) -> None:
    """Search until the bound is met or the budget is spent; the best stays on the desk."""
    dice = Random(seed)
    sow(seed)
    roots = sorted(((desk.offer(word, "seed")[0], k) for k, word in enumerate(seeds)))
    words = [seeds[k] for time, k in roots if time >= 0]
    if desk.word is None:
        _begin(desk)
    size = desk.tables.size
    moves, round_ = max(500, 20_000_000 // size), 0
    known: list[Ranked] = []
    while desk.word is not None and not desk.done:
        if words:
            _polish(desk, words[round_ % min(len(words), 3)], moves, round_)
        if round_ == 0:
            share = 0.3 if words else 0.8 if size > LARGE else 0.5
            known = ranked(desk, climbed(desk, problem, dice, share))
        known = search_policies(desk, dice, max(20, moves // 40), known, 0.5)
        found = np.empty(size, np.int64)
        if not desk.done:
            keys = search_keys(desk, dice, max(20, moves // 40), known[round_ % len(known)][1])
            if greedy(desk.tables, keys, found) and desk.offer(found, "due dates")[0] >= 0:
                _polish(desk, found, moves, round_)
        _polish(desk, desk.word, moves, round_ + 1)
        moves, round_ = min(2 * moves, 1_000_000_000 // size), round_ + 1


def _polish(desk: Desk, word: Ints, moves: int, turn: int) -> None:
    if not desk.done:
        desk.polish(word, moves, HEATS[turn % len(HEATS)], "annealing")


def _begin(desk: Desk) -> None:
    """One pass of the list scheduler; failing that, one microbatch after the other, which fits if anything does."""
    desk.schedule(keys_of(desk.tables, Policy.plain(num_legs(desk.tables)), desk.bound), "policy", 0.0)
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
