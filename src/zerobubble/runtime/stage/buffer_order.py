"""Detects state that is written in the backward pass in the wrong order, such as running statistics under `torch.utils.checkpoint`.

This is state in buffers, and in parameters that a forward changes. On one device, the backward of a microbatch runs before the forward of
the next, so a recomputed module updates its state twice per microbatch, in order. In a pipeline, forwards of later microbatches may run in
between. The order of updates, and with it the values, would differ from one device. This cannot be repaired afterwards, so it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zerobubble.errors import InputError
from zerobubble.runtime.values.buffers import buffers_of

_Key = tuple[str, str]


class BufferOrder:
    """Compares the buffers of `module`, stage `index`, by identity and version after each pass of a step, and its `parameters` by version.

    For 300 parameters this takes about 20 us per pass.
    """

    def __init__(self, module: nn.Module, index: int, parameters: Sequence[nn.Parameter] = ()) -> None:
        self._index = index
        self._parts = [(path, part) for path, part in module.named_modules() if buffers_of(part)]
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._names = [names[parameter] for parameter in parameters]
        self._parameters = parameters
        self._last = self._now()
        self._versions = self._versions_now()
        self._num_forwards = 0
        self._forward_of: dict[int, int] = {}
        self._writer: dict[_Key, int] = {}

    def forward_ended(self, microbatch: int) -> None:
        """Records what the forward of `microbatch` has written."""
        self._num_forwards += 1
        self._forward_of[microbatch] = self._num_forwards
        self._writer.update(dict.fromkeys(self._changed(), self._num_forwards))

    def backward_ended(self, microbatch: int) -> None:
        """Raises `InputError` if the backward of `microbatch` has written what later forwards had written before."""
        begun = self._forward_of.pop(microbatch, self._num_forwards)
        for path, name in self._changed():
            if self._writer.get((path, name), 0) > begun:
                raise InputError(
                    (
                        "stage {index} updates {kind} {name!r} of {module!r} in its backward pass, after the forwards of later "
                        "microbatches, where one device updates it before them; torch.utils.checkpoint does so as it recomputes "
                        "a forward"
                    ),
                    index=self._index,
                    kind="parameter" if name in self._names and not path else "buffer",
                    name=name,
                    module=path or "the stage",
                    remedy=(
                        "do not checkpoint this module, or recompute the stage by R passes, which leave buffers alone "
                        "(zerobubble.schedules.with_recompute)"
                    ),
                )

    def _changed(self) -> list[_Key]:
        """Returns what has changed since the last call."""
        before, self._last = self._last, self._now()
        changed = [key for key, now in self._last.items() if before.get(key) != now]
        versions, self._versions = self._versions, self._versions_now()
        if versions != self._versions:
            changed += [("", name) for name, was, now in zip(self._names, versions, self._versions, strict=True) if was != now]
        return changed

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def _now(self) -> dict[_Key, tuple[int, int]]:
        return {
            (path, name): (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for path, part in self._parts
            for name, buffer in buffers_of(part).items()
            if buffer is not None
        }
