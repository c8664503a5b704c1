"""Streams, events and vector clocks: which operations of a device are ordered, and which accesses of memory are not.

Each stream counts its operations. Its clock holds, for every stream, how many of that stream's operations are over before its own next one
(Lamport 1978; Mattern 1989). Waits join clocks. The host is a stream as well: what it enqueues comes after all that it has waited for.

An access is ordered after another one if its stream's clock includes it. Two accesses of the same bytes, one of them a write, must be
ordered. The same holds for accesses of freed memory and its reuse. The allocator returns freed memory to the stream that allocated it at
once, unless `keep_for` named the streams of these accesses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from threading import RLock
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import torch

from zerobubble.errors import ZeroBubbleError

Clock = dict[int, int]
"""By number of a stream, how many of its operations are over."""


class OrderError(ZeroBubbleError):
    """Two accesses of the same memory are not ordered.

    Its fields are `operation`, `stream` and `site` (file and line) of the second access, and `earlier_operation`, `earlier_stream` and
    `earlier_site` of the first.
    """


class Access(NamedTuple):
    """An access by an operation to the bytes from `low` to `high` of a storage."""

    stream: CheckedStream
    time: int
    operation: str
    site: str
    low: int
    high: int

    def overlaps(self, low: int, high: int) -> bool:
        """Returns whether it accesses a byte of this range."""
        return self.low < high and low < self.high


class Memory:
    """What is known of a storage: the stream that allocated it, its last accesses, and the streams it is kept for.

    `is_freed` returns whether the storage is gone.
    """

    def __init__(self, owner: CheckedStream, is_freed: Callable[[], bool], *, on_host: bool) -> None:
        self.owner = owner
        self.is_freed = is_freed
        self.on_host = on_host
        self.kept_for: set[int] = set()
        self._writes: list[Access] = []
        self._reads: list[Access] = []

    def read(self, access: Access) -> None:
        """Adds a read. Raises `OrderError` if it is not ordered after the writes."""
        self._check(access, self._writes)
        self._reads = [other for other in self._reads if not _replaces(access, other)] + [access]

    def write(self, access: Access) -> None:
        """Adds a write. Raises `OrderError` if it is not ordered after all other accesses."""
        self._check(access, self._writes)
        self._check(access, self._reads)
        self._reads = [other for other in self._reads if not (access.low <= other.low and other.high <= access.high)]
        self._writes = [other for other in self._writes if not _replaces(access, other)] + [access]

    def reuse(self, stream: CheckedStream, operation: str, site: str) -> None:
        """Raises `OrderError` if `stream` may get this memory while accesses of other streams still run."""
        exempt = [other for other in (*self._writes, *self._reads) if other.stream.number not in self.kept_for]
        self._check(Access(stream, stream.clock.get(stream.number, 0), operation, site, 0, 1 << 62), exempt)

    @property
    def is_shared(self) -> bool:
        """Whether a stream other than its owner has used it."""
        return any(access.stream is not self.owner for access in (*self._writes, *self._reads))

    def _check(self, access: Access, earlier: list[Access]) -> None:
        for other in earlier:
            if other.overlaps(access.low, access.high) and not access.stream.is_after(other):
                raise OrderError(
                    "{operation} on {stream} at {site} is not ordered after {earlier_operation} on {earlier_stream} at {earlier_site}",
                    operation=access.operation,
                    stream=access.stream.name,
                    site=access.site,
                    earlier_operation=other.operation,
                    earlier_stream=other.stream.name,
                    earlier_site=other.site,
                    remedy="let the stream wait for an event, or the host for the stream, or keep the memory for the stream",
                )


def _replaces(new: Access, old: Access) -> bool:
    """Returns whether any access ordered after `new` is also ordered after `old`, an access of the same bytes."""
    return new.low <= old.low and old.high <= new.high and new.stream.is_after(old)


class Captured(Protocol):
    """The methods of a graph that waits call while it is captured."""

    def record(self, event: CheckedEvent, stream: CheckedStream) -> None: ...
    def wait_stream(self, stream: CheckedStream, waited_for: CheckedStream, site: str) -> None: ...
    def wait_event(self, stream: CheckedStream, event: CheckedEvent, site: str) -> None: ...


class Waits:
    """The sites of all waits so far, as file and line, and those `left_out`, which have no effect and which a test may change at any time.

    `by_host` has the sites at which the host waited for the device, in order. In a step there should be none: the host enqueues work ahead
    of the device, and a wait ends its lead. `graph` returns the graph that the calling thread captures, None while it captures none.
    """

    def __init__(self, site: Callable[[], str], left_out: Collection[str], graph: Callable[[], Captured | None]) -> None:
        self.seen: set[str] = set()
        self.by_host: list[str] = []
        self.left_out = set(left_out)
        self.site = site
        self.graph = graph

    def counts(self) -> bool:
        """Notes the site of a wait. Returns whether the wait has an effect."""
        site = self.site()
        self.seen.add(site)
        return site not in self.left_out

    def host_counts(self) -> bool:
        """Like `counts`, for a wait of the host."""
        self.host_waits()
        return self.counts()

    def host_waits(self) -> None:
        """Notes that the host waits. Raises `RuntimeError` if it captures a graph: the work to wait for runs only in replays."""
        if self.graph() is not None:
            raise RuntimeError(f"the host waits for the device at {self.site()} while it captures a graph")
        self.by_host.append(self.site())


class CheckedStream:
    """A stream with a vector clock, and with the methods of `torch.Stream`.

    `CheckedDevice` creates it, with its `number`, 0 for the host, a `name` for messages, the stream of the `host`, None for the host
    itself, and the `waits` and the `lock` of the device.
    """

    def __init__(self, number: int, name: str, host: CheckedStream | None, waits: Waits, lock: RLock) -> None:
        self.number = number
        self.name = name
        self.device = torch.device("cpu")
        self.clock: Clock = {}
        self._host = host
        self._waits = waits
        self.lock = lock

    def tick(self) -> int:
        """Adds an operation, which comes after all that the host has waited for; returns its time."""
        if self._host is not None:
            self.join(self._host.clock)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def join(self, clock: Clock) -> None:
        """Orders what follows on this stream after `clock`."""
        for number, time in clock.items():
            if time > self.clock.get(number, 0):
                self.clock[number] = time

    def is_after(self, access: Access) -> bool:
        """Returns whether what follows on this stream comes after `access`."""
        return self.clock.get(access.stream.number, 0) >= access.time

    def follows(self, stream: CheckedStream) -> bool:
        """Returns whether what follows on this stream comes after all that is on `stream` now."""
        return self.clock.get(stream.number, 0) >= stream.clock.get(stream.number, 0)

    def wait_stream(self, stream: CheckedStream) -> None:
        """Waits for all work that is on `stream` now."""
        if self._waits.counts():
            graph = self._waits.graph()
            if graph is not None:
                graph.wait_stream(self, stream, self._waits.site())
            with self.lock:
                self.join(stream.clock)

    def wait_event(self, event: CheckedEvent) -> None:
        """Waits for what `event` recorded."""
        if self._waits.counts():
            graph = self._waits.graph()
            if graph is not None:
                graph.wait_event(self, event, self._waits.site())
            with self.lock:
                self.join(event.clock)

    def record_event(self) -> CheckedEvent:
        """Returns an event that records the work that is on this stream now."""
        event = CheckedEvent(self._host or self, lambda: self, self._waits, [], timed=False)
        event.record()
        return event

    def synchronize(self) -> None:
        """Has the host wait for all work that is on this stream now."""
        if self._host is not None and self._waits.host_counts():
            with self.lock:
                self._host.join(self.clock)


class CheckedEvent:
    """An event with the clock of the stream that recorded it, and with the methods of `torch.Event`.

    `CheckedDevice` creates it, with its `host` stream, a function that returns the `current` stream, its `waits` and its `errors`. Only a
    `timed` event has times.
    """

    def __init__(
        self, host: CheckedStream, current: Callable[[], CheckedStream], waits: Waits, errors: list[OrderError], *, timed: bool
    ) -> None:
        self.clock: Clock = {}
        self._host = host
        self._current = current
        self._waits = waits
        self._errors = errors
        self._timed = timed
        self._ns: int | None = None
        self._number = 0

    def record(self, stream: CheckedStream | None = None) -> None:
        """Records the work that is on `stream` now, the current one by default."""
        stream = stream or self._current()
        graph = self._waits.graph()
        if graph is not None:
            graph.record(self, stream)
        with self._host.lock:
            stream.tick()
            self._number = stream.number
            self.clock = dict(stream.clock)
            self._ns = perf_counter_ns()

    def synchronize(self) -> None:
        """Has the host wait for the recorded work."""
        if self._waits.host_counts():
            with self._host.lock:
                self._host.join(self.clock)

    def query(self) -> bool:
        """Returns whether the recorded work is over. It is, and then the host knows."""
        with self._host.lock:
            self._host.join(self.clock)
        return True

    def elapsed_time(self, other: CheckedEvent) -> float:
        """Returns the milliseconds from this event to `other`. Raises `OrderError` if the host has not waited for both."""
        return (other._time() - self._time()) / 1e6

    def _time(self) -> int:
        assert self._timed, "an event has times if it is created with timed=True"
        assert self._ns is not None, "an event has a time once it is recorded"
        if self._host.clock.get(self._number, 0) < self.clock[self._number]:
            self._errors.append(OrderError("the time of an event is read before the host has waited for it", remedy="synchronize it first"))
            raise self._errors[-1]
        return self._ns
