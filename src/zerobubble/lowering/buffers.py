"""When a rank may free what it sent: once the arrival is certain, so that freeing never waits."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from zerobubble.graph import Graph
from zerobubble.lowering.messages import earliest_from


def release_points(graph: Graph, users: list[int]) -> list[int]:
    """For each message, by its maker: the pass of the sender after which it is freed; -1 where nothing is sent.

    `users` are those of `lowering.messages`. A message has arrived when the sender uses anything that the receiver sent after it used the
    message, so it is freed after the first pass that does. Where there is none, it is freed after the last pass of the sender's row.
    """
    points = [-1] * len(users)
    messages = _messages_by_ranks(graph, users)
    for maker, user in enumerate(users):
        if user >= 0:
            sender, receiver = graph.rank[maker], graph.rank[user]
            sent_back, used_from = messages[receiver, sender]
            after_use = bisect_left(sent_back, user)
            last_of_row = graph.first[sender + 1] - 1
            points[maker] = used_from[after_use] if after_use < len(sent_back) else last_of_row
    return points


def _messages_by_ranks(graph: Graph, users: list[int]) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """For each (sender, receiver): the makers of the messages between them, in order, and the first pass to use each or a later one."""
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    for maker, user in enumerate(users):
        if user >= 0:
            sent[graph.rank[maker], graph.rank[user]].append(maker)
    messages = {ranks: (makers, earliest_from([users[maker] for maker in makers])) for ranks, makers in sent.items()}
    return defaultdict(lambda: ([], []), messages)
