"""Finds where the code of a function keeps values, by the names in it: containers, attributes, and variables of closures and modules."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from zerobubble.runtime.values.python_objects import globals_in, is_of_library, names_in
from zerobubble.runtime.values.stored import ABSENT, attributes_of, content_of, entries_of, is_a

_CONTAINERS = (list, dict, set, deque)
_STORES = ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL")
_MOST_ENTRIES = 64
"""The number of entries of a container that are visited."""
_DEPTH = 6
"""Levels of functions that use others, and of objects inside of objects."""


class UsedPlaces:
    """The places that a function, method, partial or callable object uses.

    Attributes:
        contents: What containers, attributes and variables hold, by the `id` of the container, or of the owner and the name.
        stored: The places among them that the code may fill: containers, and attributes and variables that it assigns.
        names: All names in the code.
        assigned: The names that it assigns.
    """

    def __init__(self, function: Any) -> None:
        self.names: set[str] = set()
        self.assigned: set[str] = set()
        num_names = -1
        while num_names < len(self.names):  # objects may come as arguments of code that is visited after them
            num_names = len(self.names)
            self.contents: dict[tuple[int, str], Any] = {}
            self.stored: set[tuple[int, str]] = set()
            self._seen: dict[int, Any] = {}
            self._visit(function, _DEPTH)

    def _visit(self, value: Any, depth: int) -> None:
        if not depth or id(value) in self._seen or is_a(value, (Tensor, type, ModuleType)):
            return
        self._seen[id(value)] = value
        if is_a(value, partial):
            self._visit_all((value.func, *value.args, *value.keywords.values()), depth)
        elif is_a(value, FunctionType):
            self._visit_code(value, None, depth)
        elif is_a(value, MethodType):
            self._visit_code(value.__func__, value.__self__, depth)
        elif is_a(value, (*_CONTAINERS, tuple)):
            self._note(value, "", value, is_stored=not is_a(value, tuple))
            self._visit_all(entries_of(value)[:_MOST_ENTRIES], depth - 1)
        else:
            for name in ("__call__", "forward"):
                self._visit_code(getattr(type(value), name, None), value, depth)
            self._visit_attributes(value, depth)

    def _visit_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self._visit(value, depth)

    def _visit_code(self, function: Any, owner: Any, depth: int) -> None:
        """Visits the variables of a user's function, and what it uses of its `owner`."""
        if not is_a(function, FunctionType) or is_of_library(function.__module__) or not depth:
            return
        names = names_in(function.__code__)
        self.names.update(names)
        self.assigned.update(_assigned_in(function.__code__))
        for space, name, value in _variables(function):
            self._note(space, name, value, is_stored=name in self.assigned)
            self._visit(value, depth - 1)
        self._visit_all((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()), depth - 1)
        if owner is not None:
            self._visit_attributes(owner, depth)
            methods = (vars(kind)[name] for kind in type(owner).__mro__ for name in names if name in vars(kind))
            for method in (method for method in methods if id(method) not in self._seen):
                self._seen[id(method)] = method
                self._visit_code(method, owner, depth - 1)

    def _visit_attributes(self, owner: Any, depth: int) -> None:
        if is_of_library(type(owner).__module__):
            return
        attributes = attributes_of(owner) or {}
        for name in self.names & attributes.keys():
            self._note(owner, name, attributes[name], is_stored=name in self.assigned)
            self._visit(attributes[name], depth - 1)

    def _note(self, owner: Any, name: str, value: Any, *, is_stored: bool) -> None:
        self.contents[id(owner), name] = value
        if is_stored:
            self.stored.add((id(owner), name))


def _variables(function: FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """Yields variables of closures and modules: where each is, its name and its value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if (value := content_of(cell)) is not ABSENT:
            yield cell, name, value
    space = function.__globals__
    yield from ((space, name, space[name]) for name in globals_in(function.__code__) if name in space)


def _assigned_in(code: CodeType) -> Iterator[str]:
    yield from (instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _STORES)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _assigned_in(const)


def holds_tensors(value: Any, depth: int = _DEPTH) -> bool:
    """Returns whether `value` is a tensor, or a container with tensors inside."""
    if is_a(value, (*_CONTAINERS, tuple)) and depth:
        return any(holds_tensors(entry, depth - 1) for entry in entries_of(value))
    return is_a(value, Tensor)
