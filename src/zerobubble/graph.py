"""A schedule as a graph of numbered passes, and the two algorithms that run it: `walk` without times and `play` with times.

Passes are numbered row after row, and `needs[i]` are the passes that make the values that pass i uses. A schedule can run exactly if the
union of `needs` and the order of each row has no cycle. `walk` runs every row as far as it can; if all rows reach their end, the order in
which it ran the passes is a topological order. `play` computes start times in one sweep over such an order: each pass starts at the latest
of the end of the pass before it on its rank and the arrivals of its messages. This is the longest path to the pass, so no start can be
earlier. One order serves for any costs, since start times do not change which pass depends on which.

The two passes of an overlapped step start together. `joint_needs` therefore gives the first of them the needs of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, repeat
from typing import NamedTuple

from zerobubble.ir import Op, Schedule
from zerobubble.kinds import HELD, KINDS, SENT_BETWEEN_STAGES, Collective, Kind, ValueKind, makes_if_recomputed
from zerobubble.rules import carried_from, carried_to, gathered, given_to, recomputed, used_stages

Needs = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Graph:
    """`ops` are the passes row after row, `rank[i]` the rank of pass i, `first[r]` the first pass of row r (and one entry past the end).

    `pairs` are the passes that run overlapped with the pass after them.
    """

    ops: list[Op]
    rank: list[int]
    first: list[int]
    needs: list[tuple[int, ...]]
    pairs: frozenset[int] = frozenset()

    def position(self, number: int) -> int:
        """Return the position of a pass in its row."""
        return number - self.first[self.rank[number]]

    def steps(self) -> Iterator[tuple[int, ...]]:
        """Yield the pass numbers of each step, row after row."""
        for number in range(len(self.ops)):
            if number - 1 not in self.pairs:
                yield (number, number + 1) if number in self.pairs else (number,)


def resolve(schedule: Schedule) -> Graph:
    """Number the passes of `schedule` and find the makers of the values that each uses. A value that no pass makes is left out.

    The caller must already have rejected passes of unknown kinds and out of range. If a pass occurs twice, the first one counts.
    """
    ops = list(chain.from_iterable(schedule.rows))
    rank = list(chain.from_iterable(repeat(r, len(row)) for r, row in enumerate(schedule.rows)))
    first = [0, *accumulate(map(len, schedule.rows))]
    used, maker = _used_numbers(schedule.num_stages, schedule.num_microbatches), _makers(schedule, ops)
    needs = [tuple([maker[v + microbatch] for v in used[kind][stage]]) for kind, stage, microbatch in ops]
    if -1 in maker:
        needs = [tuple(number for number in numbers if number >= 0) if -1 in numbers else numbers for numbers in needs]
    if schedule.has_divided_head:
        needs = _with_collectives(ops, needs, schedule.num_stages)
    if schedule.slices > 1:
        needs = _with_slices(ops, needs, schedule.slices)
    together = schedule.overlaps
    pairs = frozenset(i for i, both in enumerate(pairwise(ops)) if both in together) if together else frozenset()
    return Graph(ops, rank, first, needs, pairs)


def _makers(schedule: Schedule, ops: list[Op]) -> list[int]:
    """Return the number of the pass that makes each value, by the number of the value; -1 for a value that no pass makes."""
    shape = schedule.num_stages, schedule.num_microbatches
    made_numbers, recomputed_by = _made_numbers(*shape, None), recomputed(ops)
    checkpointed = {kind: _made_numbers(*shape, kind) for kind in {*recomputed_by.values()}}
    maker = [-1] * (len((*SENT_BETWEEN_STAGES, *HELD)) * schedule.num_stages * schedule.num_microbatches)
    for number in reversed(range(len(ops))):  # in reverse, so that the first of duplicates is the last to be written
        kind, stage, microbatch = ops[number]
        numbers = checkpointed[recomputed_by[stage, microbatch]] if (stage, microbatch) in recomputed_by else made_numbers
        for value in numbers[kind][stage]:
            maker[value + microbatch] = number
    return maker


def _with_collectives(ops: list[Op], needs: list[tuple[int, ...]], num_stages: int) -> list[tuple[int, ...]]:
    """Return `needs` in which every pass that gathers also waits for all passes that give to the same collective and microbatch."""
    givers: dict[tuple[Collective, int], dict[Op, int]] = defaultdict(dict)
    for number, op in enumerate(ops):
        for collective in given_to(op.kind, op.stage, num_stages):
            givers[collective, op.microbatch].setdefault(op, number)
    more = [[n for c in gathered(op.kind, op.stage, num_stages) for n in givers[c, op.microbatch].values()] for op in ops]
    return [tuple(dict.fromkeys((*makers, *others))) if others else makers for makers, others in zip(needs, more, strict=True)]


def _with_slices(ops: list[Op], needs: list[tuple[int, ...]], slices: int) -> list[tuple[int, ...]]:
    """Return `needs` in which every pass also waits for the passes of neighboring slices whose values it uses."""
    maker: dict[tuple[ValueKind, int, int], int] = {}
    for number, op in enumerate(ops):
        for value_kind in carried_from(op.kind, op.microbatch, slices):
            maker.setdefault((value_kind, op.stage, op.microbatch), number)
    more = [[maker.get((value_kind, op.stage, j), -1) for value_kind, j in carried_to(op.kind, op.microbatch, slices)] for op in ops]
    return [tuple(dict.fromkeys((*makers, *(n for n in others if n >= 0)))) for makers, others in zip(needs, more, strict=True)]


def joint_needs(graph: Graph, needs: Needs) -> Needs:
    """Return `needs` in which the first pass of each overlapped step also has the needs of the second."""
    if not graph.pairs:
        return needs
    joint = list(needs)
    for number in graph.pairs:
        joint[number] = tuple(need for need in (*needs[number], *needs[number + 1]) if need != number)
    return joint


ByStage = dict[Kind, list[list[int]]]
"""For each kind and stage, the numbers of its values for microbatch 0. Adding j gives those for microbatch j."""


def _used_numbers(stages: int, microbatches: int) -> ByStage:
    """Return the numbers of the values used by each pass."""
    start = _starts(stages, microbatches)
    return {k: [[start[t] + at * microbatches for t, at in used_stages(k, s, stages)] for s in range(stages)] for k in KINDS}


def _made_numbers(stages: int, microbatches: int, recomputed_by: Kind | None) -> ByStage:
    """Return the numbers of the values made by each pass if a pass of kind `recomputed_by` recomputes the forward."""
    start = _starts(stages, microbatches)
    return {k: [[start[t] + s * microbatches for t in makes_if_recomputed(k, recomputed_by)] for s in range(stages)] for k in KINDS}


def _starts(stages: int, microbatches: int) -> dict[ValueKind, int]:
    """Return the number of the first value of each value kind."""
    return {value_kind: k * stages * microbatches for k, value_kind in enumerate((*SENT_BETWEEN_STAGES, *HELD))}


def walk(graph: Graph, needs: Needs, heads: list[int]) -> list[int]:
    """Run every row as far as `needs` allow, from its next pass `heads[r]`, and advance `heads`. Return the passes in the order they ran.

    That order respects the rows and `needs`. All passes can run exactly if every head reaches the end of its row:
    `heads == graph.first[1:]`. Each pass is visited once, plus once for each time its rank is woken, so the time is linear in `needs`.
    """
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(heads)))[::-1]
    order: list[int] = []
    done = bytearray(len(graph.ops))
    for start, head in zip(graph.first, heads, strict=False):
        done[start:head] = b"\1" * (head - start)
    while ready:
        here = ready.pop()
        number, end = heads[here], graph.first[here + 1]
        blocker = -1
        while number < end and blocker < 0:
            for need in needs[number]:
                if not done[need]:
                    # The row sleeps until this pass has run; its other needs are checked again then.
                    blocker = need
                    waiting.setdefault(need, []).append(here)
                    break
            else:
                order.append(number)
                done[number] = 1
                if number in waiting:
                    ready += waiting.pop(number)
                number += 1
        heads[here] = number
    return order


class Played(NamedTuple):
    """By pass number: when each pass begins and ends, and `after`, the pass that determined its start, -1 for none.

    That is the pass before it on its rank or, if it waited for a message, the pass that sent it. Following `after` from the last pass
    gives the critical path.
    """

    begin: list[int]
    end: list[int]
    after: list[int]


def play(
    graph: Graph,
    order: Iterable[int],
    takes: Sequence[int],
    delays: Sequence[int] | None = None,
    lags: Sequence[int] | None = None,
    earliest: Callable[[int, Sequence[int]], int] | None = None,
) -> Played:
    """Compute when each pass begins and ends if it starts as soon as its rank is free and its messages have arrived.

    `order` must respect needs, as an order of `walk` does, and determines the order on each rank. Passes that are not in `order` count
    as done from the beginning.

    Arguments:
        graph: the passes and their needs.
        order: the passes to play, each after its needs.
        takes: duration of the step that begins with each pass. The second pass of an overlapped step has 0; it gets the times of the first.
        delays: time from the end of each pass to the arrival of its message; 0 by default.
        lags: additional wait before each pass; 0 by default.
        earliest: a function of pass i and the end times so far that returns a lower bound for the start of i, for constraints outside the
            graph, such as a copy lane. It is called once for each pass, in `order`, so it may keep state.
    """
    rank, needs = graph.rank, joint_needs(graph, graph.needs)
    none = [0] * len(rank)
    delays, lags = delays or none, lags or none
    begin, end, after = list(none), list(none), [-1] * len(rank)
    free, last = [0] * (len(graph.first) - 1), [-1] * (len(graph.first) - 1)
    for number in order:
        here = rank[number]
        start, cause = free[here], last[here]
        for need in needs[number]:
            # A need on the same rank ended before `free[here]`, since `order` respects needs. Only messages can delay the start.
            if rank[need] != here:
                arrival = end[need] + delays[need]
                if arrival > start:
                    start, cause = arrival, need
        start += lags[number]
        if earliest is not None:
            start = max(start, earliest(number, end))
        begin[number], after[number] = start, cause
        free[here] = end[number] = start + takes[number]
        last[here] = number
    for first in graph.pairs:
        begin[first + 1], after[first + 1] = begin[first], after[first]
    return Played(begin, end, after)


def circles(graph: Graph, needs: Needs, heads: list[int]) -> list[list[tuple[int, int]]]:
    """Return every cycle of waiting among ranks stuck at pass `heads[r]`, as pairs (stuck pass, pass that it needs).

    Each stuck rank waits for exactly one other stuck rank, so following the waits from any of them ends in a cycle.
    """
    waits: dict[int, tuple[int, int]] = {}
    for rank, number in enumerate(heads):
        if number < graph.first[rank + 1]:
            waits[rank] = (number, next(need for need in needs[number] if need >= heads[graph.rank[need]]))
    cycles: list[list[tuple[int, int]]] = []
    seen: set[int] = set()
    for start in waits:
        path: list[int] = []
        rank = start
        while rank not in seen and rank in waits:
            seen.add(rank)
            path.append(rank)
            rank = graph.rank[waits[rank][1]]
        if rank in path:
            cycles.append([waits[r] for r in path[path.index(rank) :]])
    return cycles
