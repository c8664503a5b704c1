"""Order annealing over samples of noisy times: a move is kept where the mean objective gets shorter, and no time as measured is lost.

A sample is a sample, and all samples are played side by side: who waits for whom is the same in each, only the times differ. Lane 0 has
the times as measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.anneal import move_pass
from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.play import PlayState, Rows, all_ranks_fit, copy_into, initial_play_state, rows_of, update_held
from zerobubble.planning.kernels.priorities import mean_pass
from zerobubble.planning.kernels.search_state import BudgetMeter
from zerobubble.planning.kernels.tables import Floats, Ints, Tables

SAMPLES = 31
"""Noisy samples; with half as many, orders suit the samples and nothing else."""

FRESH_SAMPLES = 7
"""How many times as many samples judge what was found."""

TEMPERATURES = (0.01, 0.003)
"""Starting temperatures in turn, in mean pass times; each falls to a tenth."""

RESTARTS = 12
"""How often annealing starts anew from the best."""

MAX_SHIFT = 24
"""A move takes a pass past at most so many others."""

MEAN_RANK = 0.03
"""Weight in the cost of the mean rank beside the longest."""

CHUNK_PASSES = 400_000
"""Passes of moved schedules between two looks at the clock."""


class Samples(NamedTuple):
    """Times in ns, a column per sample."""

    time: Floats
    """What a pass takes: code c for microbatch j at `c * microbatches + j`."""
    work: Floats
    """What all passes of a rank take."""
    end: Floats
    """When the pass at each position of the rows ends."""
    idle: Floats
    """How long its rank has idled up to then."""
    length: Floats
    """How long each rank takes, as far as it is played."""
    now: Floats
    """The longest rank, and when the rank being played is free and how long it has idled."""


class Trial(NamedTuple):
    """Room for moves: the times of the rows as they were, where each rank is played from, and a critical path."""

    end: Floats
    idle: Floats
    resume: Ints
    path: Ints
    play_state: PlayState


class SampledObjective(NamedTuple):
    """The objective of an order in ns: by the times as measured, and on average over noisy ones."""

    measured: float
    noisy: float


class RobustResult(NamedTuple):
    """The number of the first of the shortest words, the word that stands noise better, if any, and both judged on fresh samples."""

    first: int
    order: Ints | None
    before: SampledObjective
    after: SampledObjective


def most_robust(
    tables: Tables, orders: Sequence[Ints], error: float, *, seconds: float, seed: int, evaluations: int | None
) -> RobustResult:
    """What stands noise of standard deviation `error` better than `orders`, and takes no longer by the times as measured.

    Those of the shortest `orders` that stands it best is annealed for `seconds`, or so many `evaluations`; an interrupt ends that with the
    best so far. Compiling is not counted.
    """
    path_length = sampled(tables, error, (seed, 0))
    judged = [evaluate(tables, path_length, order) for order in orders]
    shortest = min(one.measured for one in judged)
    tied = [k for k, one in enumerate(judged) if one.measured == shortest]
    found = orders[min(tied, key=lambda k: judged[k].noisy)].copy()
    anneal_from_best(tables, path_length, found.copy(), shortest, Random(seed), BudgetMeter(0.0, 1))
    with suppress(KeyboardInterrupt):
        anneal_from_best(tables, path_length, found, shortest, Random(seed), BudgetMeter(seconds, evaluations))
    before, after = (_fresh(tables, order, error, seed) for order in (orders[tied[0]], found))
    better = after.noisy < before.noisy
    return RobustResult(tied[0], found if better else None, before, after if better else before)


def _fresh(tables: Tables, order: Ints, error: float, seed: int) -> SampledObjective:
    """`order` on samples that no search has seen."""
    judged = [evaluate(tables, sampled(tables, error, (seed, turn)), order) for turn in range(1, FRESH_SAMPLES + 1)]
    return SampledObjective(judged[0].measured, float(np.mean([one.noisy for one in judged])))


def sampled(tables: Tables, error: float, seed: tuple[int, ...]) -> Samples:
    """The times as measured, then samples with a normal factor of standard deviation `error` for each pass; not played yet."""
    measured = np.repeat(tables.codes["time"], tables.microbatches)[:, None]
    factors = np.random.default_rng(seed).normal(1, error, (tables.size, SAMPLES))
    time = np.hstack((measured, np.maximum(0, np.rint(measured * factors))))
    home = np.repeat(tables.codes["rank"], tables.microbatches)
    work = np.array([time[home == rank].sum(axis=0) for rank in range(len(tables.ranks))])
    return Samples(time, work, np.zeros_like(time), np.zeros_like(time), np.zeros_like(work), np.zeros((3, SAMPLES + 1)))


def evaluate(tables: Tables, samples: Samples, order: Ints) -> SampledObjective:
    """What `order`, which can run, takes on the samples."""
    play(tables, rows_of(tables, order), samples, initial_play_state(tables), np.inf, np.inf)
    longest = samples.length.max(axis=0)
    return SampledObjective(float(longest[0]), float(longest[1:].mean()))


def anneal_from_best(tables: Tables, samples: Samples, best: Ints, most: float, dice: Random, budget: BudgetMeter) -> None:
    """Replace the word `best` by better ones that take at most `most` ns in sample 0, until the budget is spent."""
    goal, mean, moves = np.inf, mean_pass(tables), max(100, CHUNK_PASSES // tables.size)
    for turn in range(RESTARTS):
        rows, cost = _played(tables, samples, best)
        trial = Trial(
            samples.end.copy(), samples.idle.copy(), np.zeros_like(tables.ranks["first"]), np.zeros_like(best), initial_play_state(tables)
        )
        while (part := budget.spent * RESTARTS - turn) < 1:
            temperature = mean * TEMPERATURES[turn % len(TEMPERATURES)] * 0.1**part
            cost, goal = anneal(tables, rows, samples, trial, best, cost, goal, most, temperature, moves, dice.getrandbits(32))
            budget.used += moves


def _played(tables: Tables, samples: Samples, order: Ints) -> tuple[Rows, float]:
    """The rows of `order`, played on the samples, and their cost."""
    rows = rows_of(tables, order)
    all_ranks_fit(tables, rows)
    return rows, play(tables, rows, samples, initial_play_state(tables), np.inf, np.inf)


@compiled
def play(tables: Tables, rows: Rows, samples: Samples, play_state: PlayState, most: float, cutoff: float) -> float:
    """Play every row from the head of its rank on, what stands before being played already; moves the heads to where it came.

    Gives the cost, the mean over noisy samples of the longest rank and a share of the mean rank; -1 where the rows stop, or as soon as
    sample 0 must take longer than `most` or the cost must pass `cutoff`.
    """
    ranks, m, width = len(tables.ranks), tables.microbatches, samples.time.shape[1]
    head, blocked, stack = play_state.head, play_state.blocked, play_state.stack
    share, cost, depth = MEAN_RANK / ranks, 0.0, ranks
    longest, free, idle = samples.now[0], samples.now[1], samples.now[2]
    for s in range(width):
        longest[s] = 0.0
    for r in range(ranks):
        blocked[r], stack[ranks - 1 - r] = -1, r
        for s in range(width):
            samples.length[r, s] = samples.work[r, s] + (samples.idle[head[r] - 1, s] if head[r] > tables.ranks[r].first else 0.0)
            longest[s] = max(longest[s], samples.length[r, s])
            cost += share * samples.length[r, s] if s > 0 else 0.0
    for s in range(1, width):
        cost += longest[s]
    while depth > 0:
        depth -= 1
        r = stack[depth]
        i, first, last = head[r], tables.ranks[r].first, tables.ranks[r].stop
        for s in range(width):
            free[s] = samples.end[i - 1, s] if i > first else 0.0
            idle[s] = samples.idle[i - 1, s] if i > first else 0.0
        while i < last:
            code = rows.code[i]
            need, one = tables.codes[code].maker, code * m + rows.microbatch[i]
            if need >= 0:
                at = rows.where[need * m + rows.microbatch[i]]
                head[r] = i
                if at >= head[tables.codes[need].rank]:
                    blocked[r] = at
                    break
                lag = tables.codes[code].lag
                for s in range(width):
                    wait = max(0.0, samples.end[at, s] + lag - free[s])
                    free[s] += wait
                    idle[s] += wait if i > first or tables.from_start else 0.0
            for s in range(width):
                free[s] += samples.time[one, s]
                samples.end[i, s] = free[s]
                samples.idle[i, s] = idle[s]
            if tables.codes[code].user >= 0:
                reader = tables.codes[tables.codes[code].user].rank
                if blocked[reader] == i:
                    blocked[reader] = -1
                    stack[depth] = reader
                    depth += 1
            i += 1
        head[r] = i
        for s in range(width):
            now = samples.work[r, s] + idle[s]
            cost += share * (now - samples.length[r, s]) + max(0.0, now - longest[s]) if s > 0 else 0.0
            samples.length[r, s] = now
            longest[s] = max(longest[s], now)
        if longest[0] > most or cost > cutoff * (width - 1):
            return -1.0
    for r in range(ranks):
        if head[r] < tables.ranks[r].stop:
            return -1.0
    return cost / (width - 1)


@compiled
def anneal(
    tables: Tables,
    rows: Rows,
    samples: Samples,
    trial: Trial,
    best: Ints,
    cost: float,
    goal: float,
    most: float,
    temperature: float,
    moves: int,
    seed: int,
) -> tuple[float, float]:
    """Try `moves` moves on `rows` of the given cost at the temperature `temperature` (ns), never longer than `most` in sample 0.

    `trial` holds the times of `rows`. `goal` is the cost of the word `best`; both are replaced by what is better. Gives the costs of
    `rows` and `best`.
    """
    np.random.seed(seed)
    ranks, width, end, idle = len(tables.ranks), samples.end.shape[1], trial.end, trial.idle
    resume, head, path_length = trial.resume, trial.play_state.head, 0
    for _ in range(moves):
        dice = np.random.random()
        if dice < 0.4:
            start, stop = draw_move_into_gap(tables, rows, samples, np.random.randint(1, width))
        else:
            if path_length == 0:
                path_length = critical_path(tables, rows, samples, np.random.randint(1, width), trial.path)
            start = trial.path[np.random.randint(path_length)] if dice < 0.85 else np.random.randint(len(rows.code))
            stop = start + np.random.randint(-MAX_SHIFT, MAX_SHIFT + 1)
        r = tables.codes[rows.code[start]].rank
        stop = move_pass(tables, rows, r, start, stop)
        if stop == start:
            continue
        low, high, now = min(start, stop), max(start, stop) + 1, -1.0
        if update_held(tables, rows, r, low, high):
            free = samples.end[low - 1, 0] if low > tables.ranks[r].first else 0.0
            for q in range(ranks):
                resume[q] = low if q == r else first_start_from(tables, rows, samples, q, free)
                head[q] = resume[q]
            now = play(tables, rows, samples, trial.play_state, most, cost - temperature * np.log(np.random.random() + 1e-300))
            for q in range(ranks):
                for at in range(resume[q], head[q]):
                    for s in range(width):
                        if now >= 0:
                            end[at, s], idle[at, s] = samples.end[at, s], samples.idle[at, s]
                        else:
                            samples.end[at, s], samples.idle[at, s] = end[at, s], idle[at, s]
        if now < 0:
            move_pass(tables, rows, r, stop, start)
            update_held(tables, rows, r, low, high)
            continue
        path_length, cost = 0, now
        if cost < goal:
            goal = cost
            copy_into(best, rows.code)
    return cost, goal


@inlined
def first_start_from(tables: Tables, rows: Rows, samples: Samples, rank: int, time: float) -> int:
    """The first position of `rank` whose pass starts at `time` or later in sample 0: none before it can wait for what starts then."""
    low, high = tables.ranks[rank].first, tables.ranks[rank].stop
    while low < high:
        middle = (low + high) // 2
        if samples.end[middle, 0] - tables.codes[rows.code[middle]].time < time:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def draw_move_into_gap(tables: Tables, rows: Rows, samples: Samples, sample: int) -> tuple[int, int]:
    """A pass to pull into the first gap of a sample after a random position, and that gap's position."""
    gap = np.random.randint(len(rows.code))
    last = tables.ranks[tables.codes[rows.code[gap]].rank].stop - 1
    while gap < last and (gap == 0 or samples.idle[gap, sample] == samples.idle[gap - 1, sample]):
        gap += 1
    wish = rows.code[min(gap + 1 + np.random.randint(MAX_SHIFT), last)]
    start = gap
    while start < last and rows.code[start] != wish:
        start += 1
    return start, gap


@inlined
def critical_path(tables: Tables, rows: Rows, samples: Samples, sample: int, path: Ints) -> int:
    """Fill `path` with the positions that hold up the end of a sample's longest rank, last first; their number."""
    worst, longest = 0, -1.0
    for r in range(len(tables.ranks)):
        length = samples.work[r, sample] + samples.idle[tables.ranks[r].stop - 1, sample]
        if length > longest:
            worst, longest = r, length
    at, path_length, m = tables.ranks[worst].stop - 1, 0, tables.microbatches
    while True:
        path[path_length] = at
        path_length += 1
        code, j = rows.code[at], rows.microbatch[at]
        start, need = samples.end[at, sample] - samples.time[code * m + j, sample], tables.codes[code].maker
        source = rows.where[need * m + j] if need >= 0 else at
        if need >= 0 and samples.end[source, sample] + tables.codes[code].lag == start:
            at = source
        elif at == tables.ranks[tables.codes[code].rank].first:
            return path_length
        else:
            at -= 1
