"""Which results are messages and where their receives are posted.

A message is what one pass leaves for a pass of another rank. Most passes leave one for one user. Passes of a divided head leave several,
and the same for several ranks. All leave right after the step of their pass ran. Messages are numbered in the order in which they leave,
rank after rank, so those of a channel keep their order. The first pass of an overlapped step stands for the step: it uses what either
uses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerobubble.graph import Graph, joint_needs, walk
from zerobubble.rules import Value, given_by, moving


class Message(NamedTuple):
    """A `value` on its way from the rank of pass `maker` to that of pass `user`, the first there to use it; `last` is the last one."""

    maker: int
    user: int
    last: int
    value: Value


def messages_of(graph: Graph, num_stages: int) -> list[Message]:
    """The messages between ranks, in the order in which they leave."""
    found: dict[tuple[int, Value, int], list[int]] = defaultdict(list)
    rank, ops = graph.rank, graph.ops
    for user, needs in enumerate(graph.needs):
        for maker in needs:
            if rank[maker] != rank[user]:
                kind, stage, microbatch = ops[maker]
                first = user - 1 if user - 1 in graph.pairs else user
                for stuff in given_by(kind, stage, *ops[user][:2], num_stages) or (moving(kind),):
                    found[maker, Value(stuff, stage, microbatch), rank[user]].append(first)
    return [Message(maker, users[0], users[-1], value) for (maker, value, _), users in sorted(found.items())]


def channels(graph: Graph, messages: Sequence[Message]) -> Iterable[list[int]]:
    """The numbers of the messages of each channel in the sender's order, which is the order at both ends."""
    found: dict[object, list[int]] = defaultdict(list)
    for number, message in enumerate(messages):
        found[graph.rank[message.maker], graph.rank[message.user], message.value.stuff].append(number)
    return found.values()


def post_points(graph: Graph, messages: Sequence[Message], prefetch: int) -> list[int]:
    """For each message the pass before which its receive is posted: the one that uses the message `prefetch` places ahead of it on its
    channel, or any later one."""
    posts = [-1] * len(messages)
    for numbers in channels(graph, messages):
        latest = earliest_from([messages[number].user for number in numbers])
        first = graph.first[graph.rank[latest[0]]]
        for k, number in enumerate(numbers):
            posts[number] = latest[k - prefetch] if k >= prefetch else first
    return posts


def depth_needed(graph: Graph, messages: Sequence[Message], ends: list[int]) -> int:
    """The least `prefetch` whose `post_points` lie before each message is sent, for passes that end at `ends`."""
    starts = set(graph.first)
    deepest = 0
    for numbers in channels(graph, messages):
        users = earliest_from([messages[number].user for number in numbers])
        posted = [0 if user in starts else ends[user - 1] for user in users]
        for k, number in enumerate(numbers):
            deepest = max(deepest, k + 1 - bisect_right(posted, ends[messages[number].maker], hi=k + 1))
    return deepest


def earliest_from(numbers: list[int]) -> list[int]:
    """The least of each number and all after it."""
    least = list(numbers)
    for k in range(len(least) - 2, -1, -1):
        least[k] = min(least[k], least[k + 1])
    return least


def hoist_receives(graph: Graph, messages: Sequence[Message], posts: list[int]) -> list[int]:
    """Post receives earlier wherever a send that waits for its receive would stop the pipeline.

    Such a send makes its pass wait for the pass before the receive. Posting never waits, so moving a receive up is always allowed:
    where ranks stand still, each waiting send gets its receive at the pass its receiver has reached.
    """
    posts = list(posts)
    heads = graph.first[:-1]
    known = joint_needs(graph, graph.needs)
    starts = set(heads)
    sent: dict[int, list[int]] = defaultdict(list)
    needs = list(known)
    for number, (message, post) in enumerate(zip(messages, posts, strict=True)):
        sent[message.maker].append(number)
        if post not in starts:
            needs[message.maker] = (*needs[message.maker], post - 1)
    walk(graph, needs, heads)
    while heads != graph.first[1:]:
        for maker, end in zip(list(heads), graph.first[1:], strict=True):
            late = [] if maker == end else [n for n in sent[maker] if heads[graph.rank[messages[n].user]] < posts[n]]
            for number in late:
                posts[number] = heads[graph.rank[messages[number].user]]
            if late:
                needs[maker] = known[maker]
        walk(graph, needs, heads)
    return posts
