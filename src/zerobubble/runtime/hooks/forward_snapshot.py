"""What training forwards change besides what they return: buffers, kept to run the same forwards again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zerobubble.runtime.values.buffers import buffers_of, put_buffers
from zerobubble.runtime.values.weight_caches import changing_weights


class Snapshot:
    """The buffers of `modules`, as they were when it was taken. Random numbers need no care: a forward draws the same when it runs again.

    A forward may change a buffer in place or assign another tensor to its name, so both the tensors and copies of their contents are kept.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        held = [(part, buffers_of(part)) for module in modules for part in module.modules()]
        self._buffers_of = [(part, buffers) for part, buffers in held if buffers]
        self._contents = {buffer: buffer.clone() for _, buffers in self._buffers_of for buffer in buffers.values() if buffer is not None}

    @torch.no_grad()
    @changing_weights()
    def restore(self) -> None:
        """Put buffers back to what they were."""
        for part, buffers in self._buffers_of:
            put_buffers(part, buffers)
        for buffer, content in self._contents.items():
            buffer.copy_(content)
