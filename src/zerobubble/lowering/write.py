"""The program written out: around each step the receives posted before it, its sends, and the sent values that may go."""

from __future__ import annotations

from collections import defaultdict

from zerobubble.graph import Graph
from zerobubble.ir import Schedule
from zerobubble.kinds import ByKind
from zerobubble.program import Action, Compute, Free, Program, Recv, Send
from zerobubble.rules import Value, moving


def write(schedule: Schedule, graph: Graph, users: list[int], posts: list[int], releases: list[int]) -> Program:
    """The program of `schedule`, given per message its user, the pass its receive is posted before and the pass it is freed after."""
    rank = graph.rank
    posted, released = defaultdict[int, list[Recv]](list), defaultdict[int, list[Free]](list)
    sent: dict[int, Send] = {}
    carried = ByKind(moving)
    for maker, user in enumerate(users):
        if user >= 0:
            kind, stage, microbatch = graph.ops[maker]
            value = Value(carried[kind], stage, microbatch)
            posted[posts[maker]].append(Recv(value, rank[maker]))
            sent[maker] = Send(value, rank[user])
            released[releases[maker]].append(Free(value))
    rows: list[tuple[Action, ...]] = []
    number = 0
    for steps in schedule.steps:
        row: list[Action] = []
        for step in steps:
            passes = (number,) if len(step) == 1 else (number, number + 1)
            number += len(step)
            for at in passes:
                if at in posted:
                    row += posted[at]
            row.append(Compute(step))
            for at in passes:
                if at in sent:
                    row.append(sent[at])
                if at in released:
                    row += released[at]
        rows.append(tuple(row))
    return Program(*schedule.head[:3], tuple(rows), schedule.microbatch_routes)
