"""Graphs of a checked device: the work that a capture enqueued, which every replay repeats on the same memory.

As on a GPU, a capture computes nothing: its writes are undone, and memory that it allocates holds no values before a replay. Its stream is
its own, as that of `torch.cuda.graph`. A replay runs no Python of the captured code. It repeats the operations, messages and waits, on new
streams that only captured waits order. It comes after all work on the stream that launches it, and what follows there comes after the whole
graph. The sites of captured waits have numbers, so that a test can leave out each of them in a replay.

CUDA's rules raise a `RuntimeError`, as there. The host waits for nothing during a capture. A stream takes part once it waits for one that
does, and the capturing stream must wait for it, and for each message, before the end. No stream that takes part waits for work from before
the capture. A replay must find the memory that the captured work uses, even if nothing else needs it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from zerobubble.runtime.split.compiled.capture import copy_into
from zerobubble.testing.order import CheckedEvent, CheckedStream, Clock, Waits

Message = TypeVar("Message", bound="Waitable")


class Waitable(Protocol):
    """The work of a message."""

    def wait(self) -> Any: ...


class Launching(Protocol):
    """The methods of a checked device that a graph calls."""

    @property
    def waits(self) -> Waits: ...
    def current_stream(self) -> CheckedStream: ...
    def new_stream(self, *, allocates_again: bool = True) -> CheckedStream: ...
    def on_stream(self, stream: CheckedStream) -> Any: ...
    def at_site(self, site: str) -> Any: ...
    def knows(self, tensor: Tensor) -> bool: ...


class _Replay(NamedTuple):
    """The streams of a replay by number of the captured one, the clocks of its events, and its messages in flight."""

    streams: dict[int, CheckedStream]
    events: dict[CheckedEvent, Clock]
    messages: dict[int, Waitable]


class CapturedGraph:
    """The work of one capture, which begins on the current stream."""

    def __init__(self, device: Launching) -> None:
        self._device = device
        self._origin = device.current_stream()
        self._streams = {self._origin.number: self._origin}
        self._events: set[CheckedEvent] = set()
        self._num_waits = 0
        self._waiting: dict[int, tuple[Waitable, str]] = {}
        self._nodes: list[Callable[[_Replay], None]] = []
        self._own: dict[int, Tensor] = {}
        self._lent: dict[int, tuple[int, str]] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def _part(self, what: str, site: str) -> int:
        """Returns the number of the current stream. Raises `RuntimeError` if it does not take part."""
        stream = self._device.current_stream()
        if stream.number not in self._streams:
            raise RuntimeError(f"{what} at {site} is on {stream.name}, which does not take part in the capture")
        return stream.number

    def before(self, site: str, arguments: Any, writes: Sequence[Tensor]) -> None:
        """Notes memory from before the capture that an operation uses, and keeps its content before `writes`, to restore it at the end.

        Memory that no operation has used before belongs to constants, which the graph holds.
        """
        with _disable_current_modes():
            for tensor in pytree.tree_leaves(arguments):
                if isinstance(tensor, Tensor) and self._device.knows(tensor) and tensor.untyped_storage()._cdata not in self._own:
                    self._lent.setdefault(tensor.untyped_storage()._cdata, (0, site))
            for tensor in writes:
                key = tensor.untyped_storage()._cdata
                if key not in self._own and key not in self._before:
                    whole = _whole(tensor)
                    self._before[key] = whole, whole.clone()

    def add(
        self,
        site: str,
        func: Any,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        writes: Sequence[Tensor],
        output: Any,
        *,
        is_enqueued: bool,
    ) -> None:
        """Adds an operation that has run on `arguments`: its output, and what it wrote unless it only allocates."""
        number = self._part(func._overloadpacket.__name__, site)
        with _disable_current_modes():
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, arguments)
            written = tuple(tensor.detach() for tensor in writes)
            used = [tensor for tensor in (*pytree.tree_leaves((args, kwargs)), *written) if isinstance(tensor, Tensor)]
            lent = {tensor.untyped_storage()._cdata for tensor in used}
            new = {place: leaf.detach() for place, leaf in enumerate(pytree.tree_leaves(output)) if _is_new(leaf, lent)}
            for tensor in new.values():
                self._own.setdefault(tensor.untyped_storage()._cdata, _whole(tensor))
        if not is_enqueued or not (new or writes):
            return
        self._count_uses(used)

        def node(replay: _Replay) -> None:
            with self._device.on_stream(replay.streams[number]), self._device.at_site(site):
                with _unsafe_preserve_version_counter(written):
                    results = pytree.tree_leaves(func(*args, **kwargs))
                for place, tensor in new.items():
                    write(tensor, results[place])

        self._nodes.append(node)

    def _count_uses(self, tensors: Sequence[Tensor]) -> None:
        for key in (tensor.untyped_storage()._cdata for tensor in tensors):
            if key in self._lent:
                self._lent[key] = self._lent[key][0] + 1, self._lent[key][1]

    def record(self, event: CheckedEvent, stream: CheckedStream) -> None:
        """Adds a point in a stream, if it takes part."""
        if stream.number in self._streams:
            self._events.add(event)
            self._nodes.append(lambda replay: replay.events.update({event: dict(replay.streams[stream.number].clock)}))

    def wait_stream(self, stream: CheckedStream, waited_for: CheckedStream, site: str) -> None:
        """Adds a wait of `stream` for all work on another one."""
        if self._joins(stream, waited_for.number in self._streams, site):
            self._add_wait(site, lambda replay: replay.streams[stream.number].join(replay.streams[waited_for.number].clock))

    def wait_event(self, stream: CheckedStream, event: CheckedEvent, site: str) -> None:
        """Adds a wait of `stream` for a point."""
        if self._joins(stream, event in self._events, site):
            self._add_wait(site, lambda replay: replay.streams[stream.number].join(replay.events[event]))

    def _add_wait(self, site: str, wait: Callable[[_Replay], None]) -> None:
        name = self._next_wait(site)

        def node(replay: _Replay) -> None:
            with self._device.at_site(name):
                if self._device.waits.counts():
                    wait(replay)

        self._nodes.append(node)

    def _next_wait(self, site: str) -> str:
        """Returns the site of the next wait in replays, with its number in the graph."""
        self._num_waits += 1
        return f"wait {self._num_waits} of a graph, at {site}"

    def _joins(self, stream: CheckedStream, for_captured: bool, site: str) -> bool:
        """Returns whether a wait is captured; `stream` then takes part."""
        if for_captured:
            self._streams[stream.number] = stream
        elif stream.number in self._streams:
            raise RuntimeError(f"{stream.name} waits at {site} for work that is not captured")
        return for_captured

    def add_message(self, message: Message, start: Callable[[], Message], site: str) -> None:
        """Adds a message that `start` has started."""
        number, key = self._part("a message", site), id(message)
        self._waiting[key] = message, site

        def node(replay: _Replay) -> None:
            with self._device.on_stream(replay.streams[number]), self._device.at_site(site):
                replay.messages[key] = start()

        self._nodes.append(node)

    def wait_message(self, message: Waitable, site: str) -> None:
        """Adds a wait of the current stream for a message. Raises `RuntimeError` if the message began before the capture."""
        stream, key = self._device.current_stream(), id(message)
        if not self._joins(stream, key in self._waiting, site):
            return
        _, start = self._waiting.pop(key)
        name = self._next_wait(f"{site} for the message of {start}")

        def node(replay: _Replay) -> None:
            with self._device.on_stream(replay.streams[stream.number]), self._device.at_site(name):
                replay.messages.pop(key).wait()

        self._nodes.append(node)

    def end(self) -> None:
        """Ends the capture: restores what was written, and spoils what was allocated. Raises `RuntimeError` for work without a wait."""
        unjoined = [stream.name for stream in self._streams.values() if not self._origin.follows(stream)]
        unjoined += [f"the message of {site}" for _, site in self._waiting.values()]
        with _disable_current_modes():
            for tensor, content in self._before.values():
                write(tensor, content)
            for tensor in self._own.values():
                write(tensor, torch.full_like(tensor, 255))  # NaN in every floating-point type
        self._before.clear()
        if unjoined:
            raise RuntimeError(f"the stream that captures a graph does not wait for {', '.join(unjoined)}")

    def replay(self) -> None:
        """Repeats the work. Raises `RuntimeError` if memory that it uses was freed after the capture."""
        for key, (count, site) in self._lent.items():
            if torch._C._storage_Use_Count(key) <= count + 1:  # this graph's tensors, and the call's own
                raise RuntimeError(f"a graph uses memory at {site} that was freed after its capture")
        launching = self._device.current_stream()
        replay = _Replay({self._origin.number: launching}, {}, {})
        for number in self._streams:
            if number != self._origin.number:
                replay.streams[number] = self._device.new_stream()
                replay.streams[number].join(launching.clock)
        with torch.no_grad(), _without_autocast():
            for node in self._nodes:
                node(replay)
        for stream in replay.streams.values():
            launching.join(stream.clock)


@torch.no_grad()
def write(static: Tensor, values: Tensor) -> None:
    """Writes memory of a graph, unseen by autograd."""
    with _unsafe_preserve_version_counter(static):
        copy_into(static, values)


def _whole(tensor: Tensor) -> Tensor:
    """Returns all bytes of the storage of a tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload, no-any-return]


def _is_new(value: Any, lent: set[int]) -> bool:
    """Returns whether a result is a tensor in memory of its own."""
    return isinstance(value, Tensor) and value.layout is torch.strided and value.untyped_storage()._cdata not in lent


@contextmanager
def _without_autocast() -> Iterator[None]:
    """A context for captured operations, which already have the types that autocast chose."""
    with torch.autocast("cpu", enabled=False):
        yield
