"""The messages of one program over lanes that carry whole messages, such as rings in shared memory: one set of lanes per set of shapes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from zerobubble.program import Channel, Compute, Program, Recv, Send, channel_of
from zerobubble.rules import Value, ValueKind
from zerobubble.runtime.transport.endpoint import MessageLane, Put, Take, Traffic
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.shapes import KnownMessages, Shapes

MOST_KEPT = 8
"""The number of sets of shapes whose lanes are cached. The oldest is dropped first."""


class WholeMessages:
    """This rank's ends of the lanes. After `begin`, the messages of a step are `put[value, rank]` and `take[value]`."""

    def __init__(self, program: Program, peers: Peers) -> None:
        self._peers = peers
        self._messages: dict[Channel, list[Value]] = defaultdict(list)
        for _, _, channel, action in program.channels():
            if isinstance(action, Recv) and peers.rank in channel[:2]:
                self._messages[channel].append(action.value)
        self._at_once = _at_once_on(program, self._messages)
        self._made: dict[int, tuple[KnownMessages, dict[Channel, MessageLane], dict[tuple[Value, int], Put], dict[Value, Take]]] = {}
        self._lanes: dict[Channel, MessageLane] = {}
        self.put: dict[tuple[Value, int], Put] = {}
        self.take: dict[Value, Take] = {}

    def begin(self, messages: KnownMessages, shapes: Callable[[Value], Shapes], largest: Callable[[Value], Shapes]) -> None:
        """Switches to the lanes for these `messages`, which are created the first time.

        `shapes` returns the shapes of a message, and `largest` those that `change` may give it later.
        """
        key = id(messages)
        if key not in self._made:
            if len(self._made) == MOST_KEPT:
                del self._made[next(iter(self._made))]
            self._lanes, self.put, self.take = {}, {}, {}
            self._make(shapes, largest)
            self._made[key] = messages, self._lanes, self.put, self.take
        _, self._lanes, self.put, self.take = self._made[key]

    def close(self) -> None:
        """Drops all lanes."""
        self._made.clear()
        self._lanes, self.put, self.take = {}, {}, {}

    def change(self, value: Value, shapes: Shapes) -> None:
        """Gives `value` these shapes from now on, with the same messages. Both ends of its channel must do so before it is sent."""
        for channel, values in self._messages.items():
            if value in values:
                self._use(channel, value, shapes)

    def _make(self, shapes: Callable[[Value], Shapes], largest: Callable[[Value], Shapes]) -> None:
        """Creates the lanes of all channels."""
        for channel, values in self._messages.items():
            self._lanes[channel] = self._peers.message_lane(channel, [largest(value) for value in values], self._at_once[channel])
            for value in values:
                self._use(channel, value, shapes(value))

    def _use(self, channel: Channel, value: Value, shapes: Shapes) -> None:
        lane = self._lanes[channel]
        if channel.value_kind is ValueKind.GRADIENT and not shapes:  # no tensor requires one, so there is no message
            self.put[value, channel.destination], self.take[value] = _put_nothing, tuple
        elif channel.source == self._peers.rank:
            self.put[value, channel.destination] = lane.sender(shapes)
        else:
            self.take[value] = lane.receiver(shapes, differentiable=channel.value_kind is ValueKind.ACTIVATION)


def _put_nothing(_: Sequence[Tensor | None]) -> None:
    """Sends nothing: the message has no tensors."""


def traffic_of(program: Program, rank: int) -> dict[Channel, Traffic]:
    """Returns what `rank` sends in a step of `program`, by channel."""
    sent = Counter(channel for sender, _, channel, action in program.channels() if sender == rank and isinstance(action, Send))
    at_once = _at_once_on(program, sent)
    return {channel: Traffic(count, at_once[channel]) for channel, count in sent.items()}


def _at_once_on(program: Program, channels: Iterable[Channel]) -> dict[Channel, int]:
    """Returns how many receives these channels, and others into the same ranks, have posted but not used at any time, at most."""
    counts: dict[Channel, int] = {}
    for rank in {channel.destination for channel in channels}:
        counts |= posted_at_once(program, rank)
    return counts


def posted_at_once(program: Program, rank: int) -> dict[Channel, int]:
    """Returns the largest number of posted but unused receives on each channel into `rank`.

    With as many slots, a send waits only until its receive is posted, and the program is proved to be free of deadlocks under that rule.
    """
    most: dict[Channel, int] = {}
    now: dict[Channel, int] = defaultdict(int)
    channels: dict[Value, Channel] = {}
    for action in program.rows[rank]:
        if isinstance(action, Recv):
            channel = channels[action.value] = channel_of(rank, action)
            now[channel] += 1
            most[channel] = max(most.get(channel, 0), now[channel])
        elif isinstance(action, Compute):
            for value in program.uses(action.step):
                if value in channels:
                    now[channels.pop(value)] -= 1
    return most
