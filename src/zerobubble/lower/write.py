"""The program written out: around each step the receives posted before it, its sends, and the sent values that may go."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

from zerobubble.graph import Graph
from zerobubble.ir import Schedule
from zerobubble.program import Action, Compute, Free, Program, Recv, Send
from zerobubble.rules import MOVING, Value


def write(schedule: Schedule, graph: Graph, users: list[int], posts: list[int], releases: list[int]) -> Program:
    """The program of `schedule`, given per message its user, the pass its receive is posted before and the pass it is freed after."""
    rank = graph.rank
    messages = {i: Value(MOVING[graph.ops[i][0]], *graph.ops[i][1:]) for i, user in enumerate(users) if user >= 0}
    posted = _grouped(posts, {i: Recv(value, rank[i]) for i, value in messages.items()})
    sent = {i: Send(value, rank[users[i]]) for i, value in messages.items()}
    released = _grouped(releases, {i: Free(value) for i, value in messages.items()})
    rows: list[tuple[Action, ...]] = []
    number = 0
    for steps in schedule.steps:
        row: list[Action] = []
        for step in steps:
            passes = (number,) if len(step) == 1 else (number, number + 1)
            number += len(step)
            for at in passes:
                row += posted.get(at, ())
            row.append(Compute(step))
            for at in passes:
                if at in sent:
                    row.append(sent[at])
                row += released.get(at, ())
        rows.append(tuple(row))
    return Program(*schedule.head[:3], tuple(rows), schedule.microbatch_routes)


Message = TypeVar("Message", Recv, Free)


def _grouped(points: list[int], actions: dict[int, Message]) -> dict[int, list[Message]]:
    """The actions of the messages by their point, in the order of their makers."""
    found: dict[int, list[Message]] = defaultdict(list)
    for maker, action in actions.items():
        found[points[maker]].append(action)
    return dict(found)
