"""The program written out: around each step the receives posted before it, its sends, and the values that end there."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

from zerobubble.graph import Graph
from zerobubble.ir import Kind, Schedule
from zerobubble.program import Action, Compute, Free, Program, Recv, Send
from zerobubble.rules import MOVING, RULES, Stuff, Value, used_stages


def write(schedule: Schedule, graph: Graph, users: list[int], posts: list[int], releases: list[int]) -> Program:
    """The program of `schedule`, given per message its user, the pass its receive is posted before and the pass it is freed after.

    What a pass uses nobody else does, so it ends with that pass's step.
    """
    frees, ended = _frees(schedule)
    ops, rank = graph.ops, graph.rank
    messages = {i: frees[MOVING[ops[i][0]]][ops[i][1]][ops[i][2]] for i, user in enumerate(users) if user >= 0}
    posted = _grouped(posts, {i: Recv(message.value, rank[i]) for i, message in messages.items()})
    released = _grouped(releases, messages)
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
                if at in messages:
                    row.append(Send(messages[at].value, rank[users[at]]))
                kind, stage, microbatch = ops[at]
                row += [column[microbatch] for column in ended[kind][stage]]
                row += released.get(at, ())
        rows.append(tuple(row))
    return Program(*schedule.head[:3], tuple(rows), schedule.microbatch_routes)


Frees = dict[Stuff, list[list[Free]]]


def _frees(schedule: Schedule) -> tuple[Frees, dict[Kind, list[list[list[Free]]]]]:
    """The action that ends each value, by stuff, stage and microbatch, made once; and by kind and stage those of what a pass uses."""
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    frees: Frees = {stuff: [[Free(Value(stuff, s, j)) for j in microbatches] for s in stages] for stuff in Stuff}
    ended = {kind: [[frees[stuff][at] for stuff, at in used_stages(kind, s, len(stages))] for s in stages] for kind in RULES}
    return frees, ended


Message = TypeVar("Message", Recv, Free)


def _grouped(points: list[int], actions: dict[int, Message]) -> dict[int, list[Message]]:
    """The actions of the messages by their point, in the order of their makers."""
    found: dict[int, list[Message]] = defaultdict(list)
    for maker, action in actions.items():
        found[points[maker]].append(action)
    return dict(found)
