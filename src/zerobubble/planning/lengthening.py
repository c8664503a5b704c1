"""Lengthens a schedule to more microbatches: each rank repeats part of its steady state, which keeps dependencies and peak memory.

Most published schedules repeat a simple pattern on every rank. Found schedules do not: there, ranks repeat what they do between two moments
of a simulation at which all of them are in the same state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, count

from zerobubble.costs import Costs
from zerobubble.ir import Op, Schedule
from zerobubble.kinds import Kind
from zerobubble.planning.problem.problem import Problem
from zerobubble.simulation import simulate

STEADY_AFTER = 2
"""Microbatches per rank after which a published schedule is in its steady state."""

FEW_BEYOND = 6
"""The number of microbatches, in addition to two per rank, that shows part of the steady state between warm-up and cool-down."""

LONG = 3
"""Microbatches per rank above which searching few microbatches first pays."""

MOST_PASSES = 60_000
"""If the schedule of few microbatches had more passes than this, its search would begin with seconds of preparation."""


def with_few_microbatches(problem: Problem) -> Problem | None:
    """Returns `problem` with few microbatches, whose schedule can be lengthened; None for slices, and if it has hardly more, or too many
    passes.
    """
    if problem.slices > 1:
        return None
    ranks = problem.placement.num_ranks
    few = replace(problem, num_microbatches=2 * ranks + FEW_BEYOND)
    return few if problem.num_microbatches > max(LONG * ranks, few.num_microbatches) and few.num_passes <= MOST_PASSES else None


def extend_by_pattern(short: Schedule, num_microbatches: int) -> Schedule | None:
    """Returns `short` extended to more microbatches: each rank repeats its steady state, one pass of each kind and stage.

    Returns None if a rank has no such pattern. No time is simulated: it takes a thousandth of the time of `extend_by_simulation`.
    """
    begin, end = [], []
    for row in short.rows:
        pattern = [op[:2] for op in row]
        first = [at for at, pass_kind in enumerate(pattern) if pass_kind == pattern[0]]
        here, there, after = first[STEADY_AFTER * short.num_ranks :][:3]
        period = pattern[here:there]
        if pattern[there:after] != period or set(period) != set(pattern) or len(period) > len(set(period)):
            return None
        begin.append(here)
        end.append(there)
    return _repeated(short, num_microbatches, begin, end, num_microbatches - short.num_microbatches)


def extend_by_simulation(short: Schedule, costs: Costs, num_microbatches: int) -> Iterator[Schedule]:
    """Yields `short` extended to more microbatches: ranks repeat what they do between two moments, the shortest period first.

    The moments are the starts of the first stage's F of microbatches j and j + n. At the second, every rank must have begun exactly n more
    passes of each kind and stage than at the first. Then the passes in between can repeat any number of times in the same memory. Yields
    nothing if n divides the number of additional microbatches for no such pair of moments.
    """
    rows = simulate(short, costs).rows
    starts = [[span.start for span in row] for row in rows]
    forwards = [span.start for row in rows for span in row if span.op[:2] == (Kind.F, 0)]
    cuts = [tuple(bisect_left(row, moment) for row in starts) for moment in forwards]
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for microbatch, cut in enumerate(cuts):
        alike[tuple(_begun_ahead(short, cut, microbatch))].append(microbatch)
    missing = num_microbatches - short.num_microbatches
    pairs = [pair for same in alike.values() for pair in combinations(same, 2) if missing % (pair[1] - pair[0]) == 0]
    for one, other in sorted(pairs, key=lambda pair: (forwards[pair[1]] - forwards[pair[0]]) / (pair[1] - pair[0])):
        yield _repeated(short, num_microbatches, cuts[one], cuts[other], missing // (other - one))


def _begun_ahead(short: Schedule, cut: Sequence[int], microbatch: int) -> Iterator[int]:
    """Yields, for each kind and stage of each rank, the number of microbatches by which it is ahead of `microbatch`."""
    for row, at in zip(short.rows, cut, strict=True):
        begun = Counter(op[:2] for op in row[:at])
        yield from (begun[one] - microbatch for one in sorted({op[:2] for op in row}))


def _repeated(short: Schedule, num_microbatches: int, begin: Sequence[int], end: Sequence[int], times: int) -> Schedule:
    """Returns `short` with the passes of each rank from `begin` to `end` repeated `times` more. Microbatches are numbered in order."""
    rows = []
    for row, start, stop in zip(short.rows, begin, end, strict=True):
        known: dict[tuple[Kind, int], Iterator[int]] = defaultdict(count)
        rows.append(tuple(Op(*one, next(known[one])) for one in (op[:2] for op in (*row[:stop], *times * row[start:stop], *row[stop:]))))
    return replace(short, num_microbatches=num_microbatches, rows=tuple(rows))
