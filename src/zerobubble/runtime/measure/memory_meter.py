"""Counts the bytes that forwards keep for backwards, storage by storage, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, UntypedStorage

from zerobubble.runtime.measure.saving_hooks import saving_through
from zerobubble.runtime.measure.storages import addresses_of, storages_of


class Held:
    """One reason to keep a tensor alive; when it goes, so does its share in the meter."""

    __slots__ = ("_keys", "_meter", "tensor")

    def __init__(self, tensor: Tensor, meter: Meter, keys: tuple[int, ...]) -> None:
        self.tensor = tensor
        self._meter = meter
        self._keys = keys

    def __del__(self) -> None:
        for key in self._keys:
            self._meter._release(key)


class Meter:
    """Bytes of the distinct storages held by saved tensors and queued weight work, those of `excluded` (parameters) left out."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self.bytes = 0
        self._excluded = addresses_of(excluded)
        self._storages: dict[int, list[int]] = {}

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Do not count what is saved of `tensors` from here on."""
        self._excluded |= addresses_of(tensors)

    def include(self, tensors: Iterable[Tensor]) -> None:
        """The memory of `tensors`, which were excluded, will be others'."""
        self._excluded -= addresses_of(tensors)

    def hold(self, tensor: Tensor) -> Held:
        """Count the storage of `tensor` until the returned token goes."""
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
        """Count what autograd saves inside."""
        with saving_through(self.hold, lambda held: held.tensor):
            yield
