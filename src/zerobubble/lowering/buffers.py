"""The points at which a rank frees the values that it sent, chosen so that a free never waits.

A send buffer must live until the transport has read it. Waiting for that could deadlock: the receiver may itself wait for this rank. The
order of the passes gives a proof of arrival instead. If a pass of the sender uses a message that the receiver sent after it used the value,
then the value had arrived when that pass started.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from zerobubble.graph import Graph
from zerobubble.lowering.messages import Message, earliest_from
from zerobubble.rules import Value, given_by


def release_points(graph: Graph, messages: Sequence[Message], num_stages: int) -> dict[Value, int]:
    """Return, for each value that is sent, the pass of the sender after which it is freed.

    That is the first pass of the sender that uses a message which the receiver sent after it used the value, or the last pass of the
    sender's row if there is no such pass. A value sent to several ranks is freed once it has arrived on all of them. A value that passes of
    the sender use too is not freed before the last of these.
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
                for value_kind in given_by(kind, stage, *graph.ops[user][:2], num_stages):
                    value = Value(value_kind, stage, microbatch)
                    if value in points:
                        points[value] = max(points[value], user)
    return points


def _messages_by_ranks(graph: Graph, messages: Sequence[Message]) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Return, for each (sender, receiver), the makers of their messages in order, and the first pass to use each or a later message.

    The minimum over later messages is needed because a channel's messages need not be used in the order in which they are sent.
    """
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for message in messages:
        sent[graph.rank[message.maker], graph.rank[message.user]].append(message)
    found = {ranks: ([m.maker for m in between], earliest_from([m.user for m in between])) for ranks, between in sent.items()}
    return defaultdict(lambda: ([], []), found)
