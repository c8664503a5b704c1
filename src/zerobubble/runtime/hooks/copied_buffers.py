"""Rejects forwards that change buffers, such as batch norms, in stages with a copy on each route.

Each copy sees only some of the microbatches. The state of one device after all microbatches cannot be computed from those of the copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.values.buffers import buffers_of


class _Seen(NamedTuple):
    """A buffer before a step. Its `content` is kept only in the first step: some kernels change a buffer without bumping its version."""

    buffer: Tensor | None
    version: int
    content: Tensor | None


class CopiedBuffers:
    """Watches the persistent buffers of these stages. Others, such as lazily built tables, are not state of the model."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._places: list[tuple[str, nn.Module, str]] = []
        for stage, module in modules.items():
            for path, part in module.named_modules():
                names = [name for name in buffers_of(part) if name not in part._non_persistent_buffers_set]
                self._places += [(f"{f'{path}.{name}'.lstrip('.')} of stage {stage}", part, name) for name in names]
        self._before: list[_Seen] = []
        self._is_first = True

    def look(self) -> None:
        """Records the buffers before a training step."""
        self._before = [self._see(buffers_of(part).get(name)) for _, part, name in self._places]
        self._is_first = False

    def _see(self, buffer: Tensor | None) -> _Seen:
        if buffer is None:
            return _Seen(None, 0, None)
        return _Seen(buffer, buffer._version, buffer.detach().clone() if self._is_first else None)

    def refuse_changed(self) -> None:
        """Raises `InputError` if a buffer has changed. Call it after the passes of the step."""
        seen, self._before = self._before, []
        for (where, part, name), before in zip(self._places, seen, strict=True):
            if _has_changed(buffers_of(part).get(name), before):
                raise InputError(
                    f"buffer {where} changes in a training forward, and of a bidirectional schedule's copies of the stage each sees "
                    "some of the microbatches only, so none would hold what one device holds; put its module in evaluation mode, take "
                    "one without such statistics (track_running_stats=False), or choose a schedule with one route"
                )


def _has_changed(buffer: Tensor | None, before: _Seen) -> bool:
    if buffer is not before.buffer:
        return True
    if buffer is None:
        return False
    return buffer._version != before.version or (before.content is not None and not _are_equal(buffer, before.content))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)
