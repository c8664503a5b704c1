"""What forwards change besides what they return: buffers and torch's random state, kept to run the same forwards again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Snapshot:
    """The buffers of `modules` and torch's random state on the CPU and on `device`, as they are now."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._device = device
        parts = [part for module in modules for part in module.modules() if part._buffers]
        self._buffers = [(part, dict(part._buffers)) for part in parts]
        self._contents = {buffer: buffer.clone() for _, named in self._buffers for buffer in named.values() if buffer is not None}
        self._random = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for part, named in self._buffers:
            part._buffers.update(named)
        for buffer, content in self._contents.items():
            buffer.copy_(content)
        torch.set_rng_state(self._random)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)
