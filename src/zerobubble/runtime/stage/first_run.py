"""A forward that runs twice: first for what it gives, keeping its inputs alone, and again for what its backward needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.values.payload import Tensors

Finish = Callable[[Any], Tensor] | None


class FirstRun:
    """What the first run of a forward of stage `index` leaves for the second: its inputs, and what it found of all else that it used.

    That are the states of torch's random generators and, where the run changed any, copies of the module's buffers: the second run draws
    the same numbers from the same buffers, and afterwards both are as if it had not been. Autocast needs no care, for both runs are in one
    call of the caller's. `meter` counts the inputs for as long as this lives.
    """

    def __init__(self, module: nn.Module, index: int, inputs: Tensors, finish: Finish, meter: Meter | None) -> None:
        self.inputs = inputs
        self.finish = finish
        self.num_to_go_back_from = 0
        self._index = index
        self._module = module
        self._random = _RandomState.now(_device_of(module))
        self._buffers: _Buffers | None = _Buffers(module)
        self._versions = [tensor._version for tensor in inputs]
        self._counted: list[Held] = [] if meter is None else [meter.hold(tensor) for tensor in inputs]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the first run: autograd finds out what depends on what, and saves nothing."""
        with torch.autograd.graph.saved_tensors_hooks(_nothing, self._refuse_to_go_back):
            yield
        if self._buffers is not None and not self._buffers.have_changed:
            self._buffers = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the second run. Raises `InputError` where the first one changed its inputs."""
        for tensor, version in zip(self.inputs, self._versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"stage {self._index} changed its input in place, a {tuple(tensor.shape)} {tensor.dtype}, so that its forward cannot "
                    "be computed again: let it work on x.clone(), or leave the stage out of the schedule's R passes"
                )
        now = _RandomState.now(self._random.device)
        self._random.set()
        try:
            if self._buffers is None:
                yield
            else:
                with self._buffers.found_again():
                    yield
        finally:
            now.set()

    def _refuse_to_go_back(self, _: object) -> Tensor:
        raise InputError(
            f"stage {self._index} asks for gradients within its own forward, which keeps nothing to go back by: "
            "leave the stage out of the schedule's R passes"
        )


def _nothing(_: Tensor) -> None:
    """What a first run keeps of a tensor that autograd saves."""


class _RandomState(NamedTuple):
    """The states of the random generators of the CPU and of a CUDA device."""

    device: torch.device
    on_cpu: Tensor
    on_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> _RandomState:
        """The states as they are."""
        return cls(device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def set(self) -> None:
        """Make these the states."""
        torch.set_rng_state(self.on_cpu)
        if self.on_device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)


class _Buffers:
    """The buffers of a module as a run finds them, and copies of them.

    A forward may change a buffer in place or assign another tensor to its name.
    """

    def __init__(self, module: nn.Module) -> None:
        self._found = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
        tensors = [buffer for _, buffers in self._found for buffer in buffers.values() if buffer is not None]
        self._versions = {buffer: buffer._version for buffer in tensors}
        self._copies = {buffer: buffer.detach().clone() for buffer in self._versions}

    @property
    def have_changed(self) -> bool:
        """Whether any buffer is another one or another value since this was made."""
        if any(buffer._version != version for buffer, version in self._versions.items()):
            return True
        return any(part._buffers.get(name) is not buffer for part, buffers in self._found for name, buffer in buffers.items())

    @contextmanager
    def found_again(self) -> Iterator[None]:
        """Inside, the module has the copies; they are changed in the place of its own, which it has back afterwards."""
        own = [(part, dict(part._buffers)) for part, _ in self._found]
        for part, buffers in self._found:
            part._buffers.update({name: None if buffer is None else self._copies[buffer] for name, buffer in buffers.items()})
        try:
            yield
        finally:
            for part, buffers in own:
                part._buffers.update(buffers)


def _device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
