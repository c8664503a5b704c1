"""Has a checked device see what no dispatch mode does: messages, collectives, the streams of FSDP2, files and NumPy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from zerobubble.testing.order import Clock

_HOST_READS = ("numpy", "tolist", "__array__")
_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
"""Collectives whose first argument is read and written."""
_INTO_FIRST = (
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)
"""Collectives that write their first argument and read their second."""
_FSDP2 = "torch.distributed.fsdp._fully_shard."
_FSDP2_MODULES = ("_fsdp_collectives", "_fsdp_param_group", "_fsdp_state")


class Seeing(Protocol):
    """The methods of a checked device that are called here."""

    def current_stream(self) -> Any: ...
    def new_stream(self, *, allocates_again: bool = True) -> Any: ...
    def on_stream(self, stream: Any) -> AbstractContextManager[None]: ...
    def new_event(self, *, timed: bool = False) -> Any: ...
    def message(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> tuple[Clock, bool]: ...
    def message_over(self, clock: Clock, *, on_host: bool) -> bool: ...
    def started(self, start: Callable[[], Any]) -> Any: ...
    def waits_for(self, message: Any) -> None: ...
    def read_by_host(self, name: str, tensor: Tensor) -> None: ...


class _Message(dist.Work):
    """The work of a message, whose wait orders what follows after it."""

    def __init__(self, device: Seeing, work: Any, clock: Clock, on_host: bool) -> None:
        super().__init__()
        self._device, self._work, self._clock, self._on_host = device, work, clock, on_host
        self.has_work = work is not None  # torch has waited for a collective without one

    def wait(self, *args: Any) -> Any:
        with _disable_current_modes():  # gloo copies the result
            done = self._work.wait(*args) if self.has_work else None
        if self._device.message_over(self._clock, on_host=self._on_host):
            self._device.waits_for(self)
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def exception(self) -> Any:
        return self._work.exception()

    def get_future(self) -> Any:
        return self._work.get_future()


@contextmanager
def _replaced(holder: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    replaced = vars(holder).get(name)  # not `getattr`: what it gets from a class of C++ is no method any more
    setattr(holder, name, make(getattr(holder, name)))
    try:
        yield
    finally:
        if replaced is None:
            delattr(holder, name)
        else:
            setattr(holder, name, replaced)


@contextmanager
def intercepted(device: Seeing) -> Iterator[None]:
    """A context in which `device` sees messages, collectives, and reads of the host."""
    with ExitStack() as stack:
        for holder, name, make in [*_messages(device), *_collectives(device), *_host_reads(device), *_streams_of_fsdp2(device)]:
            stack.enter_context(_replaced(holder, name, make))
        yield


Replacement = tuple[Any, str, Callable[[Any], Any]]
"""An object, the name of its attribute, and the function that makes the new value from the old."""


def _messages(device: Seeing) -> Iterator[Replacement]:
    def message(name: str) -> Callable[[Any], Any]:
        def make(start: Any) -> Any:
            def started(self: Any, tensors: list[Tensor], *args: Any) -> Any:
                reads, writes = (tensors, []) if name == "send" else ([], tensors)

                def begin() -> _Message:
                    clock, on_host = device.message(name, reads, writes)
                    return _Message(device, start(self, tensors, *args), clock, on_host)

                return device.started(begin)

            return started

        return make

    for name in ("send", "recv"):
        yield dist.distributed_c10d.ProcessGroupGloo, name, message(name)


def _collectives(device: Seeing) -> Iterator[Replacement]:
    def collective(name: str) -> Callable[[Any], Any]:
        def make(start: Any) -> Any:
            def started(self: Any, *args: Any, **kwargs: Any) -> Any:
                first, second = ([leaf for leaf in pytree.tree_leaves(part) if isinstance(leaf, Tensor)] for part in (args[:1], args[1:2]))

                def begin() -> _Message:
                    clock, on_host = device.message(name, first if name in _IN_PLACE else second, first)
                    return _Message(device, start(self, *args, **kwargs), clock, on_host)

                message = device.started(begin)
                return message if message.has_work else message.wait()

            return started

        return make

    for name in (*_IN_PLACE, *_INTO_FIRST):
        if hasattr(dist.ProcessGroup, name):
            yield dist.ProcessGroup, name, collective(name)


def _host_reads(device: Seeing) -> Iterator[Replacement]:
    def saves(save: Any) -> Any:
        def saved(content: Any, *args: Any, **kwargs: Any) -> Any:
            for leaf in pytree.tree_leaves(content):
                if isinstance(leaf, Tensor):
                    device.read_by_host("torch.save", leaf)
            return save(content, *args, **kwargs)

        return saved

    def reads(name: str) -> Callable[[Any], Any]:
        def make(read: Any) -> Any:
            def checked(self: Tensor, *args: Any, **kwargs: Any) -> Any:
                device.read_by_host(name, self)
                return read(self, *args, **kwargs)

            return checked

        return make

    yield torch, "save", saves
    for name in _HOST_READS:
        yield Tensor, name, reads(name)


def _streams_of_fsdp2(device: Seeing) -> Iterator[Replacement]:
    """FSDP2 gets its streams and events from the device's module, `torch.cpu`, whose streams do nothing.

    It allocates on a stream of its own only after that stream has waited for the current one.
    """
    handle = SimpleNamespace(
        Stream=lambda priority=0: device.new_stream(allocates_again=False),
        Event=lambda: device.new_event(),
        current_stream=device.current_stream,
        stream=device.on_stream,
        current_device=lambda: 0,
        is_available=lambda: True,
    )
    for name in _FSDP2_MODULES:
        module = importlib.import_module(_FSDP2 + name)
        if hasattr(module, "_get_device_handle"):
            yield module, "_get_device_handle", lambda get: lambda *args: handle
