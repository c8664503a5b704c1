"""The protocol of a transport: one rank's end of the lines between the ranks of a group, and what it can do beyond them.

A minimal endpoint has `sender` and `receiver`: a call each that starts one exchange of one tensor over a line. All that a pipeline says,
small control messages included, goes over such lines. An endpoint that can do more says so in its `capabilities`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.rules import Stuff
from zerobubble.runtime.transport.control import Topic
from zerobubble.runtime.transport.rank_process import RankProcess
from zerobubble.runtime.transport.sums import RingSums
from zerobubble.runtime.transport.work import Work
from zerobubble.runtime.values.shapes import Shapes

Put = Callable[[Sequence[Tensor | None]], None]
"""Sends the tensors of one message, some of which may be missing."""
Take = Callable[[], tuple[Tensor | None, ...]]
"""Waits for the next message and gives its tensors, None for those that are missing."""


class PeerGoneError(RuntimeError):
    """The rank at the other end has closed the line, or did not answer in time."""


class Line(NamedTuple):
    """Tensors travel along a line from rank `source` to rank `destination` in the order in which they were sent.

    `carries` says what they are. Lines of `Stuff` carry what stages exchange, on the pipeline's device, and line 0 of them is the channel
    of a program; further `number`s are lines beside it for what concerns its messages. Lines of a `Topic` carry one-dimensional tensors on
    the CPU. No line waits for another.
    """

    source: int
    destination: int
    carries: Stuff | Topic
    number: int = 0


class StoreTiming(NamedTuple):
    """How long ranks wait, in seconds, when they tell each other of a failure through a store."""

    answer_s: float = 2.5
    """For each other's answer to the question of what they do; a rank that does not answer counts as frozen or cut off."""
    silence_s: float = 3.0
    """For the store; one that is silent for longer counts as gone."""
    stay_s: float = 3.0
    """After a failure, so that the others can read the report before the process ends."""
    listen_s: float = 0.5
    """Between two looks for whether another rank asks."""


class Group(NamedTuple):
    """This `rank` among `size` ranks, and a `store` that all of them reach.

    The store is one of torch.distributed's, or has its methods `set`, `get`, `check` and `compare_set`; it is asked only when something
    goes wrong, so it must not depend on the lines. Each pipeline needs a part of it for itself, such as a `PrefixStore`. `store_host` is
    the rank whose process holds the store, None when it is none of these ranks. `name` differs between pipelines and is the same on all
    ranks. `processes` are those of ranks 0, 1, ... where they are known before the ranks are connected; else ranks tell them then.
    """

    rank: int
    size: int
    store: Any
    store_host: int | None = None
    name: str = ""
    timing: StoreTiming = StoreTiming()
    processes: tuple[RankProcess, ...] = ()


class Capabilities(NamedTuple):
    """What an endpoint can do beyond its lines."""

    device_types: frozenset[str] = frozenset({"cpu"})
    """The types of devices whose tensors it carries."""

    completes_in_order: bool = False
    """A receive that was started completes by itself, and of two messages between the same ranks, on whatever lines, the one sent first
    completes first. Once a message has come, what was sent before it can be read without waiting."""

    carries_whole_messages: bool = False
    """It has a `message_lane` for each channel. Such a lane carries all tensors of a message at once and tells which are missing, but needs
    to know the shapes of all its messages before the first; messages whose shapes are not known go over the lines."""


class Traffic(NamedTuple):
    """What goes over a channel in a step: so many `messages`, of which the receiver waits for `at_once` at a time."""

    messages: int
    at_once: int


class MessageLane(Protocol):
    """One end of a channel that carries whole messages. A message tells of each tensor whether it is there and asks for a gradient."""

    def sender(self, shapes: Shapes) -> Put:
        """A call that sends a message of these `shapes`. It may wait for room, and raises `PeerGoneError`."""

    def receiver(self, shapes: Shapes, *, differentiable: bool) -> Take:
        """A call that gives the next message, which has these `shapes`. It waits for the message, and raises `PeerGoneError`.

        With `differentiable`, its tensors ask for gradients where those that were sent do, which is expected to be where the shapes do.
        """


class Summing(Work, Protocol):
    """A sum that has been started. Once it has been waited for, `times` says when it began and ended, in `perf_counter_ns`, if known."""

    @property
    def times(self) -> tuple[int, int] | None:
        """From when it gathered its numbers to when it had scattered their sums; None where the device does not tell."""


class Sums(Protocol):
    """This rank's part in sums over some ranks, made one after another beside what it computes."""

    def start(self, gather: Callable[[], Tensor], scatter: Callable[[Tensor], None]) -> Summing:
        """Start a sum of what `gather()` gives, a contiguous one-dimensional tensor of one size on all ranks; `scatter` takes the result.

        All ranks start theirs in one order. Both calls come in this order and before `wait` returns, perhaps from another thread, so that
        few of the tensors are there at once.
        """

    def close(self) -> None:
        """Start no more. A sum under way ends when the connections close."""


class Endpoint(ABC):
    """One rank's end of a transport among the ranks of `group`.

    An endpoint belongs to one pipeline, which calls `connect`, then `open`, then `open_channels`, on every rank, and `close` at the end. It
    decides itself how long it waits for another rank. While the pipeline is made it is called in a thread of its own, which is left behind
    when another rank fails or `Pipeline(timeout=...)` has passed; `close` may be called meanwhile.
    """

    group: Group
    name = "of your own"
    """What messages call this transport."""
    capabilities = Capabilities()

    @abstractmethod
    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        """A call that starts sending one contiguous tensor along a line that begins here. The tensor stays unchanged until its work is
        done.

        Making the call must not communicate. The call returns without waiting for the receiver, and raises `RuntimeError` when the
        connection is known to be gone.
        """

    @abstractmethod
    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        """A call that starts receiving the next tensor of a line that ends here into a contiguous tensor of its size and dtype.

        Receives are started in the order of the messages, long before these may come.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop every connection. A rank that waits at the other end of a line gets an error at once. Closing twice does nothing."""

    def connect(self) -> None:  # noqa: B027 - most endpoints have nothing to do here
        """Reach the other ranks: afterwards lines of topics work. Raises `RuntimeError` when not all ranks come."""

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:  # noqa: B027
        """Be ready for tensors on `device`. `channels` are those that programs may use, the same on every rank.

        No rank sends before `open` has returned on all of them.
        """

    def open_channels(self, channels: Iterable[Channel]) -> None:  # noqa: B027
        """Connect these channels where their first message would wait for both ranks. Every rank calls it with the same channels."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's `tensor`, in rank order; it is on the CPU and has the same size and dtype on all ranks."""
        return exchange_all(self, tensor, range(self.group.size))

    def sums(self, members: Sequence[int], number: int = 0) -> Sums:
        """Sums over these ranks, of which this is one, of tensors on the pipeline's device. By default they go over lines, in a ring.

        Two ranks may be neighbours in several rings, whose lines are told apart by this `number`.
        """
        here, size = members.index(self.group.rank), len(members)
        send = self.sender(Line(self.group.rank, members[(here + 1) % size], Stuff.WORK, number))
        receive = self.receiver(Line(members[here - 1], self.group.rank, Stuff.WORK, number))
        return RingSums(here, size, send, receive)

    def disconnect(self, rank: int) -> None:  # noqa: B027 - an endpoint that notices by itself has nothing to do here
        """The process of `rank` has ended: end the lines to it, so that whoever waits for it gets an error at once.

        It is called from another thread, for a connection may outlive its process in children of that process.
        """

    def abort(self) -> bool:
        """A rank has failed: end what is under way on this rank's device, which would wait for others, and say whether there is such.

        What has been received since then is no message. It is called from any thread, returns at once, and does nothing the second time.
        """
        return False

    def detach(self) -> None:  # noqa: B027
        """This process was forked from the one that the endpoint belongs to: close its own descriptors of the connections, which stay open
        in the parent. Nothing else is called here any more, and this object is never freed."""

    def message_lane(self, channel: Channel, messages: Sequence[Shapes], at_once: int) -> MessageLane:
        """This rank's end of `channel` for `messages` of at most these shapes, of which the receiver may wait for `at_once` at a time.

        A step uses one lane of a channel, the same at both ends, and all its messages have been received when it is over. Only for
        endpoints that carry whole messages.
        """
        raise NotImplementedError(f"{type(self).__name__} does not carry whole messages")

    def held_bytes(self) -> int:
        """The bytes that it holds now in this rank's memory for messages to others, 0 where nobody counts them."""
        return 0

    def bytes_for(self, traffic: Mapping[Channel, Traffic]) -> int:
        """As `held_bytes`, in steps that send this `traffic` over the channels that begin here, in messages as large as those so far."""
        return self.held_bytes()


def exchange_all(endpoint: Endpoint, tensor: Tensor, members: Sequence[int]) -> list[Tensor]:
    """The `tensor` of each of these ranks, in order; it is on the CPU and has the same size and dtype on all of them."""
    here = endpoint.group.rank
    others = [rank for rank in members if rank != here]
    gathered = {rank: tensor if rank == here else torch.empty_like(tensor) for rank in members}
    works = [endpoint.sender(Line(here, rank, Topic.GATHER))(tensor) for rank in others]
    works += [endpoint.receiver(Line(rank, here, Topic.GATHER))(gathered[rank]) for rank in others]
    for work in works:
        work.wait()
    return list(gathered.values())
