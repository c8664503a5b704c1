"""The protocol of a transport: one rank's end of the lines between the ranks of a group, and its further capabilities.

A minimal endpoint implements `sender`, `receiver` and `close`. The first two return functions that start one exchange of one tensor over a
line. Everything goes over such lines, small control messages included. An endpoint that can do more declares it in `capabilities`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zerobubble.arguments import takes
from zerobubble.program import Channel
from zerobubble.rules import ValueKind
from zerobubble.runtime.transport.control import Topic
from zerobubble.runtime.transport.rank_process import RankProcess
from zerobubble.runtime.transport.stalls import StallMonitor
from zerobubble.runtime.transport.sums import RingSums
from zerobubble.runtime.transport.work import Work
from zerobubble.runtime.values.shapes import Shapes

Put = Callable[[Sequence[Tensor | None]], None]
"""Sends the tensors of one message, None for missing ones."""
Take = Callable[[], tuple[Tensor | None, ...]]
"""Waits for the next message and returns its tensors, None for missing ones."""


class PeerGoneError(RuntimeError):
    """The rank at the other end has closed the line, or did not answer in time."""


class Line(NamedTuple):
    """Carries tensors from rank `source` to rank `destination` in the order of their sends. No line waits for another.

    `carries` says what they are. Lines of `ValueKind` carry what stages exchange, on the pipeline's device. Their line 0 is the channel of
    a program; lines with another `number` carry what belongs to its messages. Lines of a `Topic` carry one-dimensional tensors on the CPU.
    """

    source: int
    destination: int
    carries: ValueKind | Topic
    number: int = 0


class StoreTiming(NamedTuple):
    """How long ranks wait, in seconds, when they exchange reports of a failure through a store."""

    answer_s: float = 2.5
    """For the status of another rank; a rank that does not answer counts as frozen or cut off."""
    silence_s: float = 3.0
    """For the store; a store that is silent for longer counts as gone."""
    stay_s: float = 3.0
    """After a failure, for the others to read the report before the process ends."""
    listen_s: float = 0.5
    """Between two polls for an alarm of another rank."""


class Group(NamedTuple):
    """This `rank` among `size` ranks, and a `store` that all of them reach.

    The store is one of torch.distributed's, or has its methods `set`, `get`, `check` and `compare_set`. It is used only after failures, so
    it must not depend on the lines of the endpoint; `timing` is how long ranks wait for it and for each other. Each pipeline needs its own
    part of it, such as a `PrefixStore`.

    `store_host` is the rank whose process hosts the store, None if none of these ranks does. `name` differs between pipelines and is the
    same on all ranks. `processes` are those of `ranks` if they are known before the ranks connect; else the ranks exchange them.
    `survivors` are the ranks that are left of a larger group, where they keep their numbers; empty for ranks 0, 1, ... `stalls` has the
    stalls of this process since the ranks began to meet; None if they do not meet through the store.
    """

    rank: int
    size: int
    store: Any
    store_host: int | None = None
    name: str = ""
    timing: StoreTiming = StoreTiming()
    processes: tuple[RankProcess, ...] = ()
    survivors: tuple[int, ...] = ()
    stalls: StallMonitor | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the group, in order."""
        return self.survivors or tuple(range(self.size))

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the group."""
        return self.rank == self.ranks[0]

    def place(self, rank: int) -> int:
        """Returns the place of `rank` among the ranks of the group, from 0: backends count ranks so."""
        return self.survivors.index(rank) if self.survivors else rank


@takes()
class Capabilities(NamedTuple):
    """Features of an endpoint beyond its lines."""

    device_types: frozenset[str] = frozenset({"cpu"})
    """The types of devices whose tensors it carries."""

    completes_in_order: bool = False
    """Started receives complete by themselves, and messages between two ranks complete in the order of their sends, across all lines. Once
    a message has arrived, messages sent before it can be read without waiting."""

    carries_whole_messages: bool = False
    """It has a `message_lane` for each channel. A lane carries all tensors of a message at once and marks missing ones, but must know the
    shapes of all its messages before the first. Messages of unknown shapes go over the lines."""

    can_be_captured: bool = False
    """The host waits for no message of known shapes: on an accelerator, the current stream does, so that a graph can contain messages."""


class Traffic(NamedTuple):
    """The traffic of a channel in a step: its number of `messages`, and how many the receiver waits for `at_once`."""

    messages: int
    at_once: int


class MessageLane(Protocol):
    """One end of a channel that carries whole messages. A message marks for each tensor whether it is present and requires a gradient."""

    def sender(self, shapes: Shapes) -> Put:
        """Returns a function that sends a message of these `shapes`. It may wait for a free slot, and raises `PeerGoneError`."""

    def receiver(self, shapes: Shapes, *, differentiable: bool) -> Take:
        """Returns a function that waits for the next message, which has these `shapes`, and returns it. It raises `PeerGoneError`.

        With `differentiable`, received tensors require gradients where the sent ones do, which the shapes are expected to predict.
        """


class Summing(Work, Protocol):
    """A sum that was started. After `wait`, `times` says when it began and ended, in `perf_counter_ns`, if known."""

    @property
    def times(self) -> tuple[int, int] | None:
        """When it began gathering its input and when it had scattered the result; None if the device does not report times."""


class Sums(Protocol):
    """This rank's part in sums over some ranks. They run one after another while the rank computes."""

    def start(self, gather: Callable[[], Tensor], scatter: Callable[[Tensor], None]) -> Summing:
        """Starts a sum of `gather()`, a contiguous one-dimensional tensor of the same size on all ranks; `scatter` gets the result.

        All ranks start their sums in the same order. The two functions run in this order before `wait` returns, possibly in another
        thread, so that few of the tensors exist at once.
        """

    def close(self) -> None:
        """Starts no more sums. A running sum ends when the connections close."""


class Endpoint(ABC):
    """One rank's end of a transport among the ranks of `group`.

    An endpoint belongs to one pipeline. On every rank, the pipeline calls `connect`, then `open`, then `open_channels`, and `close` at the
    end. The endpoint decides how long it waits for another rank. While the pipeline is created, these calls run in a thread of their own,
    which is left behind if another rank fails or `Pipeline(timeout=...)` has passed. `close` may then run at the same time.
    """

    group: Group
    name = "of your own"
    """The name of this transport in messages."""
    capabilities = Capabilities()

    @abstractmethod
    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        """Returns a function that starts sending one contiguous tensor along `line`, which begins here.

        The tensor stays unchanged until its work is done. `sender` itself must not communicate. The function returns without waiting for
        the receiver, and raises `RuntimeError` if the connection is known to be lost.
        """

    @abstractmethod
    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        """Returns a function that starts receiving the next tensor of `line`, which ends here, into a tensor of its size and dtype.

        Receives are started in the order of the messages, long before these may arrive.
        """

    @abstractmethod
    def close(self) -> None:
        """Drops every connection. A rank that waits at the other end of a line gets an error at once. Closing twice does nothing.

        Messages whose sends are done still arrive.
        """

    def connect(self) -> None:  # noqa: B027 - most endpoints have nothing to do here
        """Connects to the other ranks. Afterwards control messages work. Raises `RuntimeError` if a rank is missing."""

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:  # noqa: B027
        """Prepares for tensors on `device`. `channels` are the channels that programs may use, the same on every rank.

        No rank sends before `open` has returned on all of them.
        """

    def open_channels(self, channels: Iterable[Channel]) -> None:  # noqa: B027
        """Connects `channels` if their first message would otherwise block both ranks. Every rank passes the same channels."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns each rank's `tensor`, in rank order; it is on the CPU and has the same size and dtype on all ranks."""
        return exchange_all(self, tensor, self.group.ranks)

    def sums(self, members: Sequence[int], number: int = 0) -> Sums:
        """Returns sums over the ranks `members`, this one included, of tensors on the pipeline's device.

        By default they use lines in a ring. Two ranks may be neighbors in several rings; `number` distinguishes their lines.
        """
        here, size = members.index(self.group.rank), len(members)
        send = self.sender(Line(self.group.rank, members[(here + 1) % size], ValueKind.WEIGHT_WORK, number))
        receive = self.receiver(Line(members[here - 1], self.group.rank, ValueKind.WEIGHT_WORK, number))
        return RingSums(here, size, send, receive)

    def disconnect(self, rank: int) -> None:  # noqa: B027 - an endpoint that notices by itself has nothing to do here
        """Ends the lines to a `rank` that has ended, so that waits for it raise at once.

        Called from another thread: a connection may outlive its process in children of that process.
        """

    def abort(self) -> bool:
        """Ends the work of this rank's device that would wait for a failed rank; returns whether it can.

        Data received after that is invalid. Called from any thread; returns at once, and does nothing the second time.
        """
        return False

    def detach(self) -> None:  # noqa: B027
        """Closes this process's descriptors of the connections, which stay open in the parent.

        Called in a child that was forked from the endpoint's process. Nothing else is called there, and this object is never freed.
        """

    def message_lane(self, channel: Channel, messages: Sequence[Shapes], at_once: int) -> MessageLane:
        """Returns this rank's end of `channel` for `messages` of at most these shapes; the receiver waits for up to `at_once` at a time.

        A step uses one lane of a channel, the same at both ends, and receives all its messages. Only for endpoints that carry whole
        messages.
        """
        raise NotImplementedError(f"{type(self).__name__} does not carry whole messages")

    def held_bytes(self) -> int:
        """Returns the bytes of this rank's memory that it holds for messages to others, 0 if it does not count them."""
        return 0

    def bytes_for(self, traffic: Mapping[Channel, Traffic]) -> int:
        """Like `held_bytes`, for steps that send this `traffic` over the channels that begin here, in messages as large as those so far."""
        return self.held_bytes()


def exchange_all(endpoint: Endpoint, tensor: Tensor, members: Sequence[int]) -> list[Tensor]:
    """Returns the `tensor` of each of these ranks, in order; it is on the CPU and has the same size and dtype on all of them."""
    here = endpoint.group.rank
    others = [rank for rank in members if rank != here]
    gathered = {rank: tensor if rank == here else torch.empty_like(tensor) for rank in members}
    works = [endpoint.sender(Line(here, rank, Topic.GATHER))(tensor) for rank in others]
    works += [endpoint.receiver(Line(rank, here, Topic.GATHER))(gathered[rank]) for rank in others]
    for work in works:
        work.wait()
    return list(gathered.values())
