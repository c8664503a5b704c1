"""The Python state that a forward may change, so that it can run again, or as if it had not run.

On one device a forward runs once per microbatch. R runs it a second time, and `profile`, `zb.split` and `describe` run it in addition. What
it changes besides parameters and buffers is found by a walk from the module through

- attributes of modules, namespaces and objects of user classes, data attributes of these classes, and containers;
- closures and defaults of functions, and global variables that user code names, also of imported Python modules;
- random generators of torch, Python and NumPy, with the global ones of Python and NumPy; arrays and tensors of up to 16 MiB; iterators
  and files that are read.

Objects of libraries, such as loggers, are assumed to have no effect on a forward. Comparing a place takes about half a microsecond.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import chain
from operator import is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zerobubble.errors import InputError
from zerobubble.runtime.values.python_objects import NAMESPACES, globals_in, is_constant_code, is_of_library, names_in
from zerobubble.runtime.values.python_places import (
    Attributes,
    Cell,
    Content,
    DictPlace,
    Elements,
    GeneratorState,
    Items,
    Place,
    Slots,
    are_same,
    array_place,
    class_place,
    container_place,
    file_place,
    generator_place,
    globals_place,
    iterator_place,
)
from zerobubble.runtime.values.refusing import Refusing
from zerobubble.runtime.values.stored import ABSENT, attributes_of, entries_of, is_a, slots_of

_ATOMS = (int, float, complex, str, bytes, types.NoneType, Enum, torch.dtype, torch.device, torch.Size, nn.Parameter, ModuleType)
_CODE = (FunctionType, MethodType, functools.partial, type, staticmethod, classmethod, property)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module: its parameters, buffers, modules and hooks, and its mode."""
_OF_NAMESPACES = ("argparse", "collections", "torch.utils.data.dataloader", "torch.utils.data.dataset", "torch.utils.data.sampler", "types")
"""Modules of libraries whose objects hold values of the user: Namespace, UserDict, SimpleNamespace, Subset and others."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
GENERATORS = ("random", "numpy.random")
"""The paths of the global generators of Python and NumPy."""
TORCH = "torch"
"""The path of torch's default generators."""
_MOST_ENTRIES = 2000


def global_generators() -> list[Any]:
    """Returns the global generators of Python and, if it is imported, NumPy."""
    return [random._inst, *([sys.modules["numpy"].random.mtrand._rand] if "numpy" in sys.modules else [])]


def named_generators(names: Iterable[str]) -> str:
    """Describes generators by their paths."""
    of_libraries = dict(zip((*GENERATORS, TORCH), ("Python's random", "NumPy's global generator", "torch's generator"), strict=True))
    return ", ".join(of_libraries.get(name, f"the generator {name!r}") for name in sorted(names))


class Snapshot(NamedTuple):
    """The `contents` of the first of `places`. Places that were found since come last and have no contents."""

    places: list[Place]
    contents: list[Content]


class PythonState:
    """The Python state that the code of `roots`, modules, functions and places, may change, except through the objects `left_out`.

    The entries of containers with more than `most_entries` are assumed to be constant, such as those of data sets; the container is not.
    """

    def __init__(self, *roots: Any, left_out: Sequence[Any] = (), most_entries: int = _MOST_ENTRIES) -> None:
        self._roots = roots
        self._left_out = left_out
        self._most_entries = most_entries
        self._find()

    def _find(self) -> None:
        self._finder = _Finder(self._roots, self._left_out)
        self._places: list[Place] = self._finder.places
        self._contents: list[Content] = []
        self._read_new()
        self._num_found = len(self._places)

    def snapshot(self) -> Snapshot:
        """Returns the state now."""
        self.update()
        if len(self._places) > self._num_found:
            self._find()  # drops the places that are not in use any more, with the activations that they may hold
        return Snapshot(self._places, list(self._contents))

    def update(self) -> bool:
        """Reads the state. Returns whether it has changed since it was last read."""
        now = [place.read() for place in self._places]
        entries = list(chain.from_iterable(now))
        if len(entries) == len(self._entries) and all(map(is_, entries, self._entries)):
            return False
        changed = [place for place, content, before in zip(self._places, now, self._contents, strict=True) if not are_same(content, before)]
        self._contents = now
        for place in changed:
            self._visit(place, place.read())
        self._read_new()
        return True

    @property
    def names(self) -> set[str]:
        """The names in the code that was visited, other than constructors."""
        return self._finder.names

    def generators(self) -> dict[str, GeneratorState]:
        """Returns the random generators that were found, by path."""
        return {place.path: place for place in self._places if isinstance(place, GeneratorState)}

    def owners(self) -> set[int]:
        """Returns the `id` of each object that has a place."""
        return {id(place.owner) for place in self._places}

    def _visit(self, place: Place, content: Content) -> None:
        if len(content) <= (self._most_entries if isinstance(place, (Items, DictPlace)) else _MOST_ENTRIES):
            self._finder.visit_all(place.objects(content))

    def _read_new(self) -> None:
        while len(self._contents) < len(self._places):
            place = self._places[len(self._contents)]
            content = place.read()
            self._contents.append(content)
            self._visit(place, content)
        self._entries = list(chain.from_iterable(self._contents))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context that restores the state at its end, as far as it can be put back."""
        before = self.snapshot()
        try:
            yield
        finally:
            put_back(before)

    @contextmanager
    def as_in(self, before: Snapshot) -> Iterator[None]:
        """A context in which the state is the state of a snapshot, restored at the end.

        Tensors that have changed since are replaced by copies, since graphs of other microbatches may need them.
        """
        now = self.snapshot()
        _raise_first(put_back(before, replaces_tensors=True))
        try:
            yield
        finally:
            _raise_first(put_back(now))


def _raise_first(faults: list[InputError]) -> None:
    if faults:
        raise faults[0]


def put_back(before: Snapshot, *, replaces_tensors: bool = False) -> list[InputError]:
    """Restores the contents of a snapshot; with `replaces_tensors`, replaces tensors with changed elements by copies.

    Returns the errors for tensors without a copy, and for iterators, with the field `place`.
    """
    copies = _copies_in(before) if replaces_tensors else {}
    faults = []
    for place, content in zip(*before, strict=False):
        if copies and isinstance(place, Elements):
            continue
        now = tuple(copies.get(id(value), value) for value in content) if copies else content
        if not are_same(place.read(), now):
            try:
                place.write(now)
            except InputError as error:
                faults.append(error)
    return faults


def changed(before: Snapshot) -> dict[str, Place]:
    """Returns what has changed since a snapshot: by name, its place."""
    differing: dict[str, Place] = {}
    for place, content in zip(*before, strict=False):
        now = place.read()
        if not are_same(now, content):
            differing |= dict.fromkeys(_names_of_changes(place, content, now), place)
    return differing


def _names_of_changes(place: Place, before: Content, now: Content) -> list[str]:
    values, new = dict(place.objects(before)), dict(place.objects(now))
    return [name for name in values | new if values.get(name, ABSENT) is not new.get(name, ABSENT)] or [place.path]


def _copies_in(before: Snapshot) -> dict[int, Tensor]:
    """Returns, by the `id` of each tensor that has changed since a snapshot, a copy of its elements then.

    Raises `InputError` for one that no place holds directly, so that it cannot be replaced.
    """
    pairs = [(place, content) for place, content in zip(*before, strict=False) if isinstance(place, Elements)]
    changed = {id(place.owner): (place, content) for place, content in pairs if not are_same(place.read(), content)}
    held = {id(value) for content in before.contents for value in content} if changed else set()
    for number, (place, _) in changed.items():
        if number not in held:
            raise place.lost()
    return {number: place.copy_in(content) for number, (place, content) in changed.items()}


class _Finder:
    """Finds the places that can be reached from `roots` without the objects `left_out`, in `places`."""

    def __init__(self, roots: Iterable[Any], left_out: Iterable[Any]) -> None:
        self.places: list[Place] = []
        self._seen = {id(value): value for value in left_out}
        """Keeps visited objects alive, since Python reuses the `id` of a freed object."""
        self._variables: dict[int, set[str]] = {}
        self.names: set[str] = set()
        modules = [root for root in roots if isinstance(root, nn.Module)]
        self._owned = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
        self.visit_all(zip(GENERATORS, global_generators(), strict=False))
        for root in roots:
            self.visit("", root)

    def visit_all(self, values: Iterable[tuple[str, Any]]) -> None:
        """Adds the places of several objects, each with its path."""
        for path, value in values:
            if not is_a(value, _ATOMS) and id(value) not in self._seen:
                self.visit(path, value)

    def visit(self, path: str, value: Any) -> None:
        """Adds the places of an object. Those of the objects that it holds follow when these are read."""
        if is_a(value, _ATOMS) or id(value) in self._seen:
            return
        if is_a(value, Place):
            self.places.append(value)
            return
        if is_a(value, type):
            self._visit_class(value)
            return
        self._seen[id(value)] = value
        if is_a(value, nn.Module):
            self._visit_module(path, value)
        elif is_a(value, Tensor):
            self._visit_tensor(path, value)
        elif is_a(value, (tuple, frozenset)):
            items = entries_of(value)
            self.visit_all((f"{path}[{i}]", item) for i, item in enumerate(items[:_MOST_ENTRIES]))
        elif is_a(value, _CODE):
            self._visit_code(path, value)
        else:
            self._visit_object(path, value)

    def _visit_module(self, path: str, module: nn.Module) -> None:
        self.places.append(Attributes(path, vars(module), _OF_EVERY_MODULE))
        self._visit_class(type(module))
        for name, child in (*module._modules.items(), *module._buffers.items()):
            self.visit(f"{path}.{name}".lstrip("."), child)
        for hooks in _HOOKS:
            self.visit_all((f"a hook of {path or 'the module'}", hook) for hook in vars(module)[hooks].values())

    def _visit_tensor(self, path: str, tensor: Tensor) -> None:
        if id(tensor) in self._owned or isinstance(tensor, Refusing) or is_lazy(tensor) or tensor.is_inference() or tensor.is_meta:
            return
        self.places.append(Elements(path, tensor))

    def _visit_object(self, path: str, value: Any) -> None:
        container = container_place(path, value)
        place = container or generator_place(path, value) or file_place(path, value) or iterator_place(path, value)
        if place is None and is_of_library(type(value).__module__):
            place = array_place(path, value)
        if place is not None:
            self.places.append(place)
        if not is_of_library(type(value).__module__) or (container is None and type(value).__module__ in _OF_NAMESPACES):
            self._visit_instance(path, value)
        elif type(value) in NAMESPACES:
            self.places.append(Attributes(path, vars(value)))

    def _visit_instance(self, path: str, value: Any) -> None:
        attributes = attributes_of(value)
        if attributes is not None:
            self.places.append(Attributes(path, attributes))
        slots = slots_of(type(value))
        if slots:
            self.places.append(Slots(path, value, slots))
        self._visit_class(type(value))

    def _visit_class(self, derived: type) -> None:
        for kind in derived.__mro__:
            if id(kind) not in self._seen and not is_constant_code(kind.__module__):
                self._seen[id(kind)] = kind
                entries = [
                    (name, entry) for name, entry in vars(kind).items() if not name.startswith("__") or isinstance(entry, FunctionType)
                ]
                names = [name for name, entry in entries if not name.startswith("__") and not is_a(entry, _CODE)]
                if names:
                    self.places.append(class_place(kind, names))
                self.visit_all((f"{kind.__name__}.{name}", entry) for name, entry in entries if is_a(entry, _CODE))

    def _visit_code(self, path: str, code: Any) -> None:
        if isinstance(code, MethodType):
            self.visit_all(((path, code.__self__), (path, code.__func__)))
        elif isinstance(code, functools.partial):
            self.visit_all((path, part) for part in (code.func, code.args, code.keywords))
        elif isinstance(code, (staticmethod, classmethod)):
            self.visit(path, code.__func__)
        elif isinstance(code, property):
            self.visit(path, code.fget)
        elif isinstance(code, FunctionType) and not is_constant_code(code.__module__):
            self._visit_function(path, code)

    def _visit_function(self, path: str, function: FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self.places.append(Cell(f"{path}'s {name}", cell))
        if vars(function):
            self.places.append(Attributes(path, vars(function)))
        self.visit_all((path, value) for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        names = names_in(function.__code__)
        if function.__name__ != "__init__":
            self.names.update(names)
        self._visit_namespaces([function.__globals__], function.__code__)

    def _visit_namespaces(self, namespaces: list[dict[str, Any]], code: CodeType) -> None:
        """Adds the places of the variables that `code` uses, in its own namespace and in those of the Python modules that it names."""
        for number, namespace in enumerate(namespaces):
            names = names_in(code) if number else globals_in(code)
            named = [(name, namespace[name]) for name in names if name in namespace]
            self._visit_variables(namespace, [(name, value) for name, value in named if not is_a(value, (*_CODE, ModuleType))])
            self.visit_all((name, value) for name, value in named if is_a(value, (FunctionType, type)))
            modules = [value for _, value in named if is_a(value, ModuleType) and not is_constant_code(value.__name__)]
            namespaces += [vars(module) for module in modules if not any(vars(module) is other for other in namespaces)]

    def _visit_variables(self, namespace: dict[str, Any], named: Iterable[tuple[str, Any]]) -> None:
        """Adds the place of global variables that no place has yet."""
        placed = self._variables.setdefault(id(namespace), set())
        names = [name for name, _ in named if name not in placed]
        placed.update(names)
        if names:
            self.places.append(globals_place(namespace, names))
