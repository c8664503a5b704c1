"""Lengthening: the steady state of a searched schedule of few microbatches is repeated for many.

Each evaluation plays every pass, so a good order of few microbatches is found much sooner than one of many. Between warm-up and cool-down
the ranks repeat a pattern; repeating it more often keeps all dependencies and the peak memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, count

from zerobubble.costs import Costs
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.planning.problem.problem import Problem
from zerobubble.simulation import simulate

MIDDLE = 6
"""Microbatches beyond two per rank that show part of the steady state between warm-up and cool-down."""

LONG = 3
"""Microbatches per rank above which searching few microbatches first pays."""

MOST_PASSES = 60_000
"""Passes of the schedule of few microbatches above which its search would begin with seconds of preparation."""


def with_few_microbatches(problem: Problem) -> Problem | None:
    """`problem` with so few microbatches that its schedule can be lengthened; None if it has hardly more, or too many passes."""
    ranks = problem.placement.num_ranks
    few = replace(problem, num_microbatches=2 * ranks + MIDDLE)
    return few if problem.num_microbatches > max(LONG * ranks, few.num_microbatches) and few.num_passes <= MOST_PASSES else None


def lengthened_by_time(short: Schedule, costs: Costs, num_microbatches: int) -> Iterator[Schedule]:
    """`short` for more microbatches, with what its ranks do between two moments repeated, the shortest period first.

    The moments are the starts of the first stage's F of two microbatches, n apart, such that at the second every rank has begun exactly n
    more passes of each kind and stage than at the first. Then what follows the first moment can equally follow the second, in the same
    memory, any number of times. Nothing is returned if there are no such moments whose n divides the microbatches that `short` lacks.
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
    """How many microbatches each kind and stage of each rank is ahead of `microbatch`."""
    for row, at in zip(short.rows, cut, strict=True):
        begun = Counter(op[:2] for op in row[:at])
        yield from (begun[one] - microbatch for one in sorted({op[:2] for op in row}))


def _repeated(short: Schedule, num_microbatches: int, begin: Sequence[int], end: Sequence[int], times: int) -> Schedule:
    """`short` with the passes of each rank between two places repeated `times` more. Equal microbatches are numbered in order."""
    rows = []
    for row, start, stop in zip(short.rows, begin, end, strict=True):
        known: dict[tuple[Kind, int], Iterator[int]] = defaultdict(count)
        rows.append(tuple(Op(*one, next(known[one])) for one in (op[:2] for op in (*row[:stop], *times * row[start:stop], *row[stop:]))))
    return replace(short, num_microbatches=num_microbatches, rows=tuple(rows))
