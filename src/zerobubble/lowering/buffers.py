"""When a rank may free what it sent: once the arrival is certain, so that freeing never waits."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from zerobubble.graph import Graph
from zerobubble.lowering.messages import Message, earliest_from
from zerobubble.rules import Value, given_by


def release_points(graph: Graph, messages: Sequence[Message], num_stages: int) -> dict[Value, int]:
    """For each value that is sent, the pass of the sender after which it is freed.

    A message has arrived when the sender uses anything that the receiver sent after it used the message, so it is freed after the first
    pass that does. Where there is none, it is freed after the last pass of the sender's row. What goes to several ranks is freed when it
    has arrived on all of them, and what passes of the sender use, too, not before the last of these.
    """
    points = dict.fromkeys((message.value for message in messages), -1)
    between = _messages_by_ranks(graph, messages)
    for message in messages:
        sender, receiver = graph.rank[message.maker], graph.rank[message.user]
        sent_back, used_from = between[receiver, sender]
        after_use = bisect_left(sent_back, message.last)
        point = used_from[after_use] if after_use < len(sent_back) else graph.first[sender + 1] - 1
        points[message.value] = max(points[message.value], point)
    for user, needs in enumerate(graph.needs):
        for maker in needs:
            if graph.rank[maker] == graph.rank[user]:
                kind, stage, microbatch = graph.ops[maker]
                for stuff in given_by(kind, stage, *graph.ops[user][:2], num_stages):
                    value = Value(stuff, stage, microbatch)
                    if value in points:
                        points[value] = max(points[value], user)
    return points


def _messages_by_ranks(graph: Graph, messages: Sequence[Message]) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """For each (sender, receiver): the makers of the messages between them, in order, and the first pass to use each or a later one."""
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for message in messages:
        sent[graph.rank[message.maker], graph.rank[message.user]].append(message)
    found = {ranks: ([m.maker for m in between], earliest_from([m.user for m in between])) for ranks, between in sent.items()}
    return defaultdict(lambda: ([], []), found)
