"""What the forward of one microbatch saves for its backward pass, kept by us for autograd: it can go to host memory and come back.

Whole storages go, each once, however many saved tensors are views of it. Letting a storage go is to hold it no longer, so nobody else ever
loses memory that is in use; what others hold too stays, because moving it would free nothing: parameters, buffers and their copies under
autocast, what crosses the boundary of the stage, what several microbatches save, what a Function keeps in an attribute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.measure.saving_hooks import saving_through
from zerobubble.runtime.stage.copy_lane import Copied, CopyLane
from zerobubble.timeline import Copying

SMALLEST_BYTES = 1024
"""Smaller storages stay: a copy takes some time whatever its size, and there are many of them."""


class _Form(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def of(self, storage: UntypedStorage) -> Tensor:
        """The tensor of this form in `storage`."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.size, self.stride)


class _Saved:
    """A tensor that autograd has us keep; None while its numbers are on the host."""

    __slots__ = ("__weakref__", "_counted", "_meter", "_version", "tensor")

    def __init__(self, tensor: Tensor, meter: Meter | None) -> None:
        self._meter = meter
        self.keep(tensor.detach())  # an output of its own node would keep that node, and with it itself

    def keep(self, tensor: Tensor) -> None:
        """Keep `tensor` as it is now."""
        self.tensor: Tensor | None = tensor
        self._version = tensor._version
        self._counted: Held | None = None if self._meter is None else self._meter.hold(tensor)

    def let_go(self) -> _Form:
        """Keep the tensor no longer; gives its form."""
        tensor = self.tensor
        assert tensor is not None
        self.tensor = self._counted = None
        return _Form(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place since it was saved."""
        return self.tensor is not None and self.tensor._version != self._version

    def read(self) -> Tensor:
        """The tensor as autograd wants it back. Raises `RuntimeError` as torch does where it was changed in place."""
        if self.tensor is None:
            raise RuntimeError("what this forward saved is in host memory, and comes back for its own backward pass alone")
        if self.is_changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.size())}] is at version {self.tensor._version}; expected version "
                f"{self._version} instead. Hint: a forward must not change in place what it needs to go back: let it work on x.clone()"
            )
        return self.tensor


class _Moving:
    """A storage of the device on its way to the host or back, or there, and those who keep tensors of it."""

    def __init__(self, saved: Sequence[_Saved], on_device: Tensor) -> None:
        self.on_device: Tensor | None = on_device
        self.on_host: Tensor | None = None
        self.counted: Held | None = None
        self._saved = [ref(one) for one in saved]
        self._forms: list[tuple[ref[_Saved], _Form]] = []

    def leave(self, lane: CopyLane) -> tuple[Tensor, Tensor]:
        """Go to the host; gives what to copy into, and from."""
        assert self.on_device is not None
        self.on_host = lane.host_memory(self.on_device.nbytes)
        return self.on_host, self.on_device

    def let_go(self) -> bool:
        """Hold no memory of the device any longer; False where that would free nothing, or what was copied has changed since."""
        saved = list(_alive(self._saved))
        assert self.on_device is not None
        if any(one.is_changed for one in saved) or _num_holding(self.on_device) > 1 + len(saved):
            return False
        self._forms = [(ref(one), one.let_go()) for one in saved]
        self.on_device = None
        return bool(saved)

    def is_wanted(self) -> bool:
        """Whether anybody still keeps a tensor of it."""
        return any(one() is not None for one, _ in self._forms)

    def take(self, device: torch.device, meter: Meter | None) -> tuple[Tensor, Tensor]:
        """Come back to the device; gives what to copy into, and from."""
        assert self.on_host is not None
        self.on_device = torch.empty(self.on_host.nbytes, dtype=torch.uint8, device=device)
        self.counted = None if meter is None else meter.hold(self.on_device)
        return self.on_device, self.on_host

    def come_back(self) -> None:
        """Have the tensors kept again that lie in it."""
        assert self.on_device is not None
        storage = self.on_device.untyped_storage()
        for reference, form in self._forms:
            one = reference()
            if one is not None:
                one.keep(form.of(storage))


class KeptForAutograd:
    """What one forward saves on `device`: while it runs under `saving`, we keep it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meter: Meter | None = None
        self._saved: list[ref[_Saved]] = []

    def saving(self, meter: Meter | None) -> AbstractContextManager[object]:
        """Around the forward; `meter` counts what is kept."""
        self._meter = meter
        return saving_through(self._keep, _Saved.read)

    def _keep(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self._meter)
        self._saved.append(ref(saved))
        return saved

    def movable(self) -> list[tuple[Tensor, list[_Saved]]]:
        """The storages that can go, as bytes, each with those who keep tensors of it: asked when nobody else uses them any more."""
        groups: dict[int, list[_Saved]] = {}
        for one in _alive(self._saved):
            if one.tensor is not None and _can_go(one.tensor, self._device):
                groups.setdefault(one.tensor.untyped_storage()._cdata, []).append(one)
        found = []
        for saved in groups.values():
            assert saved[0].tensor is not None
            whole = _bytes_of(saved[0].tensor.untyped_storage())
            if whole.nbytes >= SMALLEST_BYTES and _num_holding(whole) == 1 + len(saved):
                found.append((whole, saved))
        return found


class MovableBytes(KeptForAutograd):
    """Finds out how many `bytes` of what a forward saves could go to the host."""

    bytes = 0

    @contextmanager
    def saving(self, meter: Meter | None) -> Iterator[None]:
        with super().saving(meter):
            yield
        self.bytes = sum(whole.nbytes for whole, _ in self.movable())


class SavedTensors(KeptForAutograd):
    """What one forward saves, and `lane` copies to the host and back as far as it can go.

    The calls come in this order: `saving`, and when the forward is over `choose`, `begin_to_host`, `let_go`, `begin_back`, `come_back`.
    """

    def __init__(self, device: torch.device, lane: CopyLane) -> None:
        super().__init__(device)
        self._lane = lane
        self._moving: list[_Moving] = []
        self._copied: Copied | None = None

    def choose(self) -> None:
        """Find out what can go, before the outputs have left: they stay, whoever is quicker to send them."""
        self._moving = [_Moving(saved, whole) for whole, saved in self.movable()]
        self._saved = []

    def begin_to_host(self) -> Copied:
        """Begin to copy it."""
        return self._copy(Copying.TO_HOST, [one.leave(self._lane) for one in self._moving])

    def let_go(self) -> None:
        """Wait until it is copied, and let go of the memory of the device."""
        self._wait()
        self._moving = [one for one in self._moving if one.let_go()]

    def begin_back(self) -> Copied:
        """Take memory of the device again, and begin to copy back."""
        self._moving = [one for one in self._moving if one.is_wanted()]
        return self._copy(Copying.FROM_HOST, [one.take(self._device, self._meter) for one in self._moving])

    def come_back(self) -> None:
        """Wait until it is copied; from here on all is kept by those alone for whom autograd keeps it."""
        self._wait()
        for one in self._moving:
            one.come_back()
        self._moving = []

    def _copy(self, copying: Copying, pairs: list[tuple[Tensor, Tensor]]) -> Copied:
        self._copied = self._lane.copy(copying, pairs)
        return self._copied

    def _wait(self) -> None:
        assert self._copied is not None
        self._lane.wait(self._copied)
        self._copied = None


def _alive(references: Sequence[ref[_Saved]]) -> Iterator[_Saved]:
    return (one for one in (reference() for reference in references) if one is not None)


def _can_go(tensor: Tensor, device: torch.device) -> bool:
    """Whether the bytes of its storage, and how it lies in there, are all there is to a tensor."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device == device
    is_lazy = tensor.is_conj() or tensor.is_neg() or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return is_plain and not (is_lazy or tensor.is_quantized or tensor.is_nested)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """A whole storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _num_holding(tensor: Tensor) -> int:
    """How many tensors hold the storage of this one, itself among them."""
    storage = tensor.untyped_storage()
    in_python = 1  # `storage` itself
    return torch._C._storage_Use_Count(storage._cdata) - in_python
