"""The messages of a timeline: which pass on another rank each pass's result goes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerobubble.rules import MOVES, Value, makers, uses
from zerobubble.timeline import Span, Timeline


class Message(NamedTuple):
    """`value` goes from `source`, where `made` is the span that makes it, to `destination`, where `used` is the span that uses it."""

    value: Value
    source: int
    made: Span
    destination: int
    used: Span


def messages(timeline: Timeline) -> Iterator[Message]:
    """Every message between ranks, by the place of its user; a value that nobody makes is left out."""
    where = {span.op: (rank, span) for rank, span in timeline.spans()}
    num_stages = 1 + max((op.stage for op in where), default=0)
    for op, (destination, used) in where.items():
        for value in uses(op, num_stages):
            made = next((where[maker] for maker in makers(value) if maker in where), None)
            if value.stuff in MOVES and made is not None and made[0] != destination:
                yield Message(value, *made, destination, used)
