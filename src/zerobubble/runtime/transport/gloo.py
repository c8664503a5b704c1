"""Carries lines over gloo, for tensors on CPUs. Each line has its own tag, so that none waits for another.

Three properties of gloo shape this module:

- Its constructor blocks until all ranks have connected, and only its own timeouts end it. So it waits in an `EndableStore`, and a call of
  `close` from another thread makes that wait raise.
- A backend that is freed while the interpreter exits aborts the process, so `weakref.finalize` closes it before.
- A forked child inherits its sockets, which then stay open when the rank ends. So `PeerSockets` finds and shuts them down from outside.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.program import Channel
from zerobubble.rules import ValueKind
from zerobubble.runtime.transport.control import Topic
from zerobubble.runtime.transport.endpoint import Capabilities, Endpoint, Group, Line, PeerGoneError
from zerobubble.runtime.transport.gather import gather_objects
from zerobubble.runtime.transport.sockets import NewConnections, PeerSockets
from zerobubble.runtime.transport.work import Work

_VALUE_KINDS = (
    ValueKind.ACTIVATION,
    ValueKind.GRADIENT,
    ValueKind.WEIGHT_WORK,
    ValueKind.OUTPUT,
    ValueKind.SOFTMAX_SUMS,
    ValueKind.GRADIENT_PART,
)
"""The messages that stages exchange, in the order of their tags."""
_TOPIC_TAG = 16
_NUMBER_TAGS = 5040
"""The distance in tags between lines of different numbers. Gloo assigns tags to network interfaces by remainder. Each count of interfaces
up to 10 divides 5040, so all numbers of a line use the same interface, which keeps their order."""


class GlooEndpoint(Endpoint):
    """Two gloo backends, one for control messages and one for tensors. A wait ends with an error after `timeout` seconds.

    They belong to this pipeline alone, so closing them wakes only its ranks. They only send and receive, because torch's collectives over
    gloo are not safe against failures. If a rank disconnects in the middle, the others free buffers that gloo's thread still reads and
    writes: `ProcessGroupGloo.cpp` declares them after the options that hold gloo's reference to them.
    """

    name = "gloo"
    capabilities = Capabilities(completes_in_order=True, can_be_captured=True)  # on the checked device; a CPU has no graphs

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = group
        self.timeout = timeout
        self._for_control: list[Any] = []
        self._for_tensors: list[Any] = []
        self._stores: list[EndableStore] = []
        self._over = threading.Event()
        # A backend that is still open when the interpreter exits would abort the process.
        self._sockets = PeerSockets()
        self._end = weakref.finalize(self, _drop, self._over, self._sockets, self._for_control, self._for_tensors, self._stores)

    def connect(self) -> None:
        self._make("control", self._for_control)

    def open(self, device: torch.device, channels: Sequence[Channel]) -> None:
        self._make("lines", self._for_tensors)

    def _make(self, name: str, backends: list[Any]) -> None:
        """Makes a backend, which blocks until all ranks have connected. Raises `PeerGoneError` if this rank closes in the meantime."""
        rank, size = self.group.place(self.group.rank), self.group.size
        endable = EndableStore(dist.distributed_c10d.PrefixStore(name, self.group.store), self._over, self.timeout)
        self._stores.append(endable)
        with NewConnections() as new:
            backends.append(dist.distributed_c10d.ProcessGroupGloo(endable, rank, size, timeout=timedelta(seconds=self.timeout)))
        if self._over.is_set():
            backends.clear()
            raise PeerGoneError("this rank has given up")
        # Another thread may open sockets at the same time. The backend's own are those whose other end another rank reports.
        reported = dict(zip(self.group.ranks, gather_objects(self, list(new.found)), strict=True))
        self._sockets.claim(new.found, {peer: theirs for peer, theirs in reported.items() if peer != self.group.rank})

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        backends, tag, peer = self._backends(line), tag_of(line), self.group.place(line.destination)
        return lambda tensor: backends[0].send([tensor], peer, tag)

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        backends, tag, peer = self._backends(line), tag_of(line), self.group.place(line.source)
        return lambda tensor: backends[0].recv([tensor], peer, tag)

    def _backends(self, line: Line) -> list[Any]:
        """Returns the list with the line's backend. A sender that held the backend itself would keep it open after `close`."""
        return self._for_control if isinstance(line.carries, Topic) else self._for_tensors

    def disconnect(self, rank: int) -> None:
        self._sockets.disconnect(rank)

    def detach(self) -> None:
        self._end.detach()
        self._sockets.close_in_child()

    def close(self) -> None:
        self._end()


def tag_of(line: Line) -> int:
    """Returns the tag of a line. The two directions between two ranks share a connection, so their tags differ, too."""
    if isinstance(line.carries, Topic):
        return _TOPIC_TAG + line.carries.value
    assert isinstance(line.carries, ValueKind)
    return 2 * _VALUE_KINDS.index(line.carries) + (line.source < line.destination) + line.number * _NUMBER_TAGS


def _drop(over: threading.Event, sockets: PeerSockets, *held: list[Any]) -> None:
    """Disconnects, because forked children may hold the connections, and drops the backends."""
    over.set()
    sockets.end()  # first half-close and let peers finish writing: see there
    sockets.disconnect()
    sockets.clear()
    for collection in held:
        collection.clear()


_SHORTEST_S, _LONGEST_S = 0.001, 0.05


class EndableStore(dist.Store):  # type: ignore[name-defined, misc]
    """Wraps `store` for a backend under construction. Its waits raise `PeerGoneError` once `over` is set, and after `timeout` seconds.

    A torch.distributed store serves one call of a process at a time, so a wait inside it would block the reports of failures. Here a wait
    polls instead. Keep this object as long as the backend: torch holds no reference to it.
    """

    def __init__(self, store: Any, over: threading.Event, timeout: float) -> None:
        super().__init__()
        self._store = store
        self._over = over
        self._timeout = timedelta(seconds=timeout)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    def add(self, key: str, value: int) -> int:
        total: int = self._store.add(key, value)
        return total

    def check(self, keys: Sequence[str]) -> bool:
        has_keys: bool = self._store.check(keys)
        return has_keys

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause_s = _SHORTEST_S
        while not self._store.check(keys):
            if self._over.wait(pause_s):
                raise PeerGoneError("this rank has given up")
            if time.monotonic() > end:
                raise PeerGoneError(f"timed out waiting for {', '.join(keys)}")
            pause_s = min(2 * pause_s, _LONGEST_S)
