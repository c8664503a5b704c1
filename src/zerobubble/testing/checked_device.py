"""A device that proves order: the CPU takes the part of an accelerator, with streams, events and memory that check every access.

Tensors are the CPU's and every operation runs when it is called, so results are right even if a wait is missing. What is checked is the
order that the program asks for. A dispatch mode assigns each operation to the current stream of its thread, as on an accelerator, and
`order` compares its accesses with earlier ones. Operations on pinned memory alone belong to the host. Messages over gloo read and write on
streams of their own: a wait for one that carries device memory orders the current stream, as with NCCL.

Graphs are captured and replayed as on an accelerator; see `graphs`.

Collectives of torch and the streams of FSDP2 are checked in the same way. `torch.compile` runs its functions uncompiled in the context, as
in any dispatch mode. Accesses of one host thread that is not synchronized with another are not seen.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from zerobubble.arguments import takes
from zerobubble.runtime import device as device_module
from zerobubble.runtime.device import Host, stand_in
from zerobubble.testing.graphs import CapturedGraph, Waitable
from zerobubble.testing.interception import intercepted
from zerobubble.testing.order import Access, CheckedEvent, CheckedStream, Clock, Memory, OrderError, Waits

Result = TypeVar("Result")
Started = TypeVar("Started", bound="Waitable")
_NO_ACCESS = ("empty", "new_empty", "set_", "resize_", "is_same_size", "sym_", "_version")
_SYNCHRONIZING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
"""Operations after which the host has their result, or its size."""
_UNDECLARED_WRITES = {"native_batch_norm": ("running_mean", "running_var")}
"""Arguments that operations write, though their schemas do not say so."""
_NOT_SITES = (os.path.dirname(__file__), os.path.dirname(torch.__file__), device_module.__file__, contextlib.__file__, "<")
"""Beginnings of the paths of code that only passes a call on."""


class CheckedDevice(Host):
    """An accelerator on the CPU that checks order; `checked_device` installs one.

    `errors` are all violations so far. `waits.seen` has the sites of all waits, as file and line, and `waits.by_host` those at which the
    host waited for the device, in order. `num_operations` counts what was checked, by name of the stream, and `num_replays` replays of
    graphs. Work of a thread is checked from its first `set_stream` on. `left_out` and `continues` are those of `checked_device`.
    """

    has_graphs = True

    def __init__(self, left_out: Collection[str] = (), *, continues: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self._continues = continues
        self.errors: list[OrderError] = []
        self.is_open = True
        self.waits = Waits(self.site, left_out, lambda: self.graph)
        self.num_operations: dict[str, int] = {}
        self.num_replays = 0
        self._lock = threading.RLock()
        self._host = CheckedStream(0, "the host", None, self.waits, self._lock)
        self._streams = [self._host]
        self._default = self._new("the default stream")
        self._allocating = [self._default]
        self._here = threading.local()
        self._memory: dict[int, Memory] = {}
        self._shared: dict[int, Memory] = {}
        self._arriving: dict[int, Clock] = {}

    def _new(self, name: str) -> CheckedStream:
        with self._lock:
            stream = CheckedStream(len(self._streams), name, self._host, self.waits, self._lock)
            self._streams.append(stream)
            return stream

    def current_stream(self) -> CheckedStream:
        stream: CheckedStream = getattr(self._here, "stream", self._default)
        return stream

    def new_stream(self, *, allocates_again: bool = True) -> CheckedStream:
        """Creates a stream; `close` checks the memory that was freed to it if it `allocates_again`."""
        stream = self._new(f"the stream of {_site()}")
        if allocates_again:
            self._allocating.append(stream)
        return stream

    @contextmanager
    def on_stream(self, stream: CheckedStream) -> Iterator[None]:
        """A context in which the calling thread enqueues work on `stream`."""
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def set_stream(self, stream: CheckedStream) -> None:
        """Makes `stream` current in the calling thread, and checks what that thread does from here on."""
        self._here.stream = stream
        self.check_thread()

    def check_thread(self) -> None:
        """Checks the operations of the calling thread."""
        if not getattr(self._here, "mode", None):
            self._here.mode = _Mode(self)
            self._here.mode.__enter__()

    def new_event(self, *, timed: bool = False) -> CheckedEvent:
        """Creates an event; its times can be compared if it is `timed`."""
        return CheckedEvent(self._host, self.current_stream, self.waits, self.errors, timed=timed)

    def keep_for(self, tensor: Tensor, stream: CheckedStream) -> None:
        """Keeps the memory of `tensor` from reuse before the work that is on `stream` when it is freed."""
        if self.waits.counts():
            self._memory_of(tensor).kept_for.add(stream.number)

    def synchronize(self) -> None:
        if self.waits.host_counts():
            self._over()

    def _over(self) -> None:
        """Orders what follows on any stream after all work so far."""
        with self._lock:
            for stream in self._streams[1:]:
                self._host.join(stream.clock)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor of `shape` and `dtype` in host memory that is checked."""
        with self._lock:
            tensor = super().host_memory(shape, dtype)
            self._add(tensor.untyped_storage(), self._host, on_host=True)
        return tensor

    @property
    def graph(self) -> CapturedGraph | None:
        """The graph that the calling thread captures; None while it captures none."""
        graph: CapturedGraph | None = getattr(self._here, "graph", None)
        return graph

    def capture(self, run: Callable[[], Result], pool: Any) -> tuple[Any, Callable[[], object], Result]:
        """Captures the work of `run()` as a graph. Returns `pool` or a new one, the function that replays it, and the result.

        Raises `RuntimeError` for what a capture excludes; see `graphs`.
        """
        state, stream = torch.get_rng_state(), self.new_stream(allocates_again=False)
        self._over()
        with self.on_stream(stream):
            graph = self._here.graph = CapturedGraph(self)
            try:
                result = run()
            finally:
                self._here.graph = None
                torch.set_rng_state(state)
        graph.end()
        self._over()

        def replay() -> None:
            self.num_replays += 1
            graph.replay()

        return pool or object(), replay, result

    def site(self) -> str:
        """Returns where the calling thread is, as file and line: in a replay, where its work was captured."""
        return getattr(self._here, "site", None) or _site()

    @contextmanager
    def at_site(self, site: str) -> Iterator[None]:
        """A context in which operations and waits of the calling thread are from `site`."""
        self._here.site = site
        try:
            yield
        finally:
            self._here.site = None

    def knows(self, tensor: Tensor) -> bool:
        """Returns whether an operation has used the memory of `tensor`."""
        return _is_checked(tensor) and tensor.untyped_storage()._cdata in self._memory

    def note(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], new: Sequence[Tensor], *, is_async: bool) -> None:
        """Adds the operation `name` of the calling thread, which `reads` and `writes` tensors and returns `new` ones.

        If `is_async`, it is a copy that returns at once.
        Raises `OrderError` if it is not ordered after an earlier one.
        """
        with self._lock:
            tensors = [*reads, *writes]
            on_host = [self._memory_of(tensor).on_host for tensor in tensors]
            stream = self._host if tensors and all(on_host) else self.current_stream()
            allocated = [tensor for tensor in new if tensor.untyped_storage()._cdata not in self._memory]
            self._access(stream, name, reads, writes)
            if allocated:
                self._reuse(stream, name)
                for tensor in allocated:
                    self._add(tensor.untyped_storage(), stream, on_host=stream is self._host)
                if not name.startswith(_NO_ACCESS):
                    self._access(stream, name, (), allocated)
            is_blocking_copy = name in ("copy_", "_to_copy") and any(on_host) and not is_async
            if stream is not self._host and (name in _SYNCHRONIZING or is_blocking_copy):
                self.waits.host_waits()
                self._host.join(stream.clock)

    def _access(self, stream: CheckedStream, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        time = stream.tick()
        self.num_operations[stream.name] = self.num_operations.get(stream.name, 0) + 1
        site = self.site()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                memory = self._memory_of(tensor)
                access = Access(stream, time, name, site, *_extent(tensor))
                self._checking(memory.write if is_write else memory.read, access)
                if not memory.on_host and stream is not memory.owner:
                    self._shared[tensor.untyped_storage()._cdata] = memory

    def _checking(self, check: Callable[..., None], *args: Any) -> None:
        try:
            check(*args)
        except OrderError as error:
            self.errors.append(error)
            if not self._continues:
                raise

    def _reuse(self, stream: CheckedStream, name: str) -> None:
        """Checks that `stream` may reuse the memory that was freed to it."""
        for key, memory in list(self._shared.items()):
            if memory.owner is stream and memory.is_freed():
                del self._shared[key]
                self._memory.pop(key, None)
                self._checking(memory.reuse, stream, f"{name}, which may reuse freed memory,", self.site())

    def _add(self, storage: torch.UntypedStorage, owner: CheckedStream, *, on_host: bool) -> Memory:
        if len(self._memory) > 10_000:
            self._memory = {key: memory for key, memory in self._memory.items() if key in self._shared or not memory.is_freed()}
        # The weak reference keeps the address of the storage object, though not its memory, from being used again.
        memory = self._memory[storage._cdata] = Memory(owner, StorageWeakRef(storage).expired, on_host=on_host)  # type: ignore[no-untyped-call]
        return memory

    def _memory_of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        return self._memory.get(storage._cdata) or self._add(storage, self._default, on_host=False)

    def message(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> tuple[Clock, bool]:
        """Adds the message or collective `name`, which `reads` and `writes` tensors on a stream of its own.

        Returns the clock at its end, and whether the tensors are host memory.
        """
        with self._lock:
            tensors = [*reads, *writes]
            on_host = all(self._memory_of(tensor).on_host for tensor in tensors)
            stream = self._new(f"the message of {self.site()}")
            if not on_host:
                stream.join(self.current_stream().clock)
            self._access(stream, name, reads, writes)
            for tensor in tensors:
                self._memory_of(tensor).kept_for.add(stream.number)  # torch's backends hold the memory until the message is over
            return dict(stream.clock), on_host

    def message_over(self, clock: Clock, *, on_host: bool) -> bool:
        """Orders what follows after a message that ended at `clock`: for one `on_host`, the host; else the current stream, as NCCL does.

        Returns whether the wait has an effect.
        """
        counts = self.waits.host_counts() if on_host else self.waits.counts()
        if counts:
            with self._lock:
                (self._host if on_host else self.current_stream()).join(clock)
        return counts

    def started(self, start: Callable[[], Started]) -> Started:
        """Starts a message with `start`, which calls `message`, and returns it."""
        started = start()
        if self.graph is not None:
            self.graph.add_message(started, start, _site())
        return started

    def waits_for(self, message: Waitable) -> None:
        """Notes that the calling thread waits for `message`."""
        if self.graph is not None:
            self.graph.wait_message(message, _site())

    def collective(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Adds the functional collective `name`, which `reads` tensors.

        Its results, `new` or `writes`, are over once `collective_over` was called for them.
        """
        with self._lock:
            for tensor in new:
                self._add(tensor.untyped_storage(), self.current_stream(), on_host=False)
            clock, _ = self.message(name, reads, [*writes, *new])
            for tensor in (*writes, *new):
                self._arriving[tensor.untyped_storage()._cdata] = clock

    def collective_over(self, tensor: Tensor) -> None:
        """Orders what follows on the current stream after the collective that writes `tensor`."""
        clock = self._arriving.pop(tensor.untyped_storage()._cdata, None)
        if clock is not None:
            self.message_over(clock, on_host=False)

    def read_by_host(self, name: str, tensor: Tensor) -> None:
        """Adds the operation `name` of the host, which reads `tensor`, if that is host memory.

        Raises `OrderError` if the host has not waited for the copy that wrote it.
        """
        with self._lock:
            if _is_checked(tensor) and self._memory_of(tensor).on_host:
                self._access(self._host, name, (tensor,), ())

    def close(self) -> None:
        """Checks the memory that was freed and not used again, and nothing from here on."""
        with self._lock:
            self.is_open = False
            for stream in self._allocating:
                self._reuse(stream, "an allocation")


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of one thread."""

    def __init__(self, device: CheckedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if any(
            issubclass(tensor_type, Tensor) and tensor_type is not torch.nn.Parameter and tensor_type is not Tensor for tensor_type in types
        ):
            tensors = [leaf for leaf in pytree.tree_leaves((args, options)) if isinstance(leaf, Tensor)]
            if any(is_traceable_wrapper_subclass(tensor) for tensor in tensors):
                return NotImplemented  # the operations on its parts come here
        if func.namespace == "fsdp":  # their schemas do not say what they write
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **options)
        reads, writes = _accesses(func, args, options)
        graph = self._device.graph
        if graph is not None:
            graph.before(_site(), (args, options), writes)
        output = func(*args, **options)
        if self._device.is_open:
            self._note(func, args, options, reads, writes, output)
        if graph is not None:
            allocates = func._overloadpacket.__name__.startswith(_NO_ACCESS)
            graph.add(_site(), func, (args, options), writes, output, is_enqueued=not allocates)
        return output

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reads: list[Tensor], writes: list[Tensor], output: Any
    ) -> None:
        name = func._overloadpacket.__name__
        new = [] if _is_view(func) else list(filter(_is_checked, pytree.tree_leaves(output)))
        if func.namespace == "c10d" or name == "_wrap_tensor_autograd":
            return  # collectives are seen in Python, where one can wait for them
        if name == "wait_tensor":
            self._device.collective_over(args[0])
        elif func.namespace == "_c10d_functional":
            self._device.collective(name, reads, writes, new)
        elif reads or writes or new:
            self._device.note(name, reads, writes, new, is_async=bool(_argument(func, "non_blocking", args, kwargs)))


def _is_view(func: Any) -> bool:
    """Returns whether an operation returns only views of its arguments."""
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _accesses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors that an operation reads and writes."""
    name = func._overloadpacket.__name__
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    if not _is_view(func) and not name.startswith(_NO_ACCESS):
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            is_write |= argument.name in _UNDECLARED_WRITES.get(name, ())
            (writes if is_write else reads).extend(filter(_is_checked, pytree.tree_leaves(value)))
    return reads, writes


def _is_checked(value: Any) -> bool:
    is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not value.is_meta
    return is_real and value.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    places = [place for place, argument in enumerate(func._schema.arguments) if argument.name == name]
    return args[places[0]] if places and places[0] < len(args) else kwargs.get(name)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its storage, and the byte after its last."""
    low = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return low, low
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (int(last) + 1) * tensor.element_size()


def _site() -> str:
    """Returns the file and line of the nearest caller that is neither torch's nor of this package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_SITES):
            return f"{os.sep.join(path.split(os.sep)[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


@takes()
@contextmanager
def checked_device(left_out: Collection[str] = (), *, continues: bool = False) -> Iterator[CheckedDevice]:
    """A context in which the CPU is an accelerator that checks order: pipelines made inside run their code for accelerators.

    Raises `OrderError` for each access that is not ordered after an earlier one of the same memory, in the code that does it. A pipeline
    reports it like any error of a step. On exit, raises the first one if the code inside has caught it. Every rank process enters its own.

    Args:
        left_out: The sites of waits that have no effect, such as "stage/copy_lane.py:91" from `waits.seen`. A test can so find out whether
            a wait is needed.
        continues: Adds violations to `errors` and continues, instead of raising them. So one run finds all, and no rank waits forever for a
            collective of one that has failed.

    >>> import torch
    >>> from zerobubble.runtime.device import interface
    >>> with checked_device() as device:
    ...     copies = device.new_stream()
    ...     numbers = torch.ones(2)
    ...     with device.on_stream(copies):
    ...         try:
    ...             numbers.sum()
    ...         except OrderError as error:
    ...             print(error.fields["operation"], "after", error.fields["earlier_operation"])
    ...     device.errors.clear()
    sum after ones
    """
    device = CheckedDevice(left_out, continues=continues)
    with ExitStack() as stack:
        stack.enter_context(stand_in(device))
        stack.enter_context(intercepted(device))
        stack.enter_context(_Mode(device))
        yield device
        with suppress(OrderError):  # it is in `errors`
            device.close()
    if device.errors and not continues:
        raise device.errors[0]
