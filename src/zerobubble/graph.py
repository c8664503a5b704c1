"""A schedule with its dependencies resolved to numbers, once, for everything that walks it.

Passes are numbered row after row; `needs[i]` are the numbers of the passes that make what pass `i` uses, as the rules say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerobubble.ir import Kind, Op, Schedule
from zerobubble.rules import RULES, Stuff, Value


@dataclass(frozen=True, slots=True)
class Graph:
    """`ops` row after row, `rank[i]` where pass i runs, `first[r]` the number of row r's first pass (one entry past the end)."""

    ops: list[Op]
    rank: list[int]
    first: list[int]
    needs: list[tuple[int, ...]]
    missing: list[tuple[int, Value]]

    def position(self, number: int) -> int:
        """Where in its row a pass stands."""
        return number - self.first[self.rank[number]]


def resolve(schedule: Schedule) -> Graph:
    """Number the passes of `schedule` and find each one's makers; uses that nobody makes are listed in `missing`.

    Passes out of range (stage or microbatch) must have been refused before; of duplicates the first one counts.
    """
    ops = [op for row in schedule.rows for op in row]
    rank = [r for r, row in enumerate(schedule.rows) for _ in row]
    first = [0]
    for row in schedule.rows:
        first.append(first[-1] + len(row))
    used, made = _offsets(schedule.num_stages, schedule.num_microbatches)
    maker: dict[int, int] = {}
    for number, (kind, stage, microbatch) in enumerate(ops):
        for base in made[kind][stage]:
            maker.setdefault(base + microbatch, number)
    needs: list[tuple[int, ...]] = []
    missing: list[tuple[int, Value]] = []
    for number, (kind, stage, microbatch) in enumerate(ops):
        found = [maker.get(base + microbatch, -1) for base in used[kind][stage]]
        if -1 in found:
            lost = [base for base, who in zip(used[kind][stage], found, strict=True) if who < 0]
            missing += [(number, _value(base, microbatch, schedule)) for base in lost]
            found = [who for who in found if who >= 0]
        needs.append(tuple(found))
    return Graph(ops, rank, first, needs, missing)


_STUFF = list(Stuff)


def _offsets(stages: int, microbatches: int) -> tuple[dict[Kind, list[list[int]]], dict[Kind, list[list[int]]]]:
    """For each kind and stage, the numbers of the values used and made, for microbatch 0."""

    def base(stuff: Stuff, stage: int) -> int:
        return (_STUFF.index(stuff) * stages + stage) * microbatches

    used = {k: [[base(t, s + h) for t, h in rule.uses if 0 <= s + h < stages] for s in range(stages)] for k, rule in RULES.items()}
    made = {k: [[base(t, s) for t in rule.makes] for s in range(stages)] for k, rule in RULES.items()}
    return used, made


def _value(base: int, microbatch: int, schedule: Schedule) -> Value:
    stuff, stage = divmod(base // schedule.num_microbatches, schedule.num_stages)
    return Value(_STUFF[stuff], stage, microbatch)


def walk(graph: Graph, skip: frozenset[tuple[int, int]] = frozenset()) -> tuple[list[int], list[int]]:
    """Run every row as far as its dependencies allow: (passes in a legal global order, number of passes done per rank).

    `skip` holds (pass, need) pairs to ignore. The schedule can run exactly when every pass is in the order.
    """
    done = bytearray(len(graph.ops))
    heads = list(graph.first[:-1])
    waiting: dict[int, list[int]] = {}
    ready: list[int] = list(range(len(heads)))[::-1]
    order: list[int] = []
    while ready:
        rank = ready.pop()
        number, end = heads[rank], graph.first[rank + 1]
        while number < end:
            blocker = next((n for n in graph.needs[number] if not done[n] and (number, n) not in skip), -1)
            if blocker >= 0:
                waiting.setdefault(blocker, []).append(rank)
                break
            done[number] = 1
            order.append(number)
            if number in waiting:
                ready += waiting.pop(number)
            number += 1
        heads[rank] = number
    return order, [head - start for head, start in zip(heads, graph.first, strict=False)]


def cycles(graph: Graph, heads: Sequence[int], skip: frozenset[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Among ranks stuck at pass `heads[r]` (a count per rank): every circle of waiting, as (stuck pass, pass it needs) pairs."""
    waits: dict[int, tuple[int, int]] = {}
    finished = {number for rank, head in enumerate(heads) for number in range(graph.first[rank], graph.first[rank] + head)}
    for rank, head in enumerate(heads):
        number = graph.first[rank] + head
        if number < graph.first[rank + 1]:
            need = next(n for n in graph.needs[number] if n not in finished and (number, n) not in skip)
            waits[rank] = (number, need)
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
