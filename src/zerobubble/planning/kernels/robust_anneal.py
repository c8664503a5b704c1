"""Annealing over samples of noisy times: moves must reduce the mean cost without lengthening the measured time.

It uses the annealer of `anneal`, draws the samples, restarts a few times, and judges the result on fresh samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.anneal import anneal, move_scratch, seed_random
from zerobubble.planning.kernels.play import Rows, all_ranks_fit, initial_play_state, play_rows, rows_of
from zerobubble.planning.kernels.priorities import mean_pass
from zerobubble.planning.kernels.samples import SampledTimes
from zerobubble.planning.kernels.search_state import BudgetMeter
from zerobubble.planning.kernels.tables import Ints, Tables

SAMPLES = 31
"""The number of noisy samples. With half as many, orders overfit the samples."""

FRESH_SAMPLES = 7
"""The result is judged on this many times as many samples."""

TEMPERATURES = (0.01, 0.003)
"""Starting temperatures in turn, in mean pass times; each falls to a tenth."""

RESTARTS = 12
"""The number of restarts from the best order."""

MEAN_RANK = 0.03
"""Weight of the mean rank in the cost, relative to the longest."""

CHUNK_PASSES = 400_000
"""Passes of moved schedules between two checks of the clock."""


class SampledObjective(NamedTuple):
    """The objective of an order in ns: by the times as measured, and on average over noisy ones."""

    measured: float
    noisy: float


class RobustResult(NamedTuple):
    """The result: the index of the first of the shortest orders, an order that is more robust to noise (None if there is none), and the
    objectives of both on fresh samples.
    """

    first: int
    order: Ints | None
    before: SampledObjective
    after: SampledObjective


def most_robust(
    tables: Tables, orders: Sequence[Ints], error: float, *, seconds: float, seed: int, evaluations: int | None
) -> RobustResult:
    """Returns an order with lower cost under noise of standard deviation `error` than `orders`, and no longer by the measured times.

    The most robust of the shortest `orders` is annealed for `seconds`, or for a number of `evaluations`. An interrupt ends that with the
    best so far. Compilation is not counted.
    """
    sampled = draw_samples(tables, error, (seed, 0))
    objectives = [sampled_objective(tables, sampled, order) for order in orders]
    shortest = min(one.measured for one in objectives)
    tied = [k for k, one in enumerate(objectives) if one.measured == shortest]
    found = orders[min(tied, key=lambda k: objectives[k].noisy)].copy()
    # The first call compiles, on a copy and with a budget of one move, before the clock of the second one starts.
    anneal_from_best(tables, sampled, found.copy(), shortest, Random(seed), BudgetMeter(0.0, 1))
    with suppress(KeyboardInterrupt):
        anneal_from_best(tables, sampled, found, shortest, Random(seed), BudgetMeter(seconds, evaluations))
    before, after = (_on_fresh_samples(tables, order, error, seed) for order in (orders[tied[0]], found))
    if after.noisy < before.noisy:
        return RobustResult(tied[0], found, before, after)
    return RobustResult(tied[0], None, before, before)


def _on_fresh_samples(tables: Tables, order: Ints, error: float, seed: int) -> SampledObjective:
    """The objective of `order` on samples that no search has seen."""
    objectives = [sampled_objective(tables, draw_samples(tables, error, (seed, turn)), order) for turn in range(1, FRESH_SAMPLES + 1)]
    return SampledObjective(objectives[0].measured, float(np.mean([one.noisy for one in objectives])))


def draw_samples(tables: Tables, error: float, seed: tuple[int, ...]) -> SampledTimes:
    """Returns the measured times, then samples with a normal factor of standard deviation `error` for each pass, as integers of at least 0
    ns.
    """
    measured = tables.time[:, None]
    factors = np.random.default_rng(seed).normal(1, error, (tables.size, SAMPLES))
    duration = np.hstack((measured, np.maximum(0, np.rint(measured * factors))))
    rank = np.repeat(tables.codes["rank"], tables.microbatches)
    work = np.array([duration[rank == r].sum(axis=0) for r in range(len(tables.ranks))])
    return SampledTimes(duration, work)


def sampled_objective(tables: Tables, sampled: SampledTimes, order: Ints) -> SampledObjective:
    """The objective of `order`, which can run, by the measured and by the noisy times."""
    rows, _ = play_sampled(tables, sampled, order)
    longest = (sampled.work + rows.idle[tables.ranks["stop"] - 1]).max(axis=0)
    return SampledObjective(float(longest[0]), float(longest[1:].mean()))


def anneal_from_best(tables: Tables, sampled: SampledTimes, best: Ints, most: float, random: Random, budget: BudgetMeter) -> None:
    """Replaces the order `best` by better ones until the budget is spent. With the measured times, they take at most `most` ns."""
    goal, mean, moves = np.inf, mean_pass(tables), max(100, CHUNK_PASSES // tables.size)
    share = MEAN_RANK / len(tables.ranks)
    for turn in range(RESTARTS):
        rows, cost = play_sampled(tables, sampled, best)
        scratch = move_scratch(tables, rows)
        while (part := budget.spent * RESTARTS - turn) < 1:
            temperature = mean * TEMPERATURES[turn % len(TEMPERATURES)] * 0.1**part
            seed_random(random.getrandbits(32))
            goal, cost, _ = anneal(tables, rows, scratch, best, goal, -np.inf, cost, share, most, temperature, temperature, moves)
            budget.used += moves


def play_sampled(tables: Tables, sampled: SampledTimes, order: Ints) -> tuple[Rows, float]:
    """Plays `order` on the samples. Returns the rows and their cost."""
    rows = rows_of(tables, order, sampled)
    all_ranks_fit(tables, rows)
    _, cost = play_rows(tables, rows, initial_play_state(tables, rows), MEAN_RANK / len(tables.ranks), np.inf, np.inf)
    return rows, cost
