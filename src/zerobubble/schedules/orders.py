"""Orders that several schedules share: groups of microbatches on looped stages, and microbatches that advance in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zerobubble.ir import Kind, Op, Placement


def groups_of(microbatches: int, count: int) -> list[range]:
    """Split the microbatches into `count` groups whose sizes differ by at most 1, larger ones first."""
    ends = [k * (microbatches // count) + min(k, microbatches % count) for k in range(count + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


def slices_in_reverse(microbatches: int, slices: int) -> list[int]:
    """Return the numbers of all slices in the order of their backward passes: microbatch after microbatch, the last slice first."""
    return [first + k for first in range(0, microbatches * slices, slices) for k in reversed(range(slices))]


def round_trips(kind: Kind, stages: Sequence[int], groups: Sequence[range]) -> list[Op]:
    """Return a rank's passes of one kind: group by group through its `stages`, in reverse order for all kinds but F."""
    along = stages if kind is Kind.F else stages[::-1]
    return [Op(kind, stage, j) for group in groups for stage in along for j in group]


def lockstep_rows(placement: Placement, entries: Sequence[tuple[int, int]]) -> tuple[tuple[Op, ...], ...]:
    """Return the rows in which every microbatch advances one stage per tick, forward to the last stage and straight back.

    `entries` has, for each microbatch, the tick at which it enters and its route. If several passes of a rank fall on one tick,
    the backward runs first, since it frees memory.
    """
    rows: list[list[tuple[int, bool, Op]]] = [[] for _ in range(placement.num_ranks)]
    for microbatch, (tick, route) in enumerate(entries):
        ranks = placement.routes[route]
        leaves = tick + 2 * len(ranks) - 1
        for stage, rank in enumerate(ranks):
            rows[rank].append((tick + stage, True, Op(Kind.F, stage, microbatch)))
            rows[rank].append((leaves - stage, False, Op(Kind.BW, stage, microbatch)))
    return tuple(tuple(op for _, _, op in sorted(row)) for row in rows)
