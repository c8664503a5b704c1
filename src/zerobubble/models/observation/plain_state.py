"""Python objects with which parts of a model can pass the boundaries of stages by: globals, attributes of classes, and shared objects.

On ranks, each process has its own. A proof runs all stages in one process, so it gives each stage a state of its own. Observations and
proofs put back the state of before at their end. The state is what the code of the model's classes names, outside of libraries.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from zerobubble.runtime.values.stored import ABSENT, fill, in_slot, put_in_slot, slots_of

_LIBRARIES = frozenset({"builtins", "torch", "transformers", "zerobubble", "numpy", "peft", "timm", "torchvision"})
_LISTS, _DICTS, _SETS = (list, deque), (dict, OrderedDict, defaultdict, Counter), (set,)
_VALUES = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None), Tensor)
_MISSING = object()
_DEPTH = 4


class _Held(NamedTuple):
    """An object that can change, or a place that a name refers to: its name, and what it holds."""

    name: str
    holder: Any
    contents: Any


class _Name(NamedTuple):
    """A name in a namespace: the dict of a module, a class, or a cell of a closure."""

    space: Any
    name: str

    def get(self) -> Any:
        if isinstance(self.space, CellType):
            return self.space.cell_contents
        return (self.space if isinstance(self.space, dict) else vars(self.space)).get(self.name, _MISSING)

    def set(self, value: Any) -> None:
        if isinstance(self.space, CellType):
            self.space.cell_contents = value
        elif isinstance(self.space, dict):
            self.space.pop(self.name, None) if value is _MISSING else self.space.__setitem__(self.name, value)
        else:
            delattr(self.space, self.name) if value is _MISSING else setattr(self.space, self.name, value)


PlainState = list[_Held]
"""The state at one time."""


class ProcessState:
    """What the code of a model's classes can change outside of the model, and `objects` that it can change inside."""

    def __init__(self, model: nn.Module, objects: Iterable[tuple[str, Any]] = ()) -> None:
        self._objects = list(objects)
        self._names: dict[tuple[int, str], tuple[str, _Name]] = {}
        self._seen: set[int] = set()
        for part in model.modules():
            self._add_class(type(part))
            for value in part.__dict__.values():
                for function in value.values() if isinstance(value, OrderedDict) else (value,):
                    self._add_function(function)

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) in self._seen or _is_of_library(base):
                continue
            self._seen.add(id(base))
            for name, value in list(vars(base).items()):
                self._add_function(value)
                if not name.startswith("__"):
                    self._add(_Name(base, name), f"{base.__qualname__}.{name}")

    def _add_function(self, value: Any) -> None:
        function = getattr(value, "__func__", getattr(value, "fget", getattr(value, "__wrapped__", value)))
        if not isinstance(function, FunctionType) or id(function) in self._seen or _is_of_library(function):
            return
        self._seen.add(id(function))
        names = set(_names_in(function.__code__))
        for name in names & function.__globals__.keys():
            self._add(_Name(function.__globals__, name), f"{function.__module__}.{name}")
            value = function.__globals__[name]
            for inner in names & vars(value).keys() if isinstance(value, ModuleType) and not _is_library(value.__name__) else ():
                self._add(_Name(vars(value), inner), f"{value.__name__}.{inner}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _is_filled(cell):
                self._add(_Name(cell, name), f"{function.__qualname__}.{name}")

    def _add(self, place: _Name, name: str) -> None:
        value = place.get()
        if isinstance(value, type) and not issubclass(value, nn.Module):
            self._add_class(value)
        elif isinstance(value, (FunctionType, staticmethod, classmethod, property)):
            self._add_function(value)
        elif isinstance(value, _VALUES) or _can_change(value):
            self._names[id(place.space), place.name] = name, place

    def now(self) -> PlainState:
        """Returns the state of now."""
        found = [_Held(name, place, place.get()) for name, place in self._names.values()]
        return found + list(objects_in([*self._objects, *((held.name, held.contents) for held in found)]).values())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context at whose end the state is as before."""
        before = self.now()
        try:
            yield
        finally:
            put_back(before)


def put_back(state: PlainState) -> None:
    """Makes the state what it was."""
    for _, holder, contents in state:
        if isinstance(holder, _Name):
            if holder.get() is not contents:
                holder.set(contents)
        elif isinstance(holder, (*_LISTS, *_DICTS, *_SETS)):
            fill(holder, contents)
        else:
            _put_attributes(holder, contents)


def changed(before: PlainState) -> list[str]:
    """Returns the names of what has changed since `before`."""
    return list(dict.fromkeys(held.name for held in before if _differ(held.contents, _contents_of(held.holder))))


def _contents_of(holder: Any) -> Any:
    if isinstance(holder, _Name):
        return holder.get()
    if isinstance(holder, _LISTS):
        return list(holder)
    if isinstance(holder, _SETS):
        return set(holder)
    return dict(holder) if isinstance(holder, _DICTS) else _attributes_of(holder)


def _attributes_of(value: Any) -> dict[Any, Any]:
    slots = {slot: content for slot in slots_of(type(value)) if (content := in_slot(slot, value)) is not ABSENT}
    return {**slots, **getattr(value, "__dict__", {})}


def _put_attributes(value: Any, contents: dict[Any, Any]) -> None:
    for slot in slots_of(type(value)):
        put_in_slot(slot, value, contents.get(slot, ABSENT))
    if hasattr(value, "__dict__"):
        fill(value.__dict__, {name: content for name, content in contents.items() if isinstance(name, str)})


def _differ(before: Any, now: Any) -> bool:
    if type(before) is not type(now) or not isinstance(now, (list, dict, set)):
        return before is not now
    if isinstance(now, dict):
        return before.keys() != now.keys() or any(before[key] is not value for key, value in now.items())
    return before != now if isinstance(now, set) else len(before) != len(now) or any(a is not b for a, b in zip(before, now, strict=True))


def objects_in(named: Iterable[tuple[str, Any]], depth: int = _DEPTH) -> dict[int, _Held]:
    """Returns the objects that can change among these values and inside of them, by id."""
    found: dict[int, _Held] = {}
    left = [(name, value, depth) for name, value in named]
    while left:
        name, value, depth = left.pop()
        if isinstance(value, (tuple, frozenset)):
            left += [(name, inner, depth - 1) for inner in value if depth]
        elif _can_change(value) and id(value) not in found:
            contents = _contents_of(value)
            found[id(value)] = _Held(name, value, contents)
            inside = contents.items() if isinstance(contents, dict) else ((None, inner) for inner in contents)
            left += [(_joined(name, key), inner, depth - 1) for key, inner in inside if depth]
    return found


def _joined(name: str, key: Any) -> str:
    return name if not isinstance(key, str) else f"{name}.{key}" if name else key


def _can_change(value: Any) -> bool:
    if type(value) in (*_LISTS, *_DICTS, *_SETS):
        return True
    is_other = isinstance(value, (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType)) or _is_of_library(type(value))
    return not is_other and (type(getattr(value, "__dict__", None)) is dict or bool(slots_of(type(value))))


def _is_of_library(thing: Any) -> bool:
    return _is_library(getattr(thing, "__module__", None) or "builtins")


def _is_library(name: str) -> bool:
    package = name.partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not _MISSING
    except ValueError:
        return False


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


class SharedObjects:
    """The objects that parts of several stages hold, and what they were before a run."""

    def __init__(self, model: nn.Module, stage_of: Mapping[str, int]) -> None:
        self._before: list[tuple[_Held, list[str]]] = []
        holders: dict[int, dict[str, _Held]] = {}
        for unit in stage_of:
            for key, held in objects_in(_attributes(model.get_submodule(unit))).items():
                holders.setdefault(key, {})[unit] = held
        for of_units in holders.values():
            if len({stage_of[unit] for unit in of_units}) > 1:
                self._before.append((next(iter(of_units.values())), list(of_units)))

    def changed(self) -> list[str]:
        """Describes the objects that have changed, with the parts that share them."""
        return [
            f"parts {', '.join(map(repr, units))} share a {type(held.holder).__name__} ({held.name}), which changes in a forward"
            for held, units in self._before
            if changed([held])
        ]


def _attributes(unit: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of the modules in a unit, and those of other modules to which they refer, by name."""
    for path, module in unit.named_modules():
        yield path, module.__dict__
        for name, value in module.__dict__.items():
            if isinstance(value, nn.Module):
                yield f"{path}.{name}" if path else name, value.__dict__
