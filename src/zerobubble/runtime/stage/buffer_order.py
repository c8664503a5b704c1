"""Buffers that are written in the backward pass, such as running statistics by a module that `torch.utils.checkpoint` recomputes.

One device goes back from a microbatch before it begins the next, so it updates such a buffer twice for each microbatch in turn. After the
forwards of later microbatches the order is lost: the update in the backward pass cannot be made up for, and is refused.
"""

from __future__ import annotations

from torch import nn

from zerobubble.errors import InputError
from zerobubble.runtime.values.buffers import buffers_of

_Key = tuple[str, str]


class BufferOrder:
    """Compares the buffers of `module`, stage `index`, by identity and version after each pass of a step."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self._index = index
        self._parts = [(path, part) for path, part in module.named_modules() if buffers_of(part)]
        self._last = self._now()
        self._num_forwards = 0
        self._forward_of: dict[int, int] = {}
        self._writer: dict[_Key, int] = {}

    def forward_ended(self, microbatch: int) -> None:
        """The forward of `microbatch` is over."""
        if self._parts:
            self._num_forwards += 1
            self._forward_of[microbatch] = self._num_forwards
            self._writer.update(dict.fromkeys(self._changed(), self._num_forwards))

    def backward_ended(self, microbatch: int) -> None:
        """The backward of `microbatch` is over; raises `InputError` if it wrote a buffer that later forwards had written."""
        if self._parts:
            begun = self._forward_of.pop(microbatch, self._num_forwards)
            for path, name in self._changed():
                if self._writer.get((path, name), 0) > begun:
                    raise InputError(
                        f"stage {self._index} updates buffer {name!r} of {path or 'the stage'!r} in its backward pass, after the forwards "
                        "of later microbatches, where one device updates it before them; torch.utils.checkpoint does so as it recomputes "
                        "a forward: leave the module out of it, or recompute the stage by R passes, which leave buffers alone "
                        "(zerobubble.schedules.with_recompute)"
                    )

    def _changed(self) -> list[_Key]:
        """The buffers that have changed since this was last asked."""
        before, self._last = self._last, self._now()
        return [key for key, now in self._last.items() if before.get(key) != now]

    def _now(self) -> dict[_Key, tuple[int, int]]:
        return {
            (path, name): (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for path, part in self._parts
            for name, buffer in buffers_of(part).items()
            if buffer is not None
        }
