"""The messages of a schedule, the passes before which their receives are posted, and those after which sent values are freed.

A message is a value that a pass makes for a pass of another rank. Most passes send one message to one rank; passes of a divided head send
several, and the same value to several ranks. A message is sent right after the step of its pass. Messages are numbered rank after rank in
the order in which they are sent, so the messages from one rank to another are in order. Transports match them by order, NCCL even across
value kinds, so receives are always posted in this order too, whatever the order of use. The first pass of an overlapped step represents the
step: it uses the messages of both passes.

A send buffer must live until the transport has read it. Waiting for that could deadlock: the receiver may itself wait for this rank. The
order of the passes gives a proof of arrival instead. If a pass of the sender uses a message that the receiver sent after it used the value,
then the value had arrived when that pass started.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerobubble.graph import Graph, joint_needs, walk
from zerobubble.rules import Value, given_by, moving


class SentValue(NamedTuple):
    """A `value` sent from the rank of pass `maker` to the rank of pass `user`, the first there to use it; `last` is the last to use it."""

    maker: int
    user: int
    last: int
    value: Value


def messages_of(graph: Graph, num_stages: int) -> list[SentValue]:
    """Return the messages between ranks, in the order in which they are sent."""
    users_of: dict[tuple[int, Value, int], list[int]] = defaultdict(list)
    rank, ops = graph.rank, graph.ops
    for user, needs in enumerate(graph.needs):
        for maker in needs:
            if rank[maker] != rank[user]:
                kind, stage, microbatch = ops[maker]
                first = user - 1 if user - 1 in graph.pairs else user
                for value_kind in given_by(kind, stage, *ops[user][:2], num_stages) or (moving(kind),):
                    users_of[maker, Value(value_kind, stage, microbatch), rank[user]].append(first)
    return [SentValue(maker, users[0], users[-1], value) for (maker, value, _), users in sorted(users_of.items())]


def channels(graph: Graph, messages: Sequence[SentValue]) -> Iterable[list[int]]:
    """Return the numbers of the messages of each channel in the order of the sends, which both ends use."""
    by_channel: dict[object, list[int]] = defaultdict(list)
    for number, message in enumerate(messages):
        by_channel[graph.rank[message.maker], graph.rank[message.user], message.value.value_kind].append(number)
    return by_channel.values()


def post_points(graph: Graph, messages: Sequence[SentValue], prefetch: int) -> list[int]:
    """Return, for each message, the pass before which its receive is posted.

    It is the first pass that uses the message `prefetch` positions earlier on the channel, or any later message of the channel. If a later
    message between the same two ranks is posted earlier, so is this one. Both conditions keep receives in the order of the sends.
    """
    posts = [-1] * len(messages)
    for numbers in channels(graph, messages):
        latest = earliest_from([messages[number].user for number in numbers])
        first = graph.first[graph.rank[latest[0]]]
        for k, number in enumerate(numbers):
            posts[number] = latest[k - prefetch] if k >= prefetch else first
    directions: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, message in enumerate(messages):
        directions[graph.rank[message.maker], graph.rank[message.user]].append(number)
    for numbers in directions.values():
        for number, post in zip(numbers, earliest_from([posts[number] for number in numbers]), strict=True):
            posts[number] = post
    return posts


def depth_needed(graph: Graph, messages: Sequence[SentValue], ends: list[int]) -> int:
    """Return the smallest `prefetch` whose `post_points` precede the send of each message, for passes that end at `ends`."""
    starts = set(graph.first)
    deepest = 0
    for numbers in channels(graph, messages):
        users = earliest_from([messages[number].user for number in numbers])
        posted = [0 if user in starts else ends[user - 1] for user in users]
        for k, number in enumerate(numbers):
            deepest = max(deepest, k + 1 - bisect_right(posted, ends[messages[number].maker]))
    return deepest


def earliest_from(numbers: list[int]) -> list[int]:
    """Return, for each position, the minimum of the numbers from there on."""
    least = list(numbers)
    for k in range(len(least) - 2, -1, -1):
        least[k] = min(least[k], least[k + 1])
    return least


def hoist_receives(graph: Graph, messages: Sequence[SentValue], posts: list[int]) -> list[int]:
    """Return `posts` in which receives are posted earlier where a send that waits for its receive would deadlock.

    A transport whose sends wait (rendezvous) adds needs to the graph: the pass that sends also needs the pass before which the receive is
    posted. The loop walks the graph with these needs. When all ranks are stuck, every waiting send gets its receive posted at the pass that
    its receiver has reached, and the walk continues. It ends because each round either advances a rank or is the last: a legal schedule
    cannot be stuck without waiting sends.
    """
    posts = list(posts)
    heads = graph.first[:-1]
    fixed = joint_needs(graph, graph.needs)
    starts = set(heads)
    sent: dict[int, list[int]] = defaultdict(list)
    needs = list(fixed)
    for number, (message, post) in enumerate(zip(messages, posts, strict=True)):
        sent[message.maker].append(number)
        if post not in starts:  # a receive before the first pass of a row is posted without waiting for any pass
            needs[message.maker] = (*needs[message.maker], post - 1)
    walk(graph, needs, heads)
    while heads != graph.first[1:]:
        for maker, end in zip(list(heads), graph.first[1:], strict=True):
            late = [] if maker == end else [n for n in sent[maker] if heads[graph.rank[messages[n].user]] < posts[n]]
            for number in late:
                posts[number] = heads[graph.rank[messages[number].user]]
            if late:
                needs[maker] = fixed[maker]
        walk(graph, needs, heads)
    return posts


def release_points(graph: Graph, messages: Sequence[SentValue], num_stages: int) -> dict[Value, int]:
    """Return, for each sent value, the pass of the sender after which it is freed.

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


def _messages_by_ranks(graph: Graph, messages: Sequence[SentValue]) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Return, for each (sender, receiver), the makers of their messages in order, and the first pass to use each or a later message.

    The minimum over later messages is needed because a channel's messages need not be used in the order in which they are sent.
    """
    sent: dict[tuple[int, int], list[SentValue]] = defaultdict(list)
    for message in messages:
        sent[graph.rank[message.maker], graph.rank[message.user]].append(message)
    by_ranks = {ranks: ([m.maker for m in between], earliest_from([m.user for m in between])) for ranks, between in sent.items()}
    return defaultdict(lambda: ([], []), by_ranks)
