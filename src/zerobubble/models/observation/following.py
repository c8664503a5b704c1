"""Follows changes of a model: what has changed in a module of the model is changed in its copies before the next call.

A stage shares its parts with the model. It has copies of the modules around them, because every stage runs that code and keeps its own
state. A `Follower` compares these modules with what they were, by identity, in about 5 us each, and buffers also by version and values, in
about 10 us each. After a call, it gives the model the attributes and buffers that the code around the parts has set in the copies, such as
a counter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from zerobubble.errors import InputError
from zerobubble.models.observation.copies import copy_of
from zerobubble.runtime.device import is_host
from zerobubble.runtime.split.python_state.identity import Identity
from zerobubble.runtime.values.memory import is_plain, sampled_bytes
from zerobubble.runtime.values.python_objects import is_of_library
from zerobubble.runtime.values.python_places import array_place
from zerobubble.runtime.values.shared_values import with_contents

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


_Version = tuple[int, int, bytes]
"""The version of a tensor, its address and the bytes of its elements."""
_NONE: frozenset[str] = frozenset()
_ABSENT = object()


class Changes(NamedTuple):
    """What has changed in a module: its class, plain `attributes` by name, and names of entries by the dict that holds them."""

    kind: bool
    attributes: list[str]
    entries: dict[str, list[Any]]

    def set_names(self) -> set[str]:
        """Returns the names of the attributes and buffers."""
        return {*self.attributes, *self.entries.get("_buffers", ())}


class ModuleSnapshot:
    """The state of a module at one time: its class, its attributes and the entries of its dicts.

    With `contents`, it includes what lists, dicts, tensors and other objects among its attributes hold, or among the attributes of these
    names; otherwise only modules in lists and dicts. It holds all values, so that no other object gets the id of one of them.
    """

    def __init__(self, module: nn.Module, *, contents: bool | Collection[str]) -> None:
        values = module.__dict__
        self.module = module
        self.kind = type(module)
        self.values = {name: value for name, value in values.items() if name not in _IGNORED}
        self.dicts = {name: dict(values[name]) for name in _DICTS}
        self.versions = _versions(module)
        self.frozen = frozen_in(module)
        self._values = dict(values)  # holds them, so that their ids stay unique
        self._ids = list(map(id, values.values()))
        self._with_contents = frozenset(self.values) if contents is True else frozenset(contents or ())
        self.inside = {name: self._look_inside(name, value) for name, value in self.values.items() if self._is_compound(name, value)}

    def holds(self) -> bool:
        """Returns whether the module is still as it was."""
        values = self.module.__dict__
        return (
            type(self.module) is self.kind
            and list(map(id, values.values())) == self._ids
            and all(_is_same(values[name], held) for name, held in self.dicts.items() if held or values[name])
            and all(self._look_inside(name, values[name]) == contents for name, contents in self.inside.items())
            and frozen_in(self.module) == self.frozen
            and _versions(self.module) == self.versions
        )

    def _look_inside(self, name: str, value: Any) -> list[Any]:
        return contents_of(value) if name in self._with_contents else modules_inside(value)

    def _is_compound(self, name: str, value: Any) -> bool:
        return is_compound(value) or (isinstance(value, Tensor) and name in self._with_contents)

    def is_named_since(self, before: ModuleSnapshot, name: str) -> bool:
        """Returns whether all that changed inside of an attribute is None that became a string, such as a kind of loss chosen once.

        Every stage of a rank that runs this code sets the same string, so the object can stay one for all of them.
        """
        if name not in before.inside or name not in self.inside or before.values[name] is not self.values[name]:
            return False
        then, now = before.inside[name], self.inside[name]
        differing = [(old, new) for old, new in zip(then, now, strict=False) if old != new]
        is_named = [old == Identity(None) and isinstance(getattr(new, "value", None), str) for old, new in differing]
        return len(then) == len(now) and all(is_named)

    def since(self, before: ModuleSnapshot) -> Changes:
        """Returns what has changed since the snapshot `before`."""
        attributes = [
            *_differing(before.values, self.values),
            *(name for name, contents in self.inside.items() if name in before.inside and contents != before.inside[name]),
        ]
        entries = {name: list(_differing(before.dicts[name], now)) for name, now in self.dicts.items()}
        entries["_parameters"] += [name for name in self.frozen ^ before.frozen if name in self.dicts["_parameters"]]
        entries["_buffers"] += [name for name, version in self.versions.items() if before.versions.get(name, version) != version]
        return Changes(self.kind is not before.kind, attributes, {name: changed for name, changed in entries.items() if changed})


def _versions(module: nn.Module) -> dict[str, _Version | None]:
    if not module._buffers:
        return {}
    return {name: None if buffer is None else _version(buffer) for name, buffer in module._buffers.items()}


def _version(tensor: Tensor) -> _Version:
    """Returns what changes with the values of a tensor. Writes to `.data` count no version, so some elements are read too.

    Reading those on an accelerator would wait for it, so there only another memory is noticed.
    """
    with torch._C.DisableTorchFunctionSubclass():  # a released tensor refuses other uses
        number = 0 if tensor.is_inference() else tensor._version
        if not is_plain(tensor) or not tensor.numel():
            return number, 0, b""
        return number, tensor.data_ptr(), _bytes_of(tensor) if is_host(tensor.device) else b""


def _bytes_of(tensor: Tensor) -> bytes:
    """Returns elements of a tensor, unseen by modes, which would take this for code of the model that reads values."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return sampled_bytes(tensor).numpy().tobytes()


def frozen_in(module: nn.Module) -> frozenset[str]:
    """Returns the names of the direct parameters of `module` that do not require gradients."""
    if not module._parameters:
        return _NONE
    return frozenset(name for name, parameter in module._parameters.items() if parameter is not None and not parameter.requires_grad)


def _is_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and all(name in before and before[name] is value for name, value in now.items())


def _differing(before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[Any]:
    return (name for name in {**before, **now} if name not in before or name not in now or before[name] is not now[name])


def is_compound(value: Any) -> bool:
    """Returns whether `value` may hold other objects."""
    return not isinstance(value, (bool, int, float, str, type(None), Tensor, nn.Module, type)) and not callable(value)


def modules_inside(value: Any, depth: int = _DEPTH) -> list[Any]:
    """Returns the modules in lists and dicts."""
    if isinstance(value, (list, tuple, dict)) and depth:
        inner = value.values() if isinstance(value, dict) else value
        return [module for entry in inner for module in ([entry] if isinstance(entry, nn.Module) else modules_inside(entry, depth - 1))]
    return []


def contents_of(value: Any, depth: int = _DEPTH) -> list[Any]:
    """Returns the objects inside of `value`, to be compared by identity, the versions of tensors, and the bytes of arrays."""
    if isinstance(value, Tensor):
        return [_version(value)]
    if isinstance(value, (nn.Module, type)) or callable(value) or not depth:
        return []
    array = array_place("", value) if is_of_library(type(value).__module__) else None
    if array is not None:
        return [*array.read()]
    if isinstance(value, dict):
        inner = [*dict.items(value)]
        inside = [part for pair in inner for part in pair]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inside = [*value]
    else:
        inside = [*getattr(value, "__dict__", {}).values()]
    return [identity for content in inside for identity in (Identity(content), *contents_of(content, depth - 1))]


def places_in(value: Any, depth: int = _DEPTH) -> list[int]:
    """Returns the `id` of each object inside of `value` that can change."""
    if isinstance(value, (bool, int, float, str, type(None), nn.Module, type)) or callable(value) or not depth:
        return []
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        inside = [*value.values()] if isinstance(value, dict) else [*value]
    else:
        inside = [vars(value)] if hasattr(value, "__dict__") and not isinstance(value, Tensor) else []
    return [id(value), *(place for content in inside for place in places_in(content, depth - 1))]


class Copy(Protocol):
    """A copy of a module, which can follow changes of the module."""

    def fault(self, changes: Changes) -> str:
        """Returns which of these changes the copy cannot follow, empty if it can follow all."""
        ...

    def follow(self, changes: Changes) -> None:
        """Makes these changes in the copy."""
        ...


class _Followed:
    """A module of the model, its copy, and a snapshot of the module from when the copy last followed it.

    `target` is the module of the copy, or None if the copy sets no attributes itself. `before` is a snapshot of the target before the
    current call. The target has copies of the attributes `copied`, or of all attributes with `contents`.
    """

    def __init__(self, name: str, module: nn.Module, copy: Copy, target: nn.Module | None, copied: set[str], *, contents: bool) -> None:
        self.name = name
        self.module = module
        self._target = target
        self._copied = copied
        self._contents = contents or copied
        self._before: ModuleSnapshot | None = None
        self.copy = copy
        self.snapshot = self.now()

    @property
    def sets(self) -> bool:
        """Whether the copy sets attributes itself."""
        return self._target is not None

    def now(self) -> ModuleSnapshot:
        return ModuleSnapshot(self.module, contents=self._contents)

    def fault(self, changes: Changes) -> str:
        fault = self.copy.fault(changes)
        return fault and f"{fault} of {repr(self.name) if self.name else 'the model'}"

    def begin(self) -> None:
        """Remembers the copy before a call."""
        if self._target is not None and (self._before is None or not self._before.holds()):
            self._before = ModuleSnapshot(self._target, contents=self._contents)

    def set_by_call(self) -> Changes | None:
        """Returns the changes that the call has made to the copy, except for the mode, which evaluations set; None if there are none."""
        if self._target is None or self._before is None or self._before.holds():
            return None
        changes = ModuleSnapshot(self._target, contents=self._contents).since(self._before)
        return changes._replace(attributes=[name for name in changes.attributes if name != "training"])

    def stale(self) -> dict[str, Any]:
        """Returns the attributes and buffers that the call has set in the copy so far, if they are missing or different in the module."""
        changes = self.set_by_call()
        if changes is None or self._target is None:
            return {}
        names = [name for name in changes.attributes if is_data(self._target.__dict__.get(name))]
        module, after = self.module.__dict__, self._target.__dict__
        plain = [name for name in names if not isinstance(after.get(name), Tensor) and not is_compound(after.get(name))]
        equal = {name for name in plain if name in module and name in after and module[name] == after[name]}
        buffers = {name: self._target._buffers.get(name) for name in changes.entries.get("_buffers", ())}
        return {name: after.get(name) for name in names if name not in equal} | buffers

    def give_back(self, changes: Changes) -> None:
        """Makes these changes of the copy in the module."""
        assert self._target is not None
        assert self._before is not None
        for name in changes.attributes:
            self._give_attribute(name)
        for name in changes.entries.get("_buffers", ()):
            _give_buffer(self.module._buffers, self._target._buffers, name, self._before.dicts["_buffers"].get(name))

    def separate(self, names: Collection[str]) -> None:
        """Replaces the objects of these names that the copy shares with the module by copies."""
        new = [name for name in names if name not in self._copied and self._target is not None and name in self._target.__dict__]
        if self._contents is True or not new:
            return
        is_as_followed = self.snapshot.holds()
        assert self._target is not None
        self._target.__dict__.update({name: copy_of(self._target.__dict__[name]) for name in new})
        self._copied.update(new)
        if is_as_followed:
            self.snapshot = self.now()

    def _give_attribute(self, name: str) -> None:
        assert self._target is not None
        value = self._target.__dict__.get(name)
        if name not in self._target.__dict__:
            if not hasattr(self._target, name):  # not a module now
                self.module.__dict__.pop(name, None)
        elif is_data(value):
            is_shared = name not in self._copied if self._contents is not True else not (is_compound(value) or isinstance(value, Tensor))
            assert self._before is not None
            held = self.module.__dict__.get(name) if value is self._before.values.get(name) else None
            self.module.__dict__[name] = value if is_shared else with_contents(held, copy_of(value))


def is_data(value: Any) -> bool:
    """Returns whether the value of an attribute is neither code nor a part of the model."""
    return not (isinstance(value, (nn.Module, nn.Parameter)) or callable(value) or modules_inside(value))


def _give_buffer(buffers: dict[str, Tensor | None], after: Mapping[str, Tensor | None], name: str, before: Tensor | None) -> None:
    """Gives a module the buffer of this name from its copy, in place if the copy changed it in place."""
    held, value = buffers.get(name), after.get(name)
    if name not in after:
        buffers.pop(name, None)
    elif value is not None and value is before and held is not None and held.shape == value.shape:
        held.copy_(value)
    else:
        buffers[name] = None if value is None else value.detach().clone()


class Follower:
    """Lets copies of a model's modules follow the model. Copies of a stage that `is_alone` on its rank share objects with the model."""

    def __init__(self, *, is_alone: bool = True) -> None:
        self.is_alone = is_alone
        self._followed: list[_Followed] = []

    def add(
        self, name: str, module: nn.Module, copy: Copy, target: nn.Module | None = None, copied: set[str] | None = None, *, contents: bool
    ) -> None:
        """Lets `copy` follow `module`, which has this name in the model. Snapshots of both have these `contents`.

        `target` is the module of the copy, if `give_back` is to return its changes to `module`. The target has copies of the attributes
        `copied`, and of all attributes with `contents`.
        """
        self._followed.append(_Followed(name, module, copy, target, set() if copied is None else copied, contents=contents))

    def separate(self, names: Mapping[str, Collection[str]]) -> None:
        """Gives copies these attributes, by module, that they have shared with the model until now."""
        for followed in self._followed:
            followed.separate(names.get(followed.name, ()))

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
        for followed in self._followed:
            followed.begin()
        return bool(changed)

    def give_back(self) -> None:
        """Gives the model what the call since `follow` has set in the copies."""
        for followed in self._followed:
            changes = followed.set_by_call()
            if changes is not None:
                followed.give_back(changes)

    def set_so_far(self) -> Iterator[tuple[nn.Module, str, dict[str, Any]]]:
        """Yields the modules of the model, with their names, and what the current call has set in their copies; see `give_back`."""
        return ((followed.module, followed.name, followed.stale()) for followed in self._followed)

    @contextmanager
    def shown(self, tables: Collection[int]) -> Iterator[None]:
        """A context in which modules of the model have what the current call has set in their copies.

        It is for a part that reaches the attributes of these modules, by the `id` of each table of attributes, as of the root in a list.
        What the part sets itself stays.
        """
        shown: list[tuple[dict[str, Any], str, Any, Any]] = []
        for followed in self._followed:
            module = followed.module
            for name, value in followed.stale().items() if id(vars(module)) in tables else ():
                table = module._buffers if name in module._buffers else module.__dict__
                shown.append((table, name, value, table.get(name, _ABSENT)))
                table[name] = value
        try:
            yield
        finally:
            for table, name, value, before in shown:
                if table.get(name, _ABSENT) is not value:
                    continue
                if before is _ABSENT:
                    del table[name]
                else:
                    table[name] = before

    @contextmanager
    def not_following(self) -> Iterator[None]:
        """A context in which the copies do not follow changes of the model."""
        as_followed = [followed for followed in self._followed if followed.snapshot.holds()]
        yield
        for followed in as_followed:
            followed.snapshot = followed.now()

    def reached(self, tables: Collection[int]) -> set[int]:
        """Returns the ids of these tables that are attributes of modules with copies that set attributes themselves."""
        return {id(vars(followed.module)) for followed in self._followed if followed.sets} & set(tables)

    def set_by_call(self) -> dict[str, set[str]]:
        """Returns the names of attributes and buffers that the call since `follow` has set in the copies, by module."""
        changes = {followed.name: followed.set_by_call() for followed in self._followed}
        return {name: change.set_names() for name, change in changes.items() if change is not None and change.set_names()}


def put_entries(copy: nn.Module, module: nn.Module, changes: Changes, dicts: tuple[str, ...], converted: Callable[[Any], Any]) -> None:
    """Makes the changes of these dicts in a copy, with `converted` values."""
    for name in dicts:
        for key in changes.entries.get(name, ()):
            if key in module.__dict__[name]:
                copy.__dict__[name][key] = converted(module.__dict__[name][key])
            else:
                copy.__dict__[name].pop(key, None)
