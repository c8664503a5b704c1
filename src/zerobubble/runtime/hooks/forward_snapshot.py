"""Saves the buffers that training forwards change, so that the same forwards can run again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zerobubble.runtime.values.buffers import buffers_of, put_buffers
from zerobubble.runtime.values.weight_caches import changing_weights


class Snapshot:
    """The buffers of `modules` when the snapshot was taken. Random state is not part of it: a forward draws the same numbers when rerun.

    A forward may change a buffer in place or assign another tensor to its name. So the snapshot keeps the tensors and copies of them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        held = [(part, buffers_of(part)) for module in modules for part in module.modules()]
        self._buffers_of = [(part, buffers) for part, buffers in held if buffers]
        self._contents = {buffer: buffer.clone() for _, buffers in self._buffers_of for buffer in buffers.values() if buffer is not None}

    @torch.no_grad()
    @changing_weights()
    def restore(self) -> None:
        """Restores the buffers."""
        for part, buffers in self._buffers_of:
            put_buffers(part, buffers)
        for buffer, content in self._contents.items():
            buffer.copy_(content)
