"""What a model's code reads outside of the model, such as global variables and functions: a trace has them as it found them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from zerobubble.errors import InputError
from zerobubble.runtime.values.python_objects import globals_in, is_constant_code, names_in
from zerobubble.runtime.values.python_places import Attributes, Content, Elements, Place, Slots, are_same, class_place, globals_place
from zerobubble.runtime.values.python_state import GENERATORS, PythonState
from zerobubble.runtime.values.stored import ABSENT

_ATOMS = (bool, int, float, complex, str, bytes)
_WRAPPERS = {staticmethod: "__func__", classmethod: "__func__", property: "fget"}


class CodeValues:
    """The values of class attributes, global variables and variables of closures that the forwards of `model` read, and what they call.

    Those are found by the names in their code. Tensors are left out: a trace reads their numbers in each call.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = {type(module) for module in model.modules() if not is_constant_code(type(module).__module__)}
        code_of = {kind: dict(_code_of(kind)) for kind in kinds}
        functions = [function for code in code_of.values() for function in code.values()]
        state = PythonState(*functions, left_out=[*model.modules(), *kinds])
        self._names = state.names
        self._before = [(place, content) for place, content in zip(*state.snapshot(), strict=False) if place.path not in GENERATORS]
        places = chain(_places_of_functions(functions), *(_places_of_class(kind, code) for kind, code in code_of.items()))
        self._before += [(place, place.read()) for place in places]

    def changed(self) -> list[str]:
        """Returns the names of the values that have changed."""
        return list(dict.fromkeys(name for place, content in self._before for name in self._changes(place, content)))

    def refuse_changes(self) -> None:
        """Raises `InputError` if any has changed."""
        changed = self.changed()
        if changed:
            raise InputError(
                "since zb.split, {changed} changed, which the model's code reads, and its graph keeps the value at the time of tracing",
                changed=" and ".join(changed),
                remedy="undo that; keep a value that changes in a buffer of the model (register_buffer), and change it by fill_ or copy_",
            )

    def _changes(self, place: Place, before: Content) -> list[str]:
        now = place.read()
        if isinstance(place, Elements) or are_same(now, before):
            return []
        values, new = dict(place.objects(before)), dict(place.objects(now))
        if not values and not new:
            return [place.path]
        names = [name for name in values | new if not _are_equal(values.get(name, ABSENT), new.get(name, ABSENT))]
        by_name = isinstance(place, (Attributes, Slots))
        return [name for name in names if not by_name or name.rpartition(".")[2] in self._names]


def _code_of(kind: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """Yields the forward of a class and the methods that it calls, by name."""
    left, seen = ["forward"], {"forward"}
    while left:
        name = left.pop()
        entry: Any = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        function = getattr(entry, _WRAPPERS[type(entry)]) if type(entry) in _WRAPPERS else entry
        if isinstance(function, FunctionType) and not is_constant_code(function.__module__):
            yield name, function
            new = [other for other in names_in(function.__code__) if other not in seen]
            seen.update(new)
            left += new


def _places_of_class(kind: type[nn.Module], code: Mapping[str, FunctionType]) -> Iterator[Place]:
    """Yields the places of the methods `code` of a class, and of the data attributes that they name, in the class and its bases."""
    names = {name for function in code.values() for name in names_in(function.__code__)} - code.keys()
    for base in kind.__mro__:
        if not is_constant_code(base.__module__):
            data = [name for name in names if name in vars(base) and not callable(vars(base)[name])]
            yield class_place(base, [*code, *data])


def _places_of_functions(left: Iterable[FunctionType]) -> Iterator[Place]:
    """Yields the places of the global functions that these functions call, directly or through others."""
    left, seen = list(left), set[FunctionType]()
    while left:
        function = left.pop()
        if function in seen:
            continue
        seen.add(function)
        names, global_names = names_in(function.__code__), globals_in(function.__code__)
        modules = [value for name in global_names if isinstance(value := function.__globals__.get(name), ModuleType)]
        of_modules = [(vars(module), names) for module in modules if not is_constant_code(module.__name__)]
        for namespace, used in ((function.__globals__, global_names), *of_modules):
            called = [name for name in used if _is_own_function(namespace.get(name))]
            if called:
                yield globals_place(namespace, called)
                left += [namespace[name] for name in called]


def _is_own_function(value: Any) -> bool:
    return isinstance(value, FunctionType) and not is_constant_code(value.__module__)


def _are_equal(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, FunctionType) and isinstance(before, FunctionType):
        return now.__code__ == before.__code__ and not (now.__closure__ or now.__defaults__ or now.__kwdefaults__)
    return type(now) is type(before) and isinstance(now, _ATOMS) and bool(now == before)
