"""Times of the gradient sums over replicas, which run in parallel with the passes of each rank.

The sums of a rank run one after another, because they share its network link. The sum of a stage can begin when the last pass that adds to
the stage's gradients has ended, and sums run in the order of these passes. All replicas have the same order, so this order cannot deadlock.
A stage that several ranks hold, as in bidirectional schedules, is summed over those ranks first. That sum comes after the rows of all of
them, since it blocks each of the ranks until the others take part.

If the row of a stage ends with W passes, these can process one parameter at a time for all microbatches.
Then the gradients leave in buckets, each as soon as the last of its parameters is done, and most of the sum overlaps with the W passes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from zerobubble.costs import Costs
from zerobubble.graph import Graph
from zerobubble.ir import Kind, Op
from zerobubble.kinds import traits_of
from zerobubble.timeline import ReplicaSum


class StageSum(NamedTuple):
    """A sum of the gradients of a stage, or of one bucket of them, which takes `takes` ns.

    It begins `lag` ns after both the previous sum has ended and the passes `after` have ended. `ahead` is how long before the end of these
    passes its gradients are complete.
    """

    stage: int
    after: tuple[int, ...]
    takes: int = 0
    lag: int = 0
    ahead: int = 0


RankSums = Sequence[Sequence[StageSum]]
"""The sums of each rank, in the order in which they run."""


def stage_sums(graph: Graph) -> RankSums:
    """Return the stages that each rank sums, in the order in which their gradients are complete, without times."""
    last: list[dict[int, int]] = [{} for _ in graph.first[1:]]
    for number, op in enumerate(graph.ops):
        if traits_of(op.kind).adds_gradients:
            here = last[graph.rank[number]]
            here.pop(op.stage, None)  # reinsert, so that the dictionary is in the order of the last passes
            here[op.stage] = number
    holders: dict[int, list[int]] = {}
    for rank, stages in enumerate(last):
        for stage in stages:
            holders.setdefault(stage, []).append(rank)
    return [_of_rank(graph, stages, holders) for stages in last]


def _of_rank(graph: Graph, last: dict[int, int], holders: dict[int, list[int]]) -> list[StageSum]:
    alone = [StageSum(stage, (number,)) for stage, number in last.items() if len(holders[stage]) == 1]
    shared = [stage for stage in sorted(last) if len(holders[stage]) > 1]
    ends = {rank: graph.first[rank + 1] - 1 for stage in shared for rank in holders[stage]}
    return [*alone, *(StageSum(stage, tuple(ends[rank] for rank in holders[stage])) for stage in shared)]


def planned_sums(graph: Graph, costs: Costs) -> RankSums:
    """Return the sums of each rank with the times of `costs`, without those that take no time."""
    if not any(costs.reduce):
        return [[] for _ in graph.first[1:]]
    tails = _tails(graph)
    return [
        [bucket for total in row if costs.reduce[total.stage] for bucket in _in_buckets(graph, total, tails.get(total.after, ()), costs)]
        for row in stage_sums(graph)
    ]


def weight_tails(row: Sequence[Op], overlapped: Collection[int] = ()) -> dict[int, tuple[int, ...]]:
    """Return the positions of the final W passes of each stage in a row. Between the first and the last of them the row has only W.

    A stage is left out if its last pass that adds to gradients is not a W or is at one of the `overlapped` positions.

    >>> weight_tails([Op.parse(text) for text in "0W0 1B1 1W0 0W1 1W1 0W2 0F3".split()])
    {0: (3, 5), 1: (2, 4)}
    """
    tails: dict[int, list[int]] = {}
    complete: set[int] = set()
    for place in reversed(range(len(row))):
        op = row[place]
        if op.kind is not Kind.W or place in overlapped:
            complete |= tails.keys()
            if traits_of(op.kind).adds_gradients:
                complete.add(op.stage)
        elif op.stage not in complete:
            tails.setdefault(op.stage, []).insert(0, place)
    return {stage: tuple(tails[stage]) for stage in sorted(tails)}


def _tails(graph: Graph) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the pass numbers of each tail, keyed by its last pass in the form of `StageSum.after`."""
    tails: dict[tuple[int, ...], tuple[int, ...]] = {}
    for first, stop in pairwise(graph.first):
        overlapped = {number + more - first for number in graph.pairs for more in (0, 1)}
        for places in weight_tails(graph.ops[first:stop], overlapped).values():
            tails[(first + places[-1],)] = tuple(first + place for place in places)
    return tails


def _in_buckets(graph: Graph, whole: StageSum, tail: Sequence[int], costs: Costs) -> list[StageSum]:
    """Return the sums of the buckets that leave during a `tail`, assuming that buckets take equal shares of its time."""
    takes, count = costs.reduce[whole.stage], costs.buckets[whole.stage]
    ends = tuple(accumulate(costs.time(*graph.ops[number]) for number in tail))
    if count < 2 or not ends or not ends[-1]:
        return [whole._replace(takes=takes)]
    return [StageSum(whole.stage, (tail[place],), part, ahead=ahead) for place, part, ahead in _parts(takes, count, ends)]


@lru_cache(maxsize=64)
def _parts(takes: int, count: int, ends: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return, for each bucket, the pass in which it leaves, the time of its sum, and how long before the end of that pass it leaves.

    Cached, since equal stages and all schedules of a search share the result.
    """
    parts = []
    for number in range(1, count + 1):
        done = -(-number * ends[-1] // count)  # the time of the tail up to the bucket's last parameter, rounded up
        place = bisect_left(ends, done)
        parts.append((place, takes * number // count - takes * (number - 1) // count, ends[place] - done))
    return parts


def measured_sums(graph: Graph, rows: Sequence[Sequence[ReplicaSum]], end: Sequence[int], origin: int) -> RankSums:
    """Return the sums measured in `rows`, with lags that reproduce the measured times if passes end at `end`.

    A sum that began during the tail of its stage counts as a bucket whose last parameter was done at that moment. `origin` is the time in
    `rows` that corresponds to 0 in `end`.
    """
    sums = []
    tails = _tails(graph)
    for planned, row in zip(stage_sums(graph), rows, strict=True):
        after = {stage_sum.stage: stage_sum.after for stage_sum in planned}
        free, measured = 0, []
        for stage, start, stop in row:
            begin = start - origin
            waits = _waits_for(stage, after[stage], tails.get(after[stage], ()), end, begin)
            measured.append(waits._replace(takes=stop - start, lag=begin - _ready(waits, end, free)))
            free = stop - origin
        sums.append(measured)
    return sums


def _waits_for(stage: int, after: tuple[int, ...], tail: Sequence[int], end: Sequence[int], begin: int) -> StageSum:
    """Return what a sum of `stage` that began at `begin` waited for: a part of a pass of the `tail`, or all passes `after`."""
    during = next((number for number in tail if end[number] >= begin), None)
    return StageSum(stage, after) if during is None else StageSum(stage, (during,), ahead=end[during] - begin)


def play_sums(sums: RankSums, end: Sequence[int]) -> tuple[tuple[ReplicaSum, ...], ...]:
    """Return when each sum begins and ends, given the ends of the passes by number."""
    rows = []
    for rank_sums in sums:
        free, row = 0, []
        for stage_sum in rank_sums:
            begin = _ready(stage_sum, end, free) + stage_sum.lag
            free = begin + stage_sum.takes
            row.append(ReplicaSum(stage_sum.stage, begin, free))
        rows.append(tuple(row))
    return tuple(rows)


def _ready(stage_sum: StageSum, end: Sequence[int], free: int) -> int:
    for number in stage_sum.after:
        if end[number] - stage_sum.ahead > free:
            free = end[number] - stage_sum.ahead
    return free
