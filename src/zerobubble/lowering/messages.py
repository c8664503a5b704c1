"""Which results are messages and where their receives are posted.

A pass sends at most one message, right after its step ran, so a message goes by the number of the pass that makes it. Per message:
`users[i]` is the pass on another rank that uses it (-1 where pass i sends nothing), `posts[i]` the pass its receive is posted before.
The first pass of an overlapped step stands for the step: it uses what either uses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from zerobubble.graph import Graph, joint_needs, walk
from zerobubble.kinds import ByKind
from zerobubble.rules import moving


def message_users(graph: Graph) -> list[int]:
    """For each pass, the pass on another rank that uses its result; -1 where there is none."""
    users = [-1] * len(graph.ops)
    rank = graph.rank
    for user, needs in enumerate(graph.needs):
        for maker in needs:
            if rank[maker] != rank[user]:
                users[maker] = user - 1 if user - 1 in graph.pairs else user
    return users


def channels(graph: Graph, users: list[int]) -> Iterable[list[int]]:
    """The messages of each channel in the sender's order, which is the order at both ends."""
    found: dict[object, list[int]] = defaultdict(list)
    carried = ByKind(moving)
    for maker, user in enumerate(users):
        if user >= 0:
            found[graph.rank[maker], graph.rank[user], carried[graph.ops[maker][0]]].append(maker)
    return found.values()


def post_points(graph: Graph, users: list[int], prefetch: int) -> list[int]:
    """Post each receive before the pass that uses the message `prefetch` places ahead of it on its channel, or any later one."""
    posts = [-1] * len(users)
    for messages in channels(graph, users):
        latest = earliest_from([users[maker] for maker in messages])
        first = graph.first[graph.rank[latest[0]]]
        for k, maker in enumerate(messages):
            posts[maker] = latest[k - prefetch] if k >= prefetch else first
    return posts


def depth_needed(graph: Graph, users: list[int], ends: list[int]) -> int:
    """The least `prefetch` whose `post_points` lie before each message is sent, for passes that end at `ends`."""
    starts = set(graph.first)
    deepest = 0
    for messages in channels(graph, users):
        posted = [0 if user in starts else ends[user - 1] for user in earliest_from([users[maker] for maker in messages])]
        for k, maker in enumerate(messages):
            deepest = max(deepest, k + 1 - bisect_right(posted, ends[maker], hi=k + 1))
    return deepest


def earliest_from(numbers: list[int]) -> list[int]:
    """The least of each number and all after it."""
    least = list(numbers)
    for k in range(len(least) - 2, -1, -1):
        least[k] = min(least[k], least[k + 1])
    return least


def hoist_receives(graph: Graph, users: list[int], posts: list[int]) -> list[int]:
    """Post receives earlier wherever a send that waits for its receive would stop the pipeline.

    Such a send makes its pass wait for the pass before the receive. Posting never waits, so moving a receive up is always allowed:
    where ranks stand still, each waiting send gets its receive at the pass its receiver has reached.
    """
    posts = list(posts)
    heads = graph.first[:-1]
    known = joint_needs(graph, graph.needs)
    starts = set(heads)
    needs = [n if post < 0 or post in starts else (*n, post - 1) for n, post in zip(known, posts, strict=True)]
    walk(graph, needs, heads)
    while heads != graph.first[1:]:
        for maker, end in zip(list(heads), graph.first[1:], strict=True):
            if maker < end and not _is_posted(graph, users, posts, heads, maker):
                posts[maker] = heads[graph.rank[users[maker]]]
                needs[maker] = known[maker]
        walk(graph, needs, heads)
    return posts


def _is_posted(graph: Graph, users: list[int], posts: list[int], heads: list[int], maker: int) -> bool:
    """Whether nothing keeps the send of pass `maker`: there is none, or its receiver has come to the post."""
    return users[maker] < 0 or heads[graph.rank[users[maker]]] >= posts[maker]
