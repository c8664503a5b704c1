"""Counts the bytes that forwards keep for backwards, storage by storage, on any device.

`Meter` counts while they are saved. `held_bytes` counts from an autograd graph, when memory has run out and nothing was metered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from zerobubble.errors import InputError
from zerobubble.runtime.values.sparse import is_sparse, parts_of

T = TypeVar("T")


def saving_through(keep: Callable[[Tensor], T], read: Callable[[T], Tensor]) -> AbstractContextManager[object]:
    """Returns a context in which autograd saves what `keep` makes of each tensor, and `read` returns the tensor.

    torch.compile would also compile the hooks of a module, with constants of the first tensor in them, such as its version. So they are
    excluded from compilation.
    """
    if "torch._dynamo" in sys.modules:  # importing it takes seconds; code that compiles has already imported it
        keep, read = torch.compiler.disable(keep), torch.compiler.disable(read)  # type: ignore[no-untyped-call]
    return torch.autograd.graph.saved_tensors_hooks(keep, read)


class Held:
    """A reference to a tensor that counts in the meter. When it is freed, its share is subtracted."""

    __slots__ = ("_keys", "_meter", "tensor")

    def __init__(self, tensor: Tensor, meter: Meter, keys: tuple[int, ...]) -> None:
        self.tensor = tensor
        self._meter = meter
        self._keys = keys

    def __del__(self) -> None:
        for key in self._keys:
            self._meter._release(key)


class Meter:
    """The bytes of distinct storages held by saved tensors and queued weight work, without those of `excluded` (parameters)."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self.bytes = 0
        self._excluded = addresses_of(excluded)
        self._storages: dict[int, list[int]] = {}

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Stops counting what is saved of `tensors` from now on."""
        self._excluded |= addresses_of(tensors)

    def include(self, tensors: Iterable[Tensor]) -> None:
        """Counts memory at the addresses of `tensors` once more: they were excluded, and their memory is about to be reused."""
        self._excluded -= addresses_of(tensors)

    def hold(self, tensor: Tensor) -> Held:
        """Counts the storage of `tensor` until the returned reference is freed."""
        return Held(tensor, self, tuple([self._count(storage) for storage in storages_of(tensor)]))

    def _count(self, storage: UntypedStorage) -> int:
        key = storage.data_ptr()
        if key not in self._excluded:
            entry = self._storages.setdefault(key, [0, storage.nbytes()])
            if entry[0] == 0:
                self.bytes += entry[1]
            entry[0] += 1
        return key

    def _release(self, key: int) -> None:
        entry = self._storages.get(key)
        if entry is None:
            return
        entry[0] -= 1
        if entry[0] == 0:
            self.bytes -= entry[1]
            del self._storages[key]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which everything that autograd saves is counted."""
        with saving_through(self.hold, lambda held: held.tensor):
            yield


class _NothingRuns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation that computes: reading what a checkpoint saved would otherwise recompute it.

    Saved tensors are returned detached, so `detach` is allowed.
    """

    def __torch_dispatch__(self, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return function(*arguments, **(named or {}))
        raise RuntimeError("reading a graph computes nothing")


def held_bytes(tensors: Iterable[Tensor], nodes: Iterable[Any], excluded: Iterable[Tensor]) -> int:
    """Returns the bytes of the distinct storages of `tensors` and of what the graphs behind `nodes` saved, without those of `excluded`."""
    left_out = addresses_of(excluded)
    storages: dict[int, int] = {}
    with _NothingRuns():  # type: ignore[no-untyped-call]
        for tensor in (*tensors, *_saved(nodes)):
            storages |= {storage.data_ptr(): storage.nbytes() for storage in storages_of(tensor)}
    return sum(size for pointer, size in storages.items() if pointer not in left_out)


def _saved(nodes: Iterable[Any]) -> Iterator[Tensor]:
    todo, seen = list(nodes), set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name == "saved_tensors" or name.startswith("_saved_"):
                yield from _read(node, name)


def _read(node: Any, name: str) -> list[Tensor]:
    """Returns the tensors of one attribute; none if they are freed, changed in place or would be recomputed."""
    try:
        value = getattr(node, name)
    except (RuntimeError, InputError):
        return []
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return [part for part in parts if isinstance(part, Tensor)]


_PLAIN = (Tensor, nn.Parameter)


def storages_of(tensor: Tensor) -> tuple[torch.UntypedStorage, ...]:
    """Returns the storages that hold `tensor`; none if torch does not expose them."""
    if tensor._is_zerotensor():  # zeros without memory, which forward-mode differentiation makes
        return ()
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    if is_sparse(tensor):
        return _of_all(parts_of(tensor))
    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return _of_all(part for part in parts if isinstance(part, Tensor))
    return (tensor.untyped_storage(),) if tensor.layout is torch.strided else ()


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the addresses of the storages of `tensors`. Tensors that share memory share an address."""
    addresses = set()
    for tensor in tensors:
        if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor._is_zerotensor():  # nearly all; each B calls this
            addresses.add(tensor.untyped_storage().data_ptr())
        else:
            addresses.update(storage.data_ptr() for storage in storages_of(tensor))
    return addresses


def _of_all(tensors: Iterable[Tensor]) -> tuple[torch.UntypedStorage, ...]:
    return tuple(storage for tensor in tensors for storage in storages_of(tensor))
