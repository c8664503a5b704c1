"""The program written out: around each pass the receives posted before it, its send, and the values that end there."""

from __future__ import annotations

from collections import defaultdict

from zerobubble.graph import Graph
from zerobubble.ir import Schedule
from zerobubble.program import Action, Compute, Free, Program, Recv, Send
from zerobubble.rules import MOVING, Value, uses


def write(schedule: Schedule, graph: Graph, users: list[int], posts: list[int], releases: list[int]) -> Program:
    """The program of `schedule`, given per message its user, the pass its receive is posted before and the pass it is freed after.

    What a pass uses nobody else does, so it ends with that pass.
    """
    messages = {i: Value(MOVING[op[0]], op[1], op[2]) for i, op in enumerate(graph.ops) if users[i] >= 0}
    posted, released = _grouped(posts), _grouped(releases)
    rank, stages = graph.rank, schedule.num_stages
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for number, op in enumerate(graph.ops):
        row = rows[rank[number]]
        row += [Recv(messages[i], rank[i]) for i in posted.get(number, ())]
        row.append(Compute(op))
        if number in messages:
            row.append(Send(messages[number], rank[users[number]]))
        row += [Free(value) for value in uses(op, stages)]
        row += [Free(messages[i]) for i in released.get(number, ())]
    return Program(schedule.name, schedule.placement, schedule.num_microbatches, tuple(map(tuple, rows)), schedule.microbatch_routes)


def _grouped(points: list[int]) -> dict[int, list[int]]:
    """The messages by their point, in the order of their makers."""
    found: dict[int, list[int]] = defaultdict(list)
    for maker, point in enumerate(points):
        if point >= 0:
            found[point].append(maker)
    return found
