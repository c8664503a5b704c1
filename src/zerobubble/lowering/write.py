"""Writes the actions of a program: before each step its receives, after it its sends, then the frees.

Sends come before frees, because a value may be freed after the step that sends it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from zerobubble.graph import Graph
from zerobubble.ir import Schedule
from zerobubble.lowering.messages import Message
from zerobubble.program import Action, Compute, Free, Program, Recv, Send
from zerobubble.rules import Value


def write(schedule: Schedule, graph: Graph, messages: Sequence[Message], posts: Sequence[int], releases: Mapping[Value, int]) -> Program:
    """Return the program of `schedule`.

    `posts` has, for each message, the pass before which its receive is posted. `releases` has, for each sent value, the pass after which
    it is freed.
    """
    rank = graph.rank
    receives, frees = defaultdict[int, list[Recv]](list), defaultdict[int, list[Free]](list)
    sends = defaultdict[int, list[Send]](list)
    for message, post in zip(messages, posts, strict=True):
        receives[post].append(Recv(message.value, rank[message.maker]))
        sends[message.maker].append(Send(message.value, rank[message.user]))
    for value, release in releases.items():
        frees[release].append(Free(value))
    rows: list[tuple[Action, ...]] = []
    number = 0
    for steps in schedule.steps:
        row: list[Action] = []
        for step in steps:
            passes = (number,) if len(step) == 1 else (number, number + 1)
            number += len(step)
            for at in passes:
                if at in receives:
                    row += receives[at]
            row.append(Compute(step))
            for at in passes:
                if at in sends:
                    row += sends[at]
                if at in frees:
                    row += frees[at]
        rows.append(tuple(row))
    return Program(*schedule.header[:3], tuple(rows), schedule.microbatch_routes)
