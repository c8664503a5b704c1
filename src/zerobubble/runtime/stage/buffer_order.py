"""Detects state that passes write in another order than one device, such as running statistics under `torch.utils.checkpoint`.

This is state in buffers, in parameters that a forward changes, and in attributes from which passes continue. On one device, the backward of
a microbatch runs before the forward of the next, so a recomputed module updates its state twice per microbatch, in order. In a pipeline,
forwards of later microbatches may run in between. The order of updates, and with it the values, would differ from one device. This cannot
be repaired afterwards, so it is an error.

The copies of a stage on the routes of a bidirectional schedule share the microbatches, so a forward must not continue from an attribute
that an earlier forward has set. `ChangedCopies` refuses buffers and parameters of such copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.stage.attribute_reads import WatchedAttribute
from zerobubble.runtime.values.buffers import buffers_of
from zerobubble.runtime.values.refusing import Refusing

_Key = tuple[str, str]
_OF_TORCH = frozenset(vars(nn.Module()))
_COMPARED = (int, float, complex, Tensor)


class BufferOrder:
    """Compares the buffers of `module`, stage `index`, by identity and version after each pass of a step, and its `parameters` by version.

    For 300 parameters this takes about 20 us per pass. Within `watching`, it also compares numbers and tensors in attributes of modules.

    Of a stage with a copy on another route, `set_by_copy` has the attributes that forwards of earlier steps have set, and receives more.
    """

    def __init__(
        self, module: nn.Module, index: int, parameters: Sequence[nn.Parameter] = (), set_by_copy: set[_Key] | None = None
    ) -> None:
        self._index = index
        self._set_by_copy = set_by_copy
        self._module = module
        self._modules: dict[str, nn.Module] = {}
        self._parts = [(path, part) for path, part in module.named_modules() if buffers_of(part)]
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._names = [names[parameter] for parameter in parameters]
        self._parameters = parameters
        self._last = self._now()
        self._versions = self._versions_now()
        self._num_forwards = 0
        self._forward_of: dict[int, int] = {}
        self._writer: dict[_Key, int] = {}
        self._watched: dict[_Key, WatchedAttribute] = {}
        self._late: set[_Key] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the passes of a step in which attributes are compared, too."""
        self._modules = dict(self._module.named_modules())
        self._last = self._now()
        self._watch(self._set_by_copy or ())
        try:
            yield
        finally:
            for attribute in self._watched.values():
                attribute.close()

    def forward_ended(self, microbatch: int) -> None:
        """Records what the forward of `microbatch` has written."""
        self._num_forwards += 1
        self._forward_of[microbatch] = self._num_forwards
        changed = self._changed()
        self._writer.update(dict.fromkeys(changed, self._num_forwards))
        if self._set_by_copy is not None:
            for key in changed:
                if key in self._watched and self._watched[key].is_read:
                    raise self._refusal_of_copy(*key)
        self._watch(changed)
        if self._set_by_copy is not None:
            self._set_by_copy.update(self._watched)
        self._pass_ended()

    def _watch(self, keys: Iterable[_Key]) -> None:
        for path, name in keys:
            part = self._modules.get(path)
            if part is not None and name in vars(part) and (path, name) not in self._watched:
                self._watched[path, name] = WatchedAttribute(part, name)

    def backward_ended(self, microbatch: int) -> None:
        """Raises `InputError` if the backward of `microbatch` has written what later forwards had written before."""
        begun = self._forward_of.pop(microbatch, self._num_forwards)
        self._late.update(key for key in self._changed() if self._writer.get(key, 0) > begun)
        self._pass_ended()

    def _pass_ended(self) -> None:
        """Raises `InputError` for what was written too late, except attributes from which no pass has continued."""
        for key in self._late:
            if key not in self._watched or self._watched[key].is_read:
                raise self._refusal(*key)
        for attribute in self._watched.values():
            attribute.is_of_pass = False

    def _refusal(self, path: str, name: str) -> InputError:
        kind = "attribute" if (path, name) in self._watched else "parameter" if name in self._names and not path else "buffer"
        return InputError(
            (
                "stage {index} updates {kind} {name!r} of {module!r} in its backward pass, after the forwards of later "
                "microbatches, where one device updates it before them; torch.utils.checkpoint does so as it recomputes "
                "a forward"
            ),
            index=self._index,
            kind=kind,
            name=name,
            module=path or "the stage",
            remedy=(
                "do not checkpoint this module, or recompute the stage by R passes, which leave it alone "
                "(zerobubble.schedules.with_recompute)"
            ),
        )

    def _refusal_of_copy(self, path: str, name: str) -> InputError:
        return InputError(
            (
                "stage {index} continues from attribute {name!r} of {module!r}, which each forward sets anew, and of a bidirectional "
                "schedule's copies of the stage each sees some of the microbatches only, so none would hold what one device holds"
            ),
            index=self._index,
            name=name,
            module=path or "the stage",
            remedy="choose a schedule with one route, or change the attribute between steps, on all ranks alike",
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

    def _now(self) -> dict[_Key, Any]:
        buffers = ((path, name, buffer) for path, part in self._parts for name, buffer in buffers_of(part).items() if buffer is not None)
        now: dict[_Key, Any] = {(path, name): _state_of(buffer) for path, name, buffer in buffers}
        for path, part in self._modules.items():
            now |= {
                (path, name): _state_of(value) if isinstance(value, Tensor) else value
                for name, value in vars(part).items()
                if name not in _OF_TORCH and isinstance(value, _COMPARED) and not isinstance(value, Refusing)
            }
        return now


def _state_of(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), 0 if tensor.is_inference() else tensor._version
