"""Order annealing over samples of noisy times: a move is kept where the mean objective gets shorter, and no time as measured is lost.

A sample is a lane, and all lanes are played side by side: who waits for whom is the same in each, only the times differ. Lane 0 has
the times as measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import NamedTuple

import numpy as np

from zerobubble.planning.kernels.anneal import slide
from zerobubble.planning.kernels.compiled import compiled, inlined
from zerobubble.planning.kernels.dates import mean_pass
from zerobubble.planning.kernels.desk import Budget
from zerobubble.planning.kernels.play import Rows, Stand, all_fit, copy, fits, rows_of, stand_of
from zerobubble.planning.kernels.tables import Floats, Ints, Tables

SAMPLES = 31
"""Noisy lanes; with half as many, orders suit the samples and nothing else."""

FRESH = 7
"""How many times as many samples judge what was found."""

HEATS = (0.01, 0.003)
"""Starting temperatures in turn, in mean pass times; each falls to a tenth."""

TURNS = 12
"""How often annealing starts anew from the best."""

REACH = 24
"""A move takes a pass past at most so many others."""

MEAN_RANK = 0.03
"""Weight in the cost of the mean rank beside the longest."""

CHUNK = 400_000
"""Passes of moved schedules between two looks at the clock."""


class Lanes(NamedTuple):
    """Times in ns, a column per lane."""

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
    stand: Stand


class Judged(NamedTuple):
    """The objective of an order in ns: by the times as measured, and on average over noisy ones."""

    measured: float
    noisy: float


class Steadied(NamedTuple):
    """The number of the first of the shortest words, the word that stands noise better, if any, and both judged on fresh samples."""

    first: int
    word: Ints | None
    before: Judged
    after: Judged


def steadied(tables: Tables, words: Sequence[Ints], error: float, *, seconds: float, seed: int, evaluations: int | None) -> Steadied:
    """What stands noise of standard deviation `error` better than `words`, and takes no longer by the times as measured.

    Those of the shortest `words` that stands it best is annealed for `seconds`, or so many `evaluations`; an interrupt ends that with the
    best so far. Compiling is not counted.
    """
    known = sampled(tables, error, (seed, 0))
    judged = [judge(tables, known, word) for word in words]
    shortest = min(one.measured for one in judged)
    tied = [k for k, one in enumerate(judged) if one.measured == shortest]
    found = words[min(tied, key=lambda k: judged[k].noisy)].copy()
    cool(tables, known, found.copy(), shortest, Random(seed), Budget(0.0, 1))
    with suppress(KeyboardInterrupt):
        cool(tables, known, found, shortest, Random(seed), Budget(seconds, evaluations))
    before, after = (_fresh(tables, word, error, seed) for word in (words[tied[0]], found))
    better = after.noisy < before.noisy
    return Steadied(tied[0], found if better else None, before, after if better else before)


def _fresh(tables: Tables, word: Ints, error: float, seed: int) -> Judged:
    """`word` on samples that no search has seen."""
    judged = [judge(tables, sampled(tables, error, (seed, turn)), word) for turn in range(1, FRESH + 1)]
    return Judged(judged[0].measured, float(np.mean([one.noisy for one in judged])))


def sampled(tables: Tables, error: float, seed: tuple[int, ...]) -> Lanes:
    """The times as measured, then samples with a normal factor of standard deviation `error` for each pass; not played yet."""
    measured = np.repeat(tables.codes["time"], tables.microbatches)[:, None]
    factors = np.random.default_rng(seed).normal(1, error, (tables.size, SAMPLES))
    time = np.hstack((measured, np.maximum(0, np.rint(measured * factors))))
    home = np.repeat(tables.codes["rank"], tables.microbatches)
    work = np.array([time[home == rank].sum(axis=0) for rank in range(len(tables.ranks))])
    return Lanes(time, work, np.zeros_like(time), np.zeros_like(time), np.zeros_like(work), np.zeros((3, SAMPLES + 1)))


def judge(tables: Tables, lanes: Lanes, word: Ints) -> Judged:
    """What `word`, which can run, takes on the lanes."""
    play(tables, rows_of(tables, word), lanes, stand_of(tables), np.inf, np.inf)
    longest = lanes.length.max(axis=0)
    return Judged(float(longest[0]), float(longest[1:].mean()))


def cool(tables: Tables, lanes: Lanes, best: Ints, most: float, dice: Random, budget: Budget) -> None:
    """Replace the word `best` by better ones that take at most `most` ns in lane 0, until the budget is spent."""
    goal, mean, moves = np.inf, mean_pass(tables), max(100, CHUNK // tables.size)
    for turn in range(TURNS):
        rows, cost = _played(tables, lanes, best)
        trial = Trial(lanes.end.copy(), lanes.idle.copy(), np.zeros_like(tables.ranks["first"]), np.zeros_like(best), stand_of(tables))
        while (part := budget.spent * TURNS - turn) < 1:
            heat = mean * HEATS[turn % len(HEATS)] * 0.1**part
            cost, goal = anneal(tables, rows, lanes, trial, best, cost, goal, most, heat, moves, dice.getrandbits(32))
            budget.used += moves


def _played(tables: Tables, lanes: Lanes, word: Ints) -> tuple[Rows, float]:
    """The rows of `word`, played on the lanes, and their cost."""
    rows = rows_of(tables, word)
    all_fit(tables, rows)
    return rows, play(tables, rows, lanes, stand_of(tables), np.inf, np.inf)


@compiled
def play(tables: Tables, rows: Rows, lanes: Lanes, stand: Stand, most: float, cutoff: float) -> float:
    """Play every row from the head of its rank on, what stands before being played already; moves the heads to where it came.

    Gives the cost, the mean over noisy lanes of the longest rank and a share of the mean rank; -1 where the rows stop, or as soon as
    lane 0 must take longer than `most` or the cost must pass `cutoff`.
    """
    ranks, m, width = len(tables.ranks), tables.microbatches, lanes.time.shape[1]
    head, blocked, stack = stand.head, stand.blocked, stand.stack
    share, cost, depth = MEAN_RANK / ranks, 0.0, ranks
    longest, free, idle = lanes.now[0], lanes.now[1], lanes.now[2]
    for s in range(width):
        longest[s] = 0.0
    for r in range(ranks):
        blocked[r], stack[ranks - 1 - r] = -1, r
        for s in range(width):
            lanes.length[r, s] = lanes.work[r, s] + (lanes.idle[head[r] - 1, s] if head[r] > tables.ranks[r].first else 0.0)
            longest[s] = max(longest[s], lanes.length[r, s])
            cost += share * lanes.length[r, s] if s > 0 else 0.0
    for s in range(1, width):
        cost += longest[s]
    while depth > 0:
        depth -= 1
        r = stack[depth]
        i, first, last = head[r], tables.ranks[r].first, tables.ranks[r].stop
        for s in range(width):
            free[s] = lanes.end[i - 1, s] if i > first else 0.0
            idle[s] = lanes.idle[i - 1, s] if i > first else 0.0
        while i < last:
            code = rows.word[i]
            need, one = tables.codes[code].maker, code * m + rows.microbatch[i]
            if need >= 0:
                at = rows.where[need * m + rows.microbatch[i]]
                head[r] = i
                if at >= head[tables.codes[need].rank]:
                    blocked[r] = at
                    break
                lag = tables.codes[code].lag
                for s in range(width):
                    wait = max(0.0, lanes.end[at, s] + lag - free[s])
                    free[s] += wait
                    idle[s] += wait if i > first or tables.from_start else 0.0
            for s in range(width):
                free[s] += lanes.time[one, s]
                lanes.end[i, s] = free[s]
                lanes.idle[i, s] = idle[s]
            if tables.codes[code].user >= 0:
                reader = tables.codes[tables.codes[code].user].rank
                if blocked[reader] == i:
                    blocked[reader] = -1
                    stack[depth] = reader
                    depth += 1
            i += 1
        head[r] = i
        for s in range(width):
            now = lanes.work[r, s] + idle[s]
            cost += share * (now - lanes.length[r, s]) + max(0.0, now - longest[s]) if s > 0 else 0.0
            lanes.length[r, s] = now
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
    lanes: Lanes,
    trial: Trial,
    best: Ints,
    cost: float,
    goal: float,
    most: float,
    heat: float,
    moves: int,
    seed: int,
) -> tuple[float, float]:
    """Try `moves` moves on `rows` of the given cost at the temperature `heat` (ns), never longer than `most` in lane 0.

    `trial` holds the times of `rows`. `goal` is the cost of the word `best`; both are replaced by what is better. Gives the costs of
    `rows` and `best`.
    """
    np.random.seed(seed)
    ranks, width, end, idle = len(tables.ranks), lanes.end.shape[1], trial.end, trial.idle
    resume, head, known = trial.resume, trial.stand.head, 0
    for _ in range(moves):
        dice = np.random.random()
        if dice < 0.4:
            start, stop = into_gap(tables, rows, lanes, np.random.randint(1, width))
        else:
            if known == 0:
                known = critical_path(tables, rows, lanes, np.random.randint(1, width), trial.path)
            start = trial.path[np.random.randint(known)] if dice < 0.85 else np.random.randint(len(rows.word))
            stop = start + np.random.randint(-REACH, REACH + 1)
        r = tables.codes[rows.word[start]].rank
        stop = slide(tables, rows, r, start, stop)
        if stop == start:
            continue
        low, high, now = min(start, stop), max(start, stop) + 1, -1.0
        if fits(tables, rows, r, low, high):
            free = lanes.end[low - 1, 0] if low > tables.ranks[r].first else 0.0
            for q in range(ranks):
                resume[q] = low if q == r else first_after(tables, rows, lanes, q, free)
                head[q] = resume[q]
            now = play(tables, rows, lanes, trial.stand, most, cost - heat * np.log(np.random.random() + 1e-300))
            for q in range(ranks):
                for at in range(resume[q], head[q]):
                    for s in range(width):
                        if now >= 0:
                            end[at, s], idle[at, s] = lanes.end[at, s], lanes.idle[at, s]
                        else:
                            lanes.end[at, s], lanes.idle[at, s] = end[at, s], idle[at, s]
        if now < 0:
            slide(tables, rows, r, stop, start)
            fits(tables, rows, r, low, high)
            continue
        known, cost = 0, now
        if cost < goal:
            goal = cost
            copy(best, rows.word)
    return cost, goal


@inlined
def first_after(tables: Tables, rows: Rows, lanes: Lanes, rank: int, time: float) -> int:
    """The first position of `rank` whose pass starts at `time` or later in lane 0: none before it can wait for what starts then."""
    low, high = tables.ranks[rank].first, tables.ranks[rank].stop
    while low < high:
        middle = (low + high) // 2
        if lanes.end[middle, 0] - tables.codes[rows.word[middle]].time < time:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def into_gap(tables: Tables, rows: Rows, lanes: Lanes, lane: int) -> tuple[int, int]:
    """A pass to pull into the first gap of a lane after a random position, and that gap's position."""
    gap = np.random.randint(len(rows.word))
    last = tables.ranks[tables.codes[rows.word[gap]].rank].stop - 1
    while gap < last and (gap == 0 or lanes.idle[gap, lane] == lanes.idle[gap - 1, lane]):
        gap += 1
    wish = rows.word[min(gap + 1 + np.random.randint(REACH), last)]
    start = gap
    while start < last and rows.word[start] != wish:
        start += 1
    return start, gap


@inlined
def critical_path(tables: Tables, rows: Rows, lanes: Lanes, lane: int, path: Ints) -> int:
    """Fill `path` with the positions that hold up the end of a lane's longest rank, last first; their number."""
    worst, longest = 0, -1.0
    for r in range(len(tables.ranks)):
        length = lanes.work[r, lane] + lanes.idle[tables.ranks[r].stop - 1, lane]
        if length > longest:
            worst, longest = r, length
    at, known, m = tables.ranks[worst].stop - 1, 0, tables.microbatches
    while True:
        path[known] = at
        known += 1
        code, j = rows.word[at], rows.microbatch[at]
        start, need = lanes.end[at, lane] - lanes.time[code * m + j, lane], tables.codes[code].maker
        source = rows.where[need * m + j] if need >= 0 else at
        if need >= 0 and lanes.end[source, lane] + tables.codes[code].lag == start:
            at = source
        elif at == tables.ranks[tables.codes[code].rank].first:
            return known
        else:
            at -= 1
