"""The shared-memory rings of one program: how many slots each channel needs, and the rings for each set of message shapes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence

from zerobubble.program import Channel, Compute, Program, Recv, channel_of
from zerobubble.rules import Stuff, Value, uses
from zerobubble.runtime.transport.shared_memory import Put, SharedLane, Take, message_bytes
from zerobubble.runtime.transport.transport import Contact, Transport
from zerobubble.runtime.values.shapes import Known, Shapes

ROOMY_BYTES = 32 << 20
"""A ring takes this much room for messages beyond the slots it needs, so that senders run ahead."""
MOST_KEPT = 8
"""Sets of shapes whose rings are kept; both ends of a channel drop the oldest in the same step."""


class Rings:
    """This rank's ends of the rings. Call `begin` before each step that uses them: `put[value]` and `take[value]` are its messages."""

    def __init__(self, program: Program, transport: Transport) -> None:
        self._transport = transport
        self._spins = transport.size <= (os.cpu_count() or 1)
        self._needed = {rank: posted_at_once(program, rank) for rank in range(program.num_ranks)}
        self._messages: dict[Channel, list[Value]] = defaultdict(list)
        for _, _, channel, action in program.channels():
            if isinstance(action, Recv) and transport.rank in channel[:2]:
                self._messages[channel].append(action.value)
        self._made: dict[int, tuple[Known, dict[Channel, SharedLane], dict[Value, Put], dict[Value, Take]]] = {}
        self._lanes: dict[Channel, SharedLane] = {}
        self.put: dict[Value, Put] = {}
        self.take: dict[Value, Take] = {}

    def begin(self, known: Known, shapes: Callable[[Value], Shapes], largest: Callable[[Value], Shapes]) -> None:
        """Use the rings for the messages of `known`, making them the first time: senders first, then those who wait for them.

        `shapes` has those of each message, and `largest` those that it may have later in `change`.
        """
        key = id(known)
        if key not in self._made:
            if len(self._made) == MOST_KEPT:
                del self._made[next(iter(self._made))]
            rank = self._transport.rank
            self._lanes, self.put, self.take = {}, {}, {}
            for channel in sorted(self._messages, key=lambda channel: (channel.source != rank, channel)):
                self._lanes[channel] = self._make(channel, [largest(value) for value in self._messages[channel]])
                for value in self._messages[channel]:
                    self._use(channel, value, shapes(value))
            self._made[key] = known, self._lanes, self.put, self.take
        _, self._lanes, self.put, self.take = self._made[key]

    def change(self, value: Value, shapes: Shapes) -> None:
        """From here on `value` has these shapes, with the same `known`; both ends of its channel must be told so before it is sent."""
        for channel, values in self._messages.items():
            if value in values:
                self._use(channel, value, shapes)

    def _use(self, channel: Channel, value: Value, shapes: Shapes) -> None:
        lane = self._lanes[channel]
        if channel.source == self._transport.rank:
            self.put[value] = lane.sender(shapes)
        else:
            self.take[value] = lane.receiver(shapes, differentiable=channel.stuff is Stuff.ACTIVATION)

    def _make(self, channel: Channel, largest: Sequence[Shapes]) -> SharedLane:
        size = max(message_bytes(shapes) for shapes in largest)
        slots = min(len(largest), max(self._needed[channel.destination][channel], ROOMY_BYTES // size))
        sends = channel.source == self._transport.rank
        with Contact(channel.destination if sends else channel.source, "opening a ring"):
            return SharedLane(self._transport.connections[channel], slots, size, sends=sends, spins=self._spins)


def posted_at_once(program: Program, rank: int) -> dict[Channel, int]:
    """The most receives each channel into `rank` has posted and not yet used: with as many slots, a send waits no longer than for
    its receive to be posted, and the program is proved not to stop then."""
    most: dict[Channel, int] = {}
    now: dict[Channel, int] = defaultdict(int)
    came_by: dict[Value, Channel] = {}
    for action in program.rows[rank]:
        if isinstance(action, Recv):
            channel = came_by[action.value] = channel_of(rank, action)
            now[channel] += 1
            most[channel] = max(most.get(channel, 0), now[channel])
        elif isinstance(action, Compute):
            for value in (value for op in action.step for value in uses(op, program.num_stages)):
                if value in came_by:
                    now[came_by[value]] -= 1
    return most
