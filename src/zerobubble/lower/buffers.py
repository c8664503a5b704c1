"""Where values are freed: after their last use, and for what was sent, once its arrival is certain."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace

from zerobubble.program import Action, Compute, Free, Program, Send
from zerobubble.rules import Value, makes, uses

_END = 1 << 60


def place_frees(program: Program) -> Program:
    """Add one `Free` for every value of every rank.

    A value that stays is freed after the last pass that uses it. A value that was sent is freed where waiting for the message
    to leave costs nothing: after the first pass that uses something its receiver sent later than it used the message. Where no
    such answer comes, at the end of the row.
    """
    used_at = [_uses(program, rank) for rank in range(program.num_ranks)]
    answers = _answers(program, used_at)
    rows = []
    for rank, row in enumerate(program.rows):
        last = _last_touch(program, rank)
        frees: dict[int, list[Action]] = defaultdict(list)
        for action in row:
            if isinstance(action, Send):
                last[action.value] = max(last[action.value], answers[rank, action.peer].after(used_at[action.peer][action.value]))
        for value, position in last.items():
            frees[min(position, len(row) - 1)].append(Free(value))
        rows.append(tuple(a for position, action in enumerate(row) for a in (action, *frees.get(position, ()))))
    return replace(program, rows=tuple(rows))


def _uses(program: Program, rank: int) -> dict[Value, int]:
    """Position of the last pass of `rank` that uses each value."""
    found = {}
    for position, action in enumerate(program.rows[rank]):
        if isinstance(action, Compute):
            found.update((value, position) for value in uses(action.op, program.num_stages))
    return found


def _last_touch(program: Program, rank: int) -> dict[Value, int]:
    """Position of the last action that makes, receives, sends or uses each value, in order of first appearance."""
    forward_only = program.is_forward_only
    last: dict[Value, int] = {}
    for position, action in enumerate(program.rows[rank]):
        if isinstance(action, Compute):
            touched = uses(action.op, program.num_stages) + makes(action.op, program.num_stages, forward_only)
        else:
            touched = [action.value]
        last.update((value, position) for value in touched)
    return last


class _Answers:
    """What a peer sends back: for any position in the peer's row, when this rank first uses something sent after it."""

    def __init__(self, messages: list[tuple[int, int]]) -> None:
        self._sent = [sent for sent, _ in messages]
        self._used = [used for _, used in messages]
        for k in range(len(messages) - 2, -1, -1):
            self._used[k] = min(self._used[k], self._used[k + 1])

    def after(self, position: int) -> int:
        k = bisect_right(self._sent, position)
        return self._used[k] if k < len(self._used) else _END


def _answers(program: Program, used_at: list[dict[Value, int]]) -> dict[tuple[int, int], _Answers]:
    """Per (rank, peer): the messages from peer to rank as (position of the send at peer, position of the use at rank)."""
    messages: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    pairs = set()
    for rank, position, _, action in program.channels():
        pairs.add((rank, action.peer))
        if isinstance(action, Send):
            messages[action.peer, rank].append((position, used_at[action.peer][action.value]))
    return {pair: _Answers(messages[pair]) for pair in pairs}
