"""Holds the tensors that autograd saves in the forward of one microbatch, so that they can be offloaded to host memory.

Hooks on saved tensors replace each tensor by an object of ours, which owns the reference. Offloading moves whole storages, each once, even
if several saved tensors are views of it. A storage is released only by dropping our references, so no memory in use elsewhere is ever
invalidated. A storage that others hold too stays on the device, because moving it would free nothing: parameters, buffers and their
autocast copies, tensors at the stage's boundary, tensors saved by several microbatches, and tensors that a Function keeps in an attribute.
The reference count of the storage detects them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

from zerobubble.runtime.measure.memory_meter import Held, Meter, saving_through
from zerobubble.runtime.stage.copy_lane import Copied, CopyLane
from zerobubble.timeline import Copying

SMALLEST_BYTES = 1024
"""Smaller storages stay: a copy has a fixed overhead, and there are many of them."""


class _Form(NamedTuple):
    """The geometry of a tensor in its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """Returns the tensor with this geometry in `storage`."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.size, self.stride)


class _Saved:
    """A saved tensor, held for autograd; `tensor` is None while it is on the host."""

    __slots__ = ("__weakref__", "_counted", "_meter", "_version", "tensor")

    def __init__(self, tensor: Tensor, meter: Meter | None) -> None:
        self._meter = meter
        self.keep(tensor.detach())  # detached: a node's saved output would keep the node, and so itself, alive

    def keep(self, tensor: Tensor) -> None:
        """Holds `tensor` in its current version."""
        self.tensor: Tensor | None = tensor
        self._version = tensor._version
        self._counted: Held | None = None if self._meter is None else self._meter.hold(tensor)

    def release(self) -> _Form:
        """Drops the tensor and returns its geometry."""
        tensor = self.tensor
        assert tensor is not None
        self.tensor = self._counted = None
        return _Form(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place after it was saved."""
        return self.tensor is not None and self.tensor._version != self._version

    def read(self) -> Tensor:
        """Returns the tensor to autograd. Raises `RuntimeError` if it was changed in place, as torch does."""
        if self.tensor is None:
            raise RuntimeError("the saved tensors of this forward are in host memory, and return only for its own backward pass")
        if self.is_changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.size())}] is at version {self.tensor._version}; expected version "
                f"{self._version} instead. Hint: a forward must not change a tensor that its backward needs: let it work on x.clone()"
            )
        return self.tensor


class _Moving:
    """A device storage that is offloaded or in transfer, and the saved tensors in it."""

    def __init__(self, saved: Sequence[_Saved], on_device: Tensor) -> None:
        self.on_device: Tensor | None = on_device
        self.on_host: Tensor | None = None
        self.counted: Held | None = None
        self._saved = [ref(tensor) for tensor in saved]
        self._forms: list[tuple[ref[_Saved], _Form]] = []

    def leave(self, lane: CopyLane) -> tuple[Tensor, Tensor]:
        """Prepares the copy to the host; returns its target and source."""
        assert self.on_device is not None
        self.on_host = lane.host_memory(self.on_device.nbytes)
        return self.on_host, self.on_device

    def release(self) -> bool:
        """Drops the device memory. Returns False if that would free nothing, or if the source has changed."""
        saved = list(_alive(self._saved))
        assert self.on_device is not None
        if any(tensor.is_changed for tensor in saved) or _num_holding(self.on_device) > 1 + len(saved):
            return False
        self._forms = [(ref(tensor), tensor.release()) for tensor in saved]
        self.on_device = None
        return bool(saved)

    def is_wanted(self) -> bool:
        """Returns whether any saved tensor in it is still alive."""
        return any(reference() is not None for reference, _ in self._forms)

    def take(self, device: torch.device, meter: Meter | None) -> tuple[Tensor, Tensor]:
        """Prepares the copy back to the device; returns its target and source."""
        assert self.on_host is not None
        self.on_device = torch.empty(self.on_host.nbytes, dtype=torch.uint8, device=device)
        self.counted = None if meter is None else meter.hold(self.on_device)
        return self.on_device, self.on_host

    def come_back(self) -> None:
        """Gives the saved tensors in it their memory back."""
        assert self.on_device is not None
        storage = self.on_device.untyped_storage()
        for reference, form in self._forms:
            tensor = reference()
            if tensor is not None:
                tensor.keep(form.tensor(storage))


class KeptForAutograd:
    """Holds the tensors that one forward saves on `device`, while it runs under `saving`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meter: Meter | None = None
        self._saved: list[ref[_Saved]] = []

    def saving(self, meter: Meter | None) -> AbstractContextManager[object]:
        """Context of the forward; `meter` counts the saved bytes."""
        self._meter = meter
        return saving_through(self._keep, _Saved.read)

    def _keep(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self._meter)
        self._saved.append(ref(saved))
        return saved

    def movable(self) -> list[tuple[Tensor, list[_Saved]]]:
        """Returns the storages that can be offloaded, as byte tensors, each with its saved tensors. Call it after the forward."""
        groups: dict[int, list[_Saved]] = {}
        for candidate in _alive(self._saved):
            if candidate.tensor is not None and _can_go(candidate.tensor, self._device):
                groups.setdefault(candidate.tensor.untyped_storage()._cdata, []).append(candidate)
        storages = []
        for saved in groups.values():
            assert saved[0].tensor is not None
            whole = _bytes_of(saved[0].tensor.untyped_storage())
            if whole.nbytes >= SMALLEST_BYTES and _num_holding(whole) == 1 + len(saved):
                storages.append((whole, saved))
        return storages


class MovableBytes(KeptForAutograd):
    """Measures how many `bytes` of a forward's saved tensors could be offloaded."""

    bytes = 0

    @contextmanager
    def saving(self, meter: Meter | None) -> Iterator[None]:
        with super().saving(meter):
            yield
        self.bytes = sum(whole.nbytes for whole, _ in self.movable())


class SavedTensors(KeptForAutograd):
    """The saved tensors of one forward, offloaded through `lane` as far as possible.

    Call in this order: `saving`, then after the forward `choose`, `begin_to_host`, `release`, `begin_back`, `come_back`.
    """

    def __init__(self, device: torch.device, lane: CopyLane) -> None:
        super().__init__(device)
        self._lane = lane
        self._moving: list[_Moving] = []
        self._copied: Copied | None = None

    def choose(self) -> None:
        """Selects the storages to offload. Call it while the stage still holds its outputs, so that these stay regardless of when they are
        sent.
        """
        self._moving = [_Moving(saved, whole) for whole, saved in self.movable()]
        self._saved = []

    def begin_to_host(self) -> Copied:
        """Starts the copy to the host."""
        return self._copy(Copying.TO_HOST, [storage.leave(self._lane) for storage in self._moving])

    def release(self) -> None:
        """Waits for the copy, and drops the device memory."""
        self._wait()
        self._moving = [storage for storage in self._moving if storage.release()]

    def begin_back(self) -> Copied:
        """Allocates device memory, and starts the copy back."""
        self._moving = [storage for storage in self._moving if storage.is_wanted()]
        return self._copy(Copying.FROM_HOST, [storage.take(self._device, self._meter) for storage in self._moving])

    def come_back(self) -> None:
        """Waits for the copy; from here on, only autograd's saved tensors hold the memory."""
        self._wait()
        for storage in self._moving:
            storage.come_back()
        self._moving = []

    def _copy(self, copying: Copying, pairs: list[tuple[Tensor, Tensor]]) -> Copied:
        self._copied = self._lane.copy(copying, pairs)
        return self._copied

    def _wait(self) -> None:
        assert self._copied is not None
        self._lane.wait(self._copied)
        self._copied = None


def _alive(references: Sequence[ref[_Saved]]) -> Iterator[_Saved]:
    return (tensor for tensor in (reference() for reference in references) if tensor is not None)


def _can_go(tensor: Tensor, device: torch.device) -> bool:
    """Returns whether a tensor is fully described by its storage and its geometry."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device == device
    is_lazy = tensor.is_conj() or tensor.is_neg() or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return is_plain and not (is_lazy or tensor.is_quantized or tensor.is_nested)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """Returns a whole storage as a byte tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _num_holding(tensor: Tensor) -> int:
    """Returns the number of tensors that hold the storage of this one, itself included."""
    storage = tensor.untyped_storage()
    in_python = 1  # `storage` itself
    return torch._C._storage_Use_Count(storage._cdata) - in_python
