"""The state that a forward uses in addition to its inputs (random state and buffers), saved so that a second run can start from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zerobubble.runtime.values.buffers import buffers_of, put_buffers
from zerobubble.runtime.values.random_state import RandomState


class ForwardState:
    """A snapshot of torch's random generators and of the buffers of `module`. Create it right before the first run.

    A second run inside `restored` sees the same random numbers and buffers, and leaves both unchanged for the code after it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._random = RandomState.now(_device_of(module))
        self._buffers: _Buffers | None = _Buffers(module)

    def end_first_run(self) -> None:
        """Drops the copies of the buffers if the first run changed none."""
        if self._buffers is not None and not self._buffers.have_changed:
            self._buffers = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context of the second run."""
        now = RandomState.now(self._random.device)
        self._random.set()
        try:
            if self._buffers is None:
                yield
            else:
                with self._buffers.restored():
                    yield
        finally:
            now.set()


class _Buffers:
    """The buffers of a module before a run, and copies of them.

    A forward may change a buffer in place or assign another tensor to its name.
    """

    def __init__(self, module: nn.Module) -> None:
        held = [(part, buffers_of(part)) for part in module.modules()]
        self._found = [(part, buffers) for part, buffers in held if buffers]
        tensors = [buffer for _, buffers in self._found for buffer in buffers.values() if buffer is not None]
        self._versions = {buffer: buffer._version for buffer in tensors}
        self._copies = {buffer: buffer.detach().clone() for buffer in self._versions}

    @property
    def have_changed(self) -> bool:
        """Whether any buffer was replaced or changed since the snapshot."""
        if any(buffer._version != version for buffer, version in self._versions.items()):
            return True
        return any(buffers_of(part).get(name) is not buffer for part, buffers in self._found for name, buffer in buffers.items())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives the module the copies, so that a run changes these, and restores its own buffers afterwards."""
        own = [(part, buffers_of(part)) for part, _ in self._found]
        for part, buffers in self._found:
            put_buffers(part, {name: None if buffer is None else self._copies[buffer] for name, buffer in buffers.items()})
        try:
            yield
        finally:
            for part, buffers in own:
                put_buffers(part, buffers)


def _device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
