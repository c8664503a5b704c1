"""Lines over gloo, for tensors on CPUs: a tag for each line, so that none waits for another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.rules import Stuff
from zerobubble.runtime.transport.control import Topic
from zerobubble.runtime.transport.endable_store import EndableStore
from zerobubble.runtime.transport.endpoint import Capabilities, Endpoint, Group, Line, PeerGoneError
from zerobubble.runtime.transport.gather import gather_objects
from zerobubble.runtime.transport.sockets import NewConnections, PeerSockets
from zerobubble.runtime.transport.work import Work

STUFF = (Stuff.ACTIVATION, Stuff.GRADIENT, Stuff.WORK, Stuff.OUTPUT, Stuff.SOFTMAX_SUMS, Stuff.GRADIENT_PART)
"""What stages exchange, in the order of the tags and communicators."""
_TOPIC_TAG = 16
_NUMBER_TAGS = 5040
"""The distance in tags between lines of different numbers. Gloo shares tags out to network interfaces by remainder; any number up to 10
divides this, so a line takes the same interface as those beside it and keeps its order among them."""


class GlooEndpoint(Endpoint):
    """Gloo backends of the pipeline's own, so that closing them wakes the ranks of this pipeline and no others: one for topics, one for
    tensors. A wait ends with an error after `timeout` seconds.

    They only send and receive. In torch's collectives over gloo, a rank that hangs up in the middle makes the others free buffers which
    gloo's thread still reads and writes: `ProcessGroupGloo.cpp` declares them after the options that hold gloo's reference to them.
    """

    name = "gloo"
    capabilities = Capabilities(completes_in_order=True)

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = group
        self.timeout = timeout
        self._for_topics: list[Any] = []
        self._for_tensors: list[Any] = []
        self._stores: list[EndableStore] = []
        self._over = threading.Event()
        # A backend still open when the interpreter ends would abort the process.
        self._sockets = PeerSockets()
        self._end = weakref.finalize(self, _drop, self._over, self._sockets, self._for_topics, self._for_tensors, self._stores)

    def connect(self) -> None:
        self._make("control", self._for_topics)

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:
        self._make("lines", self._for_tensors)

    def _make(self, name: str, backends: list[Any]) -> None:
        """Make a backend, which blocks until all ranks have come; raises `PeerGoneError` when this rank closes meanwhile."""
        rank, size, store, *_ = self.group
        endable = EndableStore(dist.distributed_c10d.PrefixStore(name, store), self._over, self.timeout)
        self._stores.append(endable)
        with NewConnections() as new:
            backends.append(dist.distributed_c10d.ProcessGroupGloo(endable, rank, size, timeout=timedelta(seconds=self.timeout)))
        if self._over.is_set():
            backends.clear()
            raise PeerGoneError("this rank has given up")
        # The backend's own sockets are those of which another rank knows the other end.
        self._sockets.claim(new.found, gather_objects(self, list(new.found)), rank)

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        backends, tag, peer = self._backends(line), tag_of(line), line.destination
        return lambda tensor: backends[0].send([tensor], peer, tag)

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        backends, tag, peer = self._backends(line), tag_of(line), line.source
        return lambda tensor: backends[0].recv([tensor], peer, tag)

    def _backends(self, line: Line) -> list[Any]:
        """Where the line's backend is: the list, because a call that kept the backend itself would keep it open."""
        return self._for_topics if isinstance(line.carries, Topic) else self._for_tensors

    def disconnect(self, rank: int) -> None:
        self._sockets.disconnect(rank)

    def detach(self) -> None:
        self._end.detach()
        self._sockets.close_in_child()

    def close(self) -> None:
        self._end()


def tag_of(line: Line) -> int:
    """The tag of a line. The two directions between two ranks share a connection, so they differ, too."""
    if isinstance(line.carries, Topic):
        return _TOPIC_TAG + line.carries.value
    return lane_of(line) + line.number * _NUMBER_TAGS


def lane_of(line: Line) -> int:
    """A number for each kind of tensors and direction between two ranks, from 0 to 11."""
    assert isinstance(line.carries, Stuff)
    return 2 * STUFF.index(line.carries) + (line.source < line.destination)


def _drop(over: threading.Event, sockets: PeerSockets, *held: list[Any]) -> None:
    """Hang up first, because children that were forked may hold the connections, and drop the backends."""
    over.set()
    sockets.end()
    sockets.disconnect()
    sockets.clear()
    for each in held:
        each.clear()
