"""Transports for tests: one with only NCCL's guarantees, one that counts, and one between threads of a process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from queue import Empty, Queue
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import HashStore

from tests.device import DEVICE
from zerobubble.rules import ValueKind
from zerobubble.runtime.transport.choice import gloo_endpoint
from zerobubble.runtime.transport.gloo import GlooEndpoint
from zerobubble.runtime.transport.mesh import layout_of_group
from zerobubble.runtime.transport.staged import StagedEndpoint
from zerobubble.transport import Capabilities, Endpoint, Group, Line, PeerGoneError, StoreTiming, Work


class _StagedLines(StagedEndpoint):
    """Gloo for tensors of an accelerator, with the constructor of `GlooEndpoint`."""

    def __init__(self, group: Group, timeout: float) -> None:
        super().__init__(GlooEndpoint(group, timeout))

    def connect(self) -> None:
        self._gloo.connect()

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        return super().sender(line) if isinstance(line.carries, ValueKind) else self._gloo.sender(line)

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        return super().receiver(line) if isinstance(line.carries, ValueKind) else self._gloo.receiver(line)


Lines: Any = GlooEndpoint if DEVICE.type == "cpu" else _StagedLines
"""Lines over gloo for tensors on `DEVICE`."""
E = TypeVar("E", bound=Endpoint)


class BareLines(Lines):  # type: ignore[misc]
    """Gloo with only NCCL's guarantees: a channel that never carried a gradient cannot signal that one is missing."""

    capabilities = Capabilities()


class CountingLines(Lines):  # type: ignore[misc]
    """Gloo that counts the exchanges of tensors between stages, in `used`."""

    used = 0

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        return self._counting(line, super().sender(line))

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        return self._counting(line, super().receiver(line))

    def _counting(self, line: Line, start: Callable[[Tensor], Work]) -> Callable[[Tensor], Work]:
        def counted(tensor: Tensor) -> Work:
            self.used += isinstance(line.carries, ValueKind)
            return start(tensor)

        return counted


def of_group(kind: Callable[[Group, float], E], group: Any) -> E:
    """This rank's endpoint among the ranks of a process group."""
    return kind(gloo_endpoint(layout_of_group(group), 60.0).group, 60.0)


class OverGloo(Endpoint):
    """Gloo, except for the store through which ranks report failures and the time they wait for it."""

    capabilities = GlooEndpoint.capabilities if DEVICE.type == "cpu" else Capabilities(frozenset({"cpu", DEVICE.type}))

    def __init__(self, group: Any, store: Callable[[Any], Any], timing: StoreTiming) -> None:
        self._gloo: Endpoint = of_group(Lines, group)
        self.group = self._gloo.group._replace(store=store(self._gloo.group.store), timing=timing)
        self.connect, self.open, self.gather = self._gloo.connect, self._gloo.open, self._gloo.gather  # type: ignore[method-assign]

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        return self._gloo.sender(line)

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        return self._gloo.receiver(line)

    def close(self) -> None:
        self._gloo.close()


class Threads:
    """Shared state of threads that act as ranks: a queue per line, a store, and the ranks that have closed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = HashStore()
        self.closed: set[int] = set()
        self._lock = Lock()
        self._queues: dict[Line, Queue[Tensor]] = defaultdict(Queue)

    def queue(self, line: Line) -> Queue[Tensor]:
        with self._lock:
            return self._queues[line]


class ThreadEndpoint(Endpoint):
    """A transport in one file: `Pipeline(transport=ThreadEndpoint(threads, rank))` in each thread."""

    capabilities = Capabilities(frozenset({"cpu", DEVICE.type}))

    def __init__(self, threads: Threads, rank: int) -> None:
        self.group = Group(rank, threads.size, threads.store)
        self._threads = threads

    def sender(self, line: Line) -> Callable[[Tensor], Work]:
        queue = self._threads.queue(line)

        def send(tensor: Tensor) -> Work:
            queue.put(tensor.detach().clone())
            return _Sent()

        return send

    def receiver(self, line: Line) -> Callable[[Tensor], Work]:
        return lambda tensor: _Receive(self._threads, line, tensor)

    def close(self) -> None:
        self._threads.closed.add(self.group.rank)


class _Sent:
    def wait(self) -> None:
        """Nothing to wait for: the queue has a copy."""


class _Receive:
    """The next tensor of a line. Receives of one line complete in the order in which they were started."""

    def __init__(self, threads: Threads, line: Line, tensor: Tensor) -> None:
        self._threads, self._line, self._tensor = threads, line, tensor

    def wait(self) -> None:
        queue, end = self._threads.queue(self._line), monotonic() + 120.0
        while monotonic() < end:
            is_closed = self._line.source in self._threads.closed
            try:
                self._tensor.copy_(queue.get(timeout=0.02))
                return
            except Empty:
                if is_closed:
                    raise PeerGoneError("the thread has closed its end") from None
        raise PeerGoneError("timed out")
