"""Notices attributes from which a pass continues: it reads the number or tensor that an earlier pass has set.

While an attribute is watched, its class has a descriptor of that name. An augmented assignment, such as `self.count += 1`, is no read: its
value goes nowhere else. So counters for logs are not noticed. Reads in compiled code are not noticed either.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import threading
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from zerobubble.runtime.values.stored import ABSENT

_lock = threading.Lock()
"""Ranks that are threads may have modules of the same class."""


class WatchedAttribute:
    """The attribute `name` of `module`, watched until `close`, unless code of its class gets and sets it.

    Attributes:
        is_read: Whether a pass has continued from it.
        is_of_pass: Whether the current pass has set it. Assign False when a pass begins.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.is_read = False
        self.is_of_pass = False
        self._is_augmented = False
        self._owner = id(module)
        with _lock:
            self._descriptor = _descriptor_of(type(module), name)
            if self._descriptor is not None:
                self._descriptor.watched[self._owner] = self

    def close(self) -> None:
        """Ends the watch."""
        with _lock:
            if self._descriptor is not None:
                del self._descriptor.watched[self._owner]
                if not self._descriptor.watched:
                    self._descriptor.remove()

    def get_in(self, frame: FrameType) -> None:
        """Notes that the instruction of `frame` gets the attribute."""
        self._is_augmented = frame.f_lasti in _augmented_loads(frame.f_code)
        self.is_read |= not self._is_augmented and not self.is_of_pass

    def set(self) -> None:
        """Notes that the attribute is set."""
        self.is_of_pass |= not self._is_augmented
        self._is_augmented = False


class _Descriptor:
    """Takes the place of the attribute `name` in the class `kind`; `watched` notes each use, by the `id` of the instance."""

    def __init__(self, kind: type, name: str) -> None:
        self.watched: dict[int, WatchedAttribute] = {}
        self._kind, self._name = kind, name
        self._replaced = vars(kind).get(name, ABSENT)
        self._of_class = getattr(kind, name, ABSENT)
        setattr(kind, name, self)

    def remove(self) -> None:
        """Gives the class back what it had."""
        if self._replaced is ABSENT:
            delattr(self._kind, self._name)
        else:
            setattr(self._kind, self._name, self._replaced)

    def __get__(self, instance: Any, kind: type | None = None) -> Any:
        if instance is not None and not torch.compiler.is_compiling() and id(instance) in self.watched:
            self.watched[id(instance)].get_in(sys._getframe(1))
        value = self._of_class if instance is None else vars(instance).get(self._name, self._of_class)
        if value is ABSENT:
            raise AttributeError(self._name)
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        if not torch.compiler.is_compiling() and id(instance) in self.watched:
            self.watched[id(instance)].set()
        vars(instance)[self._name] = value

    def __delete__(self, instance: Any) -> None:
        if self._name not in vars(instance):
            raise AttributeError(self._name)
        del vars(instance)[self._name]


def _descriptor_of(kind: type, name: str) -> _Descriptor | None:
    """Returns the descriptor of an attribute, a new one if none is in place, or None if the class has one of its own."""
    entry = inspect.getattr_static(kind, name, None)
    if isinstance(entry, _Descriptor):
        return entry if vars(kind).get(name) is entry else _Descriptor(kind, name)
    return None if inspect.isdatadescriptor(entry) else _Descriptor(kind, name)


@functools.lru_cache(maxsize=1024)
def _augmented_loads(code: CodeType) -> frozenset[int]:
    """Returns where `code` loads an attribute for an augmented assignment: it first copies the object, to set the attribute afterwards."""
    loads, before = [], ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_ATTR" and before == "COPY":
            loads.append(instruction.offset)
        if instruction.opname != "EXTENDED_ARG":
            before = instruction.opname
    return frozenset(loads)
