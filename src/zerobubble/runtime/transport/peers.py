"""The ranks of one pipeline, or the replicas of one stage, among all ranks that a transport connects.

Peers count from 0 among themselves, so the code of a pipeline is written for ranks 0, 1, ... with or without replicas. Failures are
reported with the ranks of the transport, which are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.rules import ValueKind
from zerobubble.runtime.transport.contact import Exchange, LostContactError
from zerobubble.runtime.transport.control import ControlPayload, Expected, P, Sending
from zerobubble.runtime.transport.endpoint import Capabilities, Line, MessageLane, Sums, Traffic
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.transport.work import Work
from zerobubble.runtime.values.memory import as_memory
from zerobubble.runtime.values.shapes import Shapes


class Peers:
    """Sends and receives among `members`, ranks of the transport in order, by default all; this rank is one of them.

    `standing` holds receives that stay posted from one step to the next. They must be kept there, because closing drops them before the
    connections. `lockstep` are the ranks in other pipelines that run the same passes in the same order, because their stages communicate;
    None if there are none.
    """

    def __init__(self, transport: Transport, members: Sequence[int] | None = None, lockstep: Peers | None = None) -> None:
        self.members = transport.ranks if members is None else tuple(members)
        self.rank, self.size = self.members.index(transport.rank), len(self.members)
        self.standing = transport.standing
        self.lockstep = lockstep
        self._transport = transport
        self._are_all = self.members == transport.ranks
        self.wait: Callable[[Work, int, str], None] = transport.waiting.wait if self._are_all else self._wait

    @property
    def survivors(self) -> tuple[int, ...]:
        """The numbers of the ranks, if others were lost; empty for 0, 1, ..."""
        return self._transport.group.survivors

    @property
    def device(self) -> torch.device:
        """The device of the tensors that go between stages."""
        return self._transport.device

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the endpoint that carries tensors."""
        return self._transport.capabilities

    def _wait(self, work: Work, peer: int, doing: str) -> None:
        self._transport.waiting.wait(work, self.members[peer], doing)

    def exchange(self, peer: int, doing: str) -> Exchange:
        """Returns a reusable context for an exchange with `peer`: a `PeerGoneError` in it becomes a `LostContactError`."""
        return self._transport.waiting.exchange(self.members[peer], doing)

    def collective(self, doing: str) -> AbstractContextManager[None]:
        """Returns a context for a collective of all peers: a failed exchange in it becomes a `LostContactError` with everybody."""
        return self._transport.collective(doing, () if self._are_all else self.members)

    def lost_contact(self, peer: int, doing: str, reason: str) -> LostContactError:
        """Returns the error that nothing arrives from `peer`, for this `reason`."""
        return LostContactError(self.members[peer], doing, reason)

    def line_from(self, peer: int, carries: Any, number: int = 0) -> Line:
        """Returns the `Line` from `peer` to this rank; it and `line_to` start no transfer."""
        return Line(self.members[peer], self._transport.rank, carries, number)

    def line_to(self, peer: int, carries: Any, number: int = 0) -> Line:
        """Returns the line from this rank to `peer`."""
        return Line(self._transport.rank, self.members[peer], carries, number)

    def sender(self, value_kind: ValueKind, peer: int, number: int = 0) -> Callable[[Tensor], Work]:
        """Returns a function that starts sending one tensor to `peer` and returns the work to wait for.

        Line 0 is the channel itself. The function raises `LostContactError` if the connection is known to be lost.
        """
        return self._transport.sender(self.line_to(peer, value_kind, number))

    def receiver(self, value_kind: ValueKind, peer: int, number: int = 0) -> Callable[[Tensor], Work]:
        """Returns a function that starts receiving one tensor from `peer`; otherwise like `sender`."""
        return self._transport.receiver(self.line_from(peer, value_kind, number))

    def message_lane(self, channel: Channel, messages: Sequence[Shapes], at_once: int) -> MessageLane:
        """Returns this rank's end of a channel that carries whole messages; see `Endpoint.message_lane`."""
        return self._transport.for_tensors.message_lane(in_transport_ranks(channel, self.members), messages, at_once)

    def open_channels(self, channels: Iterable[Channel]) -> None:
        """Connects channels before their first use; every peer calls it with the same channels."""
        self._transport.open_channels([in_transport_ranks(channel, self.members) for channel in channels])

    def bytes_for(self, traffic: Mapping[Channel, Traffic]) -> int:
        """Returns the bytes that the endpoint will hold in steps with this traffic; see `Endpoint.bytes_for`."""
        return self._transport.for_tensors.bytes_for({in_transport_ranks(channel, self.members): sent for channel, sent in traffic.items()})

    def replicate(self, tensor: Tensor, source: int, doing: str, among: Iterable[int] | None = None) -> None:
        """Copies `tensor` from the peer `source` to all peers, or to the peers in `among`. All of them call it."""
        if self.rank == source:
            sent = as_memory(tensor)
            others = [peer for peer in (range(self.size) if among is None else among) if peer != source]
            for work, peer in [(self.sender(ValueKind.WEIGHT_WORK, peer)(sent), peer) for peer in others]:
                self.wait(work, peer, doing)
        else:
            buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
            self.wait(self.receiver(ValueKind.WEIGHT_WORK, source)(buffer), source, doing)
            tensor.detach().copy_(buffer)

    def sums(self, number: int = 0) -> Sums:
        """Returns an object that sums tensors over all peers while they compute. Each peer must start the same sums in the same order."""
        return self._transport.for_tensors.sums(self.members, number)

    def send_control(self, payload: ControlPayload, peer: int) -> Sending:
        """Starts sending a control message to `peer`."""
        numbers = torch.tensor(payload.numbers(), dtype=torch.float64, device="cpu")
        start = self._transport.sender(self.line_to(peer, payload.topic))
        return Sending(start(numbers), numbers, peer, self.wait)

    def expect_control(self, kind: type[P], count: int, peer: int) -> Expected[P]:
        """Starts receiving a control message from `peer`, with a payload of this `kind` and `count` numbers."""
        numbers = torch.empty(count, dtype=torch.float64, device="cpu")
        start = self._transport.receiver(self.line_from(peer, kind.topic))
        return Expected(kind, start(numbers), numbers, peer, self.wait)

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the `value` of each peer, in rank order; see `write_plain` for the values. Call it in a `collective`."""
        return self._transport.gather_objects(value, None if self._are_all else self.members)


def in_transport_ranks(channel: Channel, members: Sequence[int]) -> Channel:
    """Converts the ranks of `channel`, which are positions in `members`, to ranks of the transport."""
    return channel._replace(source=members[channel.source], destination=members[channel.destination])
