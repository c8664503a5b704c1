"""A schedule with its dependencies resolved to numbers, once, for everything that walks it.

Passes are numbered row after row; `needs[i]` are the numbers of the passes that make what pass `i` uses, as the rules say. The two
passes of an overlapped step wait together: `joint_needs` gives the first what both need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from typing import NamedTuple

from zerobubble.ir import Op, Schedule
from zerobubble.kinds import HELD, KINDS, MOVES, Collective, Kind, Stuff, made_where
from zerobubble.rules import gathered, given_to, recomputed, used_stages

Needs = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Graph:
    """`ops` row after row, `rank[i]` where pass i runs, `first[r]` the number of row r's first pass (one entry past the end).

    `pairs` are the passes that run overlapped with the pass after them.
    """

    ops: list[Op]
    rank: list[int]
    first: list[int]
    needs: list[tuple[int, ...]]
    pairs: frozenset[int] = frozenset()

    def position(self, number: int) -> int:
        """Where in its row a pass stands."""
        return number - self.first[self.rank[number]]

    def steps(self) -> Iterator[tuple[int, ...]]:
        """The numbers of the passes of each step, row after row."""
        for number in range(len(self.ops)):
            if number - 1 not in self.pairs:
                yield (number, number + 1) if number in self.pairs else (number,)


def resolve(schedule: Schedule) -> Graph:
    """Number the passes of `schedule` and find the makers of what each uses; a use that nobody makes is left out.

    Passes of unknown kinds or out of range (stage or microbatch) must have been refused before; of duplicates the first one counts.
    """
    ops = list(chain.from_iterable(schedule.rows))
    rank = list(chain.from_iterable(repeat(r, len(row)) for r, row in enumerate(schedule.rows)))
    first = [0]
    for row in schedule.rows:
        first.append(first[-1] + len(row))
    used, made = _value_numbers(schedule.num_stages, schedule.num_microbatches)
    again = recomputed(ops)
    lean = {kind: _made_numbers(schedule.num_stages, schedule.num_microbatches, kind) for kind in {*again.values()}}
    maker = [-1] * (len((*MOVES, *HELD)) * schedule.num_stages * schedule.num_microbatches)
    for number in reversed(range(len(ops))):
        kind, stage, microbatch = ops[number]
        here = lean[again[stage, microbatch]] if again and (stage, microbatch) in again else made
        for value in here[kind][stage]:
            maker[value + microbatch] = number
    needs = [tuple([maker[v + microbatch] for v in used[kind][stage]]) for kind, stage, microbatch in ops]
    if -1 in maker:
        needs = [tuple(need for need in known if need >= 0) if -1 in known else known for known in needs]
    if schedule.has_divided_head:
        needs = _with_collectives(ops, needs, schedule.num_stages)
    together = schedule.overlaps
    pairs = frozenset(i for i, both in enumerate(pairwise(ops)) if both in together) if together else frozenset()
    return Graph(ops, rank, first, needs, pairs)


def _with_collectives(ops: list[Op], needs: list[tuple[int, ...]], num_stages: int) -> list[tuple[int, ...]]:
    """`needs` where whoever gathers also waits for all that give to the same collective for its microbatch; of duplicates the first."""
    givers: dict[tuple[Collective, int], dict[Op, int]] = defaultdict(dict)
    for number, op in enumerate(ops):
        for collective in given_to(op.kind, op.stage, num_stages):
            givers[collective, op.microbatch].setdefault(op, number)
    more = [[n for c in gathered(op.kind, op.stage, num_stages) for n in givers[c, op.microbatch].values()] for op in ops]
    return [tuple(dict.fromkeys((*known, *others))) if others else known for known, others in zip(needs, more, strict=True)]


def joint_needs(graph: Graph, needs: Needs) -> Needs:
    """`needs` where the first pass of an overlapped step also waits for what the second one needs."""
    if not graph.pairs:
        return needs
    joint = list(needs)
    for number in graph.pairs:
        joint[number] = tuple(need for need in (*needs[number], *needs[number + 1]) if need != number)
    return joint


ByStage = dict[Kind, list[list[int]]]
"""For each kind and stage, the numbers of values, for microbatch 0."""


def _value_numbers(stages: int, microbatches: int) -> tuple[ByStage, ByStage]:
    """The numbers of the values used and made, where no forward is computed again."""
    start = _starts(stages, microbatches)
    used = {k: [[start[t] + at * microbatches for t, at in used_stages(k, s, stages)] for s in range(stages)] for k in KINDS}
    return used, _made_numbers(stages, microbatches, None)


def _made_numbers(stages: int, microbatches: int, again: Kind | None) -> ByStage:
    """The numbers of the values made where a pass of kind `again` computes the forward again."""
    start = _starts(stages, microbatches)
    return {k: [[start[t] + s * microbatches for t in made_where(k, again)] for s in range(stages)] for k in KINDS}


def _starts(stages: int, microbatches: int) -> dict[Stuff, int]:
    """The number of the first value of each stuff."""
    return {stuff: k * stages * microbatches for k, stuff in enumerate((*MOVES, *HELD))}


def walk(graph: Graph, needs: Needs, heads: list[int]) -> list[int]:
    """Run every row from `heads[r]`, its next pass, as far as `needs` allow, and move the heads; the passes run, in a legal order.

    Every pass can run exactly when all heads reach the end of their rows: `heads == graph.first[1:]`.
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
    """By pass number: when each pass begins and ends, and the pass that it came right after, -1 for none.

    That is the pass before it on its rank or, where it had to wait for a message, the pass that sent it.
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
    """Play the passes of `order` in time, each as soon as its rank is free and what it uses has arrived. All times by pass number.

    `takes[i]` is how long the step that begins with pass i lasts; the second pass of an overlapped step has 0 and gets the times of the
    first. `delays[i]` is how long after the end of pass i its message is there, `lags[i]` how long pass i waits beyond all this; both are
    0 where they are not given. `earliest(i, end)` is before which time step i cannot begin for reasons beside passes, where `end[j]` is
    when each pass before it ended. `order` respects needs, as that of `walk` does; on each rank it says who comes after whom. Passes
    that it leaves out count as done from the beginning.
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
    """Among ranks stuck at pass `heads[r]`: every circle of waiting, as (stuck pass, pass it needs) pairs."""
    waits: dict[int, tuple[int, int]] = {}
    for rank, number in enumerate(heads):
        if number < graph.first[rank + 1]:
            waits[rank] = (number, next(need for need in needs[number] if need >= heads[graph.rank[need]]))
    found: list[list[tuple[int, int]]] = []
    seen: set[int] = set()
    for start in waits:
        path: list[int] = []
        rank = start
        while rank not in seen and rank in waits:
            seen.add(rank)
            path.append(rank)
            rank = graph.rank[waits[rank][1]]
        if rank in path:
            found.append([waits[r] for r in path[path.index(rank) :]])
    return found
