"""What a run of a module finds of all that it uses beside its inputs, so that a second run can find the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zerobubble.runtime.values.buffers import buffers_of, put_buffers
from zerobubble.runtime.values.random_state import RandomState


class FoundState:
    """The states of torch's random generators and the buffers of `module`, as they are when this is made, right before a first run of it.

    A second run inside `again` draws the same numbers from the same buffers, and afterwards both are as if it had not been.
    """

    def __init__(self, module: nn.Module) -> None:
        self._random = RandomState.now(_device_of(module))
        self._buffers: _Buffers | None = _Buffers(module)

    def first_run_is_over(self) -> None:
        """Keep copies of buffers no longer where the first run changed none."""
        if self._buffers is not None and not self._buffers.have_changed:
            self._buffers = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the second run."""
        now = RandomState.now(self._random.device)
        self._random.set()
        try:
            if self._buffers is None:
                yield
            else:
                with self._buffers.found_again():
                    yield
        finally:
            now.set()


class _Buffers:
    """The buffers of a module as a run finds them, and copies of them.

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
        """Whether any buffer is another one or another value since this was made."""
        if any(buffer._version != version for buffer, version in self._versions.items()):
            return True
        return any(buffers_of(part).get(name) is not buffer for part, buffers in self._found for name, buffer in buffers.items())

    @contextmanager
    def found_again(self) -> Iterator[None]:
        """Inside, the module has the copies; they are changed in the place of its own, which it has back afterwards."""
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
