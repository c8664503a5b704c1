"""Orders that several schedules share: groups of microbatches going round a loop, and microbatches in step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zerobubble.ir import Kind, Op, Placement


def groups_of(microbatches: int, count: int) -> list[range]:
    """The microbatches cut into `count` groups whose sizes differ by at most 1, the larger ones first."""
    ends = [k * (microbatches // count) + min(k, microbatches % count) for k in range(count + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


def round_trips(kind: Kind, stages: Sequence[int], groups: Sequence[range]) -> list[Op]:
    """A rank's passes of one kind: group by group through its `stages`, F from the first to the last, other kinds back."""
    along = stages if kind is Kind.F else stages[::-1]
    return [Op(kind, stage, j) for group in groups for stage in along for j in group]


def in_step(placement: Placement, entries: Sequence[tuple[int, int]]) -> tuple[tuple[Op, ...], ...]:
    """The rows where every microbatch passes one stage a tick, forward and from the last stage straight back.

    `entries` are the tick at which each microbatch enters and its route. Of several passes at one tick a rank runs the backward
    first, which gives memory back.
    """
    rows: list[list[tuple[int, bool, Op]]] = [[] for _ in range(placement.num_ranks)]
    for microbatch, (tick, route) in enumerate(entries):
        ranks = placement.routes[route]
        leaves = tick + 2 * len(ranks) - 1
        for stage, rank in enumerate(ranks):
            rows[rank].append((tick + stage, True, Op(Kind.F, stage, microbatch)))
            rows[rank].append((leaves - stage, False, Op(Kind.BW, stage, microbatch)))
    return tuple(tuple(op for _, _, op in sorted(row)) for row in rows)
