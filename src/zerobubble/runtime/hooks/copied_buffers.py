"""Buffers of stages with a copy on each route: a forward that changes one, such as a batch norm's, leaves each copy another.

A copy sees some of the microbatches only. What one device has after all of them cannot be had from the copies' states, so it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.values.buffers import buffers_of


class _Seen(NamedTuple):
    """A buffer before a step. Its `content` is kept in the first step only: some kernels change a buffer without counting its version."""

    buffer: Tensor | None
    version: int
    content: Tensor | None


class CopiedBuffers:
    """Watches the persistent buffers of these stages; the others are no state of the model, such as tables made when first needed."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._places: list[tuple[str, nn.Module, str]] = []
        for stage, module in modules.items():
            for path, part in module.named_modules():
                names = [name for name in buffers_of(part) if name not in part._non_persistent_buffers_set]
                self._places += [(f"{f'{path}.{name}'.lstrip('.')} of stage {stage}", part, name) for name in names]
        self._before: list[_Seen] = []
        self._is_first = True

    def look(self) -> None:
        """Note how the buffers are before a training step."""
        self._before = [self._see(buffers_of(part).get(name)) for _, part, name in self._places]
        self._is_first = False

    def _see(self, buffer: Tensor | None) -> _Seen:
        if buffer is None:
            return _Seen(None, 0, None)
        return _Seen(buffer, buffer._version, buffer.detach().clone() if self._is_first else None)

    def refuse_changed(self) -> None:
        """After the passes of the step: raise `InputError` where one has changed."""
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
