"""The messages of a timeline: the sending and the receiving pass of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerobubble.rules import SENT_BETWEEN_STAGES, Value, makers, uses
from zerobubble.timeline import Span, Timeline


class Message(NamedTuple):
    """A message with `value` from rank `source`, where span `made` makes it, to rank `destination`, where span `used` uses it."""

    value: Value
    source: int
    made: Span
    destination: int
    used: Span


def messages(timeline: Timeline) -> Iterator[Message]:
    """Yield every message between ranks, in order of its user; a value that no pass makes is left out."""
    where = {span.op: (rank, span) for rank, span in timeline.spans()}
    num_stages = 1 + max((op.stage for op in where), default=0)
    for op, (destination, used) in where.items():
        for value in uses(op, num_stages):
            made = next((where[maker] for maker in makers(value) if maker in where), None)
            if value.value_kind in SENT_BETWEEN_STAGES and made is not None and made[0] != destination:
                yield Message(value, *made, destination, used)
