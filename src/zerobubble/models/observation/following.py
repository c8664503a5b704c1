"""Follows changes of a model: what has changed in a module of the model is changed in its copies before the next call.

A stage shares its parts with the model. It has copies of the modules around them, because every stage runs that code and keeps its own
state. A `Follower` compares these modules with what they were, by identity (buffers also by version), in about 5 us each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.split.python_state.identity import Identity

FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_DICTS = ("_parameters", "_buffers", "_modules", *FORWARD_HOOKS, *BACKWARD_HOOKS)
"""The dicts of a module that torch changes in place."""
_IGNORED = frozenset(nn.Module().__dict__) - {"training", "_is_full_backward_hook"} | {"_apply", "named_parameters", "named_modules"}
"""Attributes that torch manages, and methods that this library shadows on instances."""
_DEPTH = 3
"""Levels of nested containers and objects that are compared."""


_NONE: frozenset[str] = frozenset()


class Changes(NamedTuple):
    """What has changed in a module: its class, plain `attributes` by name, and names of entries by the dict that holds them."""

    kind: bool
    attributes: list[str]
    entries: dict[str, list[Any]]


class Snapshot:
    """The state of a module at one time: its class, its attributes and the entries of its dicts.

    With `contents`, it includes what lists, dicts and other objects among its attributes hold; otherwise only modules in lists and dicts.
    It holds all values, so that no other object gets the id of one of them.
    """

    def __init__(self, module: nn.Module, *, contents: bool) -> None:
        values = module.__dict__
        self._module = module
        self.kind = type(module)
        self.values = {name: value for name, value in values.items() if name not in _IGNORED}
        self.dicts = {name: dict(values[name]) for name in _DICTS}
        self.versions = _versions(module)
        self.frozen = frozen_in(module)
        self._values = dict(values)  # holds them, so that their ids stay unique
        self._ids = list(map(id, values.values()))
        self._look_inside = contents_of if contents else modules_inside
        self.inside = {name: self._look_inside(value) for name, value in self.values.items() if _is_compound(value)}

    def holds(self) -> bool:
        """Returns whether the module is still as it was."""
        values = self._module.__dict__
        return (
            type(self._module) is self.kind
            and list(map(id, values.values())) == self._ids
            and all(_is_same(values[name], held) for name, held in self.dicts.items() if held or values[name])
            and all(self._look_inside(values[name]) == found for name, found in self.inside.items())
            and frozen_in(self._module) == self.frozen
            and _versions(self._module) == self.versions
        )

    def since(self, before: Snapshot) -> Changes:
        """Returns what has changed since the snapshot `before`."""
        attributes = [
            *_differing(before.values, self.values),
            *(name for name, found in self.inside.items() if name in before.inside and found != before.inside[name]),
        ]
        entries = {name: list(_differing(before.dicts[name], now)) for name, now in self.dicts.items()}
        entries["_parameters"] += [name for name in self.frozen ^ before.frozen if name in self.dicts["_parameters"]]
        entries["_buffers"] += [name for name, version in self.versions.items() if before.versions.get(name, version) != version]
        return Changes(self.kind is not before.kind, attributes, {name: found for name, found in entries.items() if found})


def _versions(module: nn.Module) -> dict[str, int]:
    if not module._buffers:
        return {}
    with torch._C.DisableTorchFunctionSubclass():  # a released tensor refuses other uses
        return {name: 0 if buffer is None or buffer.is_inference() else buffer._version for name, buffer in module._buffers.items()}


def frozen_in(module: nn.Module) -> frozenset[str]:
    """Returns the names of the direct parameters of `module` that do not require gradients."""
    if not module._parameters:
        return _NONE
    return frozenset(name for name, parameter in module._parameters.items() if parameter is not None and not parameter.requires_grad)


def _is_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and all(name in before and before[name] is value for name, value in now.items())


def _differing(before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[Any]:
    return (name for name in {**before, **now} if name not in before or name not in now or before[name] is not now[name])


def _is_compound(value: Any) -> bool:
    return not isinstance(value, (bool, int, float, str, type(None), Tensor, nn.Module, type)) and not callable(value)


def modules_inside(value: Any, depth: int = _DEPTH) -> list[Any]:
    """Returns the modules in lists and dicts."""
    if isinstance(value, (list, tuple, dict)) and depth:
        inner = value.values() if isinstance(value, dict) else value
        return [module for entry in inner for module in ([entry] if isinstance(entry, nn.Module) else modules_inside(entry, depth - 1))]
    return []


def contents_of(value: Any, depth: int = _DEPTH) -> list[Any]:
    """Returns the objects inside of `value`, to be compared by identity."""
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or not depth:
        return []
    if isinstance(value, dict):
        inner = [*dict.items(value)]
        inside = [part for pair in inner for part in pair]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = [*value]
    else:
        inside = [*getattr(value, "__dict__", {}).values()]
    return [identity for content in inside for identity in (Identity(content), *contents_of(content, depth - 1))]


class Copy(Protocol):
    """A copy of a module, which can follow changes of the module."""

    def fault(self, changes: Changes) -> str:
        """Returns which of these changes the copy cannot follow, empty if it can follow all."""
        ...

    def follow(self, changes: Changes) -> None:
        """Makes these changes in the copy."""
        ...


class _Followed:
    """A module of the model, its copy, and what the module was when the copy last followed it."""

    def __init__(self, name: str, module: nn.Module, copy: Copy, *, contents: bool) -> None:
        self._name = name
        self._module = module
        self._contents = contents
        self.copy = copy
        self.snapshot = self.now()

    def now(self) -> Snapshot:
        return Snapshot(self._module, contents=self._contents)

    def fault(self, changes: Changes) -> str:
        fault = self.copy.fault(changes)
        return fault and f"{fault} of {repr(self._name) if self._name else 'the model'}"


class Follower:
    """Lets copies of a model's modules follow the model."""

    def __init__(self) -> None:
        self._followed: list[_Followed] = []

    def add(self, name: str, module: nn.Module, copy: Copy, *, contents: bool) -> None:
        """Lets `copy` follow `module`, which has this name in the model. `contents` is that of its snapshots."""
        self._followed.append(_Followed(name, module, copy, contents=contents))

    def follow(self) -> bool:
        """Makes the changes since the last call, and returns whether there were any.

        Raises `InputError` with all changes that a copy cannot follow. It then makes none, and raises again until they are undone.
        """
        snapshots = [(followed, followed.now()) for followed in self._followed if not followed.snapshot.holds()]
        changed = [(followed, now, now.since(followed.snapshot)) for followed, now in snapshots]
        refused = list(filter(None, (followed.fault(changes) for followed, _, changes in changed)))
        if refused:
            raise InputError(
                "since zb.split, {changed} changed, which stages cannot follow",
                changed=" and ".join(refused),
                remedy="undo that, or change the model before zb.split and create a new pipeline",
            )
        for followed, now, changes in changed:
            followed.copy.follow(changes)
            followed.snapshot = now
        return bool(changed)


def put_entries(copy: nn.Module, module: nn.Module, changes: Changes, dicts: tuple[str, ...], converted: Callable[[Any], Any]) -> None:
    """Makes the changes of these dicts in a copy, with `converted` values."""
    for name in dicts:
        for key in changes.entries.get(name, ()):
            if key in module.__dict__[name]:
                copy.__dict__[name][key] = converted(module.__dict__[name][key])
            else:
                copy.__dict__[name].pop(key, None)
