"""What connects all ranks of a pipeline and of its replicas, whatever endpoint carries their tensors: lines that are opened and closed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.program import Channel
from zerobubble.runtime.transport.contact import STARTING, LostContactError, Waiting, exchanging, is_own, reason_of
from zerobubble.runtime.transport.control import Topic
from zerobubble.runtime.transport.endpoint import Capabilities, Endpoint, Line, MessageLane, Sums, Traffic
from zerobubble.runtime.transport.gather import gather, gather_objects
from zerobubble.runtime.transport.work import Work
from zerobubble.runtime.values.shapes import Shapes


class Carrier(NamedTuple):
    """What carries tensors between ranks: the transport's `name`, and `why` it was chosen, the same on every rank.

    `held_bytes` are those that it holds now in this rank's memory for messages to others, such as rings in shared memory.
    """

    name: str
    why: str
    held_bytes: int

    def __str__(self) -> str:
        return f"{self.name} ({self.why}), {self.held_bytes} bytes held for messages"


Choose = Callable[[torch.device, Sequence[Channel]], tuple[Endpoint, str]]
"""Chooses what carries tensors on a device over these channels, and says why; every rank calls it."""


class Transport:
    """The lines of one rank to all others of the endpoint's group. What a pipeline does over them, its `Peers` do.

    Topics go over `endpoint`. Tensors do, too, unless `choose_for_tensors` gives another endpoint for those on a device; `carrier` tells
    which. `standing` has receives that stay posted from one step to the next; whoever posts them keeps them there, because they must be
    dropped before the connections close. Once `is_aborted`, the device's tensors may hold what was never sent.
    """

    def __init__(self, endpoint: Endpoint, choose_for_tensors: Choose | None = None) -> None:
        self.group = endpoint.group
        self.rank, self.size = endpoint.group.rank, endpoint.group.size
        self.device = torch.device("cpu")
        self.waiting = Waiting()
        self.is_aborted = False
        self.standing: dict[Line, Any] = {}
        self._for_topics = endpoint
        self._for_tensors = endpoint
        self._choose_for_tensors = choose_for_tensors
        self._why = "it was given"
        # At the end of the interpreter, finalizers run in the reverse order of their making: this one before those of the endpoints.
        self._end = weakref.finalize(self, self.standing.clear)

    @property
    def capabilities(self) -> Capabilities:
        """What the endpoint that carries tensors can do."""
        return self._for_tensors.capabilities

    @property
    def carrier(self) -> Carrier:
        """What carries tensors, and why."""
        return Carrier(self._for_tensors.name, self._why, self._for_tensors.held_bytes())

    def connect(self) -> None:
        """Reach the other ranks. All of them have their lines of topics when it returns, so none can close them too early."""
        with exchanging():
            self._for_topics.connect()
        self._barrier()

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:
        """Open the lines for tensors on `device`, and `channels`. All ranks have them when it returns, so none can close them too early.

        Raises `InputError` for a device whose tensors the endpoint does not carry.
        """
        self.device = device
        if self._choose_for_tensors is not None:
            with exchanging():
                self._for_tensors, self._why = self._choose_for_tensors(device, channels)
        if device.type not in self.capabilities.device_types:
            carried = ", ".join(sorted(self.capabilities.device_types))
            raise InputError(
                f"transport {self._for_tensors.name!r} carries tensors on {carried}, and the stages are on {device}; "
                "move them, or choose another transport"
            )
        try:
            with exchanging():
                self._for_tensors.open(device, channels)
        except BaseException:
            self._for_tensors.close()  # the pipeline may have been closed before this was chosen
            raise
        self._barrier()
        self.open_channels(channels)

    def open_channels(self, channels: Iterable[Channel]) -> None:
        """Connect channels before they are used; every rank calls it with the same ones."""
        with exchanging():
            self._for_tensors.open_channels(channels)

    def _barrier(self) -> None:
        gather(self._for_topics, torch.zeros(1, device="cpu"))

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        """A call that starts sending one tensor along a line that begins here, and gives the work to wait for.

        The call raises `LostContactError` where the connection is known to be gone.
        """
        return _telling_loss(self._carries(line).sender(line), line.destination)

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        """A call that starts receiving one tensor from a line that ends here, and gives the work to wait for; errors as for `sender`."""
        return _telling_loss(self._carries(line).receiver(line), line.source)

    def _carries(self, line: Line) -> Endpoint:
        return self._for_topics if isinstance(line.carries, Topic) else self._for_tensors

    def message_lane(self, channel: Channel, messages: Sequence[Shapes], at_once: int) -> MessageLane:
        """This rank's end of a channel that carries whole messages, as `Endpoint.message_lane` gives it."""
        return self._for_tensors.message_lane(channel, messages, at_once)

    def sums(self, members: Sequence[int], number: int = 0) -> Sums:
        """Sums over these ranks, as `Endpoint.sums` makes them."""
        return self._for_tensors.sums(members, number)

    def bytes_for(self, traffic: Mapping[Channel, Traffic]) -> int:
        """What the carrier will hold in steps that send this traffic, as `Endpoint.bytes_for` tells it."""
        return self._for_tensors.bytes_for(traffic)

    def gather_objects(self, value: Any, members: Sequence[int] | None = None) -> list[Any]:
        """The `value` of each of these ranks, by default of all, in order, on each of them, as `write_plain` takes it.

        Call it in a `collective`.
        """
        return gather_objects(self._for_topics, value, members)

    def collective(self, doing: str, members: Sequence[int] = ()) -> AbstractContextManager[None]:
        """A context for what all ranks, or these, do together: an exchange that fails is told as `LostContactError` with everybody."""
        return self.waiting.collective(doing, members)

    def disconnect(self, rank: int) -> None:
        """End the lines to `rank`, whose process has ended; from any thread."""
        self.abort()
        self._for_tensors.disconnect(rank)
        self._for_topics.disconnect(rank)

    def abort(self) -> None:
        """A rank has failed: end what is under way on the device, as `Endpoint.abort` does; from any thread."""
        if self._for_tensors.abort():
            self.is_aborted = True

    def detach(self) -> None:
        """Close this process's descriptors after it was forked; see `Endpoint.detach`."""
        self._end.detach()
        self._for_tensors.detach()
        self._for_topics.detach()

    def close(self) -> None:
        """Drop every connection; a peer still waiting on one gets an error at once."""
        with ExitStack() as rest:  # an endpoint may be the user's, and raise
            rest.callback(self._for_topics.close)
            rest.callback(self._for_tensors.close)
            self._end()


def _telling_loss(start: Callable[[Tensor], Work], peer: int) -> Callable[[Tensor], Work]:
    """`start` with the error of a connection that is known to be gone told as `LostContactError`."""

    def started(tensor: Tensor) -> Work:
        try:
            return start(tensor)
        except RuntimeError as error:
            if is_own(error):
                raise
            raise LostContactError(peer, STARTING, reason_of(error)) from error

    return started
