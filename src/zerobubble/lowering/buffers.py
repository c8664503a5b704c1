"""When a rank may free what it sent: once the arrival is certain, so that freeing never waits."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from zerobubble.graph import Graph
from zerobubble.lowering.messages import earliest_from


def release_points(graph: Graph, users: list[int]) -> list[int]:
    """For each message, by its maker: the pass of the sender after which it is freed; -1 where nothing is sent.

    That is the first pass that uses something the receiver sent after it used the message, or the last of the row without one.
    """
    points = [-1] * len(users)
    answers = _answers(graph, users)
    for maker, user in enumerate(users):
        if user >= 0:
            here, peer = graph.rank[maker], graph.rank[user]
            sent, used = answers[peer, here]
            at = bisect_left(sent, user)
            points[maker] = used[at] if at < len(sent) else graph.first[here + 1] - 1
    return points


def _answers(graph: Graph, users: list[int]) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Per (sender, receiver): the makers of its messages in order, and the earliest pass that uses any from there on."""
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    for maker, user in enumerate(users):
        if user >= 0:
            sent[graph.rank[maker], graph.rank[user]].append(maker)
    answers = {pair: (makers, earliest_from([users[maker] for maker in makers])) for pair, makers in sent.items()}
    return defaultdict(lambda: ([], []), answers)
