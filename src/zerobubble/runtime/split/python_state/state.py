"""Reads the Python state that a module's forward may depend on: all it can reach except inputs, parameters and buffers.

A trace bakes in the numbers, strings, flags and functions that the forward read while it was traced. `read_state` finds them:

- attributes of all submodules and of objects of user classes, through nested containers: numbers, strings, enums and dtypes by value;
  functions by code, defaults and closures; arrays by their bytes; all other objects by identity;
- which places share a parameter, a buffer or a submodule, and the order of submodules;
- the shape, dtype and device of other tensors. Traces depend on no more: torch refuses to trace a forward that uses their values;
- attributes of user classes, and globals that user functions name.

The code of the standard library, torch, numpy and tqdm is assumed constant. Not found are files, clocks, environment variables, and objects
that a function reaches by a computed name.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import random
import sys
import types
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from zerobubble.errors import InputError
from zerobubble.runtime.split.python_state.watch import ABSENT, Watch, content_of, items_of

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "zerobubble", "tqdm"}
"""Packages whose code is assumed constant. The thread of tqdm updates its progress bars at any time, which no forward reads."""
_PLAIN = (int, str, bytes, types.NoneType, types.EllipsisType, range, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types compared by `==`, which covers all that a forward can read from them."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"} | {"_output_capturing_hooks_installed"}
"""Attributes of every module: its parts, which are read separately, its hooks, which are checked separately, and the flag that transformers
sets with its own hooks.
"""
MOST_PLACES = 1_000_000
"""Maximum number of watched places. A model of 32 blocks has 27,000; a forward that reaches the state of a whole framework has millions."""
_LARGE = 256
"""Containers with more entries are compared once per step instead of before every pass."""


class Identity:
    """Compares by identity of the wrapped object, and keeps it alive."""

    __slots__ = ("_of",)

    def __init__(self, value: Any) -> None:
        self._of = value

    def __hash__(self) -> int:
        return id(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._of is other._of


class Place(NamedTuple):
    """A place that holds a `tensor`: `table[key]` in an object's `__dict__`, a dict or a list. `path` names it in messages."""

    table: Any
    key: Any
    tensor: Tensor
    path: str

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether the place holds this tensor now."""
        try:
            return self.table[self.key] is tensor
        except LookupError:
            return False


@dataclass
class State:
    """The result of `read_state`.

    - `values` maps paths from the module to all that a forward may read. States with equal values give equal traces.
    - `advanced` maps paths to state that eager code may advance but a traced forward may not: random number generators and
      caches of functions. It is compared only before and after tracing.
    - `caches` are functions with a cache, each with the tensors in it.
    - `places` are the attributes and container entries that hold a tensor, other than the tables of parameters and buffers.
    - `watched` are the places compared before every pass: attributes of objects, submodules and containers.
    - `watched_per_step` are those compared once per step: classes, functions and globals, the tables of parameters and buffers, and large
      containers.
    """

    values: dict[str, Hashable] = field(default_factory=dict)
    advanced: dict[str, Hashable] = field(default_factory=dict)
    caches: list[tuple[Any, frozenset[WeakIdRef]]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    watched: Watch = field(default_factory=Watch)
    watched_per_step: Watch = field(default_factory=Watch)

    def changed_to(self, now: State) -> str | None:
        """Returns the path of the first difference from the later state `now`, None if they are equal."""
        for before, after in ((self.values, now.values), (self.advanced, now.advanced)):
            for path in chain(before, after):
                if before.get(path, ABSENT) != after.get(path, ABSENT):
                    return path
        return None

    def restore(self) -> None:
        """Restores the contents of all tables, and clears the caches of functions that hold other tensors than before."""
        self.watched.restore()
        self.watched_per_step.restore()
        for function, tensors in self.caches:
            if cached_tensors(function) != tensors:
                function.cache_clear()


def read_state(module: nn.Module) -> State:
    """Reads the current Python state that a forward of `module` may depend on.

    Raises `InputError` for an iterator or generator in an attribute, whose position cannot be compared, and for too many places.
    """
    reader = _Reader(module)
    try:
        reader.read(module, "")
    except RecursionError:
        raise InputError(
            "its forward reaches Python objects nested too deeply to be compared; {remedy}", remedy="keep what it reads flat"
        ) from None
    reader.state.watched.note()
    reader.state.watched_per_step.note()
    return reader.state


def random_state() -> object:
    """Returns the states of the random number generators of Python and numpy, for comparison."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else str(numpy.random.get_state(legacy=False)["state"])


class _Reader:
    """Traverses objects and records in `state` the value at each path, such as `layers.0.scale`."""

    def __init__(self, module: nn.Module) -> None:
        self.state = State()
        self._own = {id(tensor): i for i, tensor in enumerate(chain(module.parameters(), module.buffers()))}
        self._seen: dict[int, tuple[Any, str]] = {}
        """The visited objects, by `id`, each with its path. They are kept alive, since Python reuses the `id` of a freed object."""
        self._is_in_code = False

    def read(self, value: Any, path: str) -> None:
        """Records the value at `path`, and continues from there."""
        values = self.state.values
        if len(values) > MOST_PLACES:
            message = "its forward reaches more than {limit:,} Python objects, such as {path}, too many for a graph to watch"
            raise InputError(message, limit=MOST_PLACES, path=str(path))
        if isinstance(value, float):
            values[path] = type(value), value.hex()  # distinguishes 0.0 from -0.0, and NaN equals NaN
        elif isinstance(value, Enum):
            values[path] = type(value), value.name
        elif isinstance(value, (complex, slice)):
            values[path] = type(value), repr(value)
        elif isinstance(value, _PLAIN) and not hasattr(value, "__dict__"):
            values[path] = type(value), value
        elif isinstance(value, Tensor):
            self._read_tensor(value, path)
        elif id(value) in self._seen:
            values[path] = "the same as", self._seen[id(value)][1]
        else:
            self._seen[id(value)] = value, path
            self._read_object(value, path)

    def _read_object(self, value: Any, path: str) -> None:
        for kinds, read in _READERS:
            if isinstance(value, kinds):
                read(self, value, path)
                return
        if _is_of_library(type(value).__module__):
            self._read_library_object(value, path)
        else:
            self._read_instance(value, path)

    def _read_tensor(self, tensor: Tensor, path: str) -> None:
        own = self._own.get(id(tensor))
        kind = "another tensor", tensor.shape, tensor.dtype, tensor.device
        self.state.values[path] = kind if own is None else ("parameter or buffer", own)

    def _read_library_object(self, value: Any, path: str) -> None:
        """Records an object by its memory if it supports the buffer protocol, else by its identity."""
        try:
            memory = memoryview(value)
            content = memory.format, memory.shape, memory.tobytes()
        except (TypeError, ValueError, BufferError, NotImplementedError):
            self.state.values[path] = Identity(value)
            return
        self.state.values[path] = content
        self._watch.add_array(value)

    def _read_module(self, module: nn.Module, path: str) -> None:
        names = [name for name in vars(module) if name not in _OF_EVERY_MODULE]
        self._watch.add_table(vars(module), names)
        self._watch.add_table(module._modules)
        self.state.watched_per_step.add_table(module._parameters)
        self.state.watched_per_step.add_table(module._buffers)
        self._read_class(module, path)
        attributes = {name: vars(module)[name] for name in names}
        self._note_places(vars(module), attributes.items(), path)
        for parts in (attributes, module._parameters, module._buffers, module._modules):
            self._read_parts(parts, path)

    def _read_parts(self, parts: Mapping[str, Any], path: str) -> None:
        for name, part in parts.items():
            self.read(part, f"{path}.{name}".lstrip("."))

    def _read_class(self, value: Any, path: str) -> None:
        """Records the class of an object, and its mutable attributes."""
        self.state.values[f"the class of {path}"] = Identity(type(value))
        with self._in_code():
            for kind in type(value).__mro__:
                if id(kind) not in self._seen and not _is_of_library(kind.__module__):
                    self._seen[id(kind)] = kind, path
                    self._read_attributes(kind)

    def _read_attributes(self, kind: type) -> None:
        self._watch.add_table(vars(kind))
        for name, attribute in vars(kind).items():
            if not name.startswith("__") or (isinstance(attribute, FunctionType) and name != "__init__"):
                self.read(attribute, f"{kind.__name__}.{name}")

    def _read_type(self, kind: type, path: str) -> None:
        self.state.values[path] = Identity(kind)
        if not _is_of_library(kind.__module__):
            with self._in_code():
                self._read_attributes(kind)

    def _read_instance(self, value: Any, path: str) -> None:
        """Records the attributes of an object of a user class."""
        self.state.values[path] = Identity(value)
        self._read_class(value, path)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._watch.add_table(attributes)
            self._note_places(attributes, attributes.items(), path)
            self._read_parts(attributes, path)
        slots = _slots(type(value))
        self._watch.add_slots(value, slots)
        self._read_parts({name: getattr(value, name, ABSENT) for name in slots}, path)

    def _read_mapping(self, mapping: Mapping[Any, Any], path: str) -> None:
        self._add_container(mapping, path)
        self._note_places(mapping, items_of(mapping), path)
        for i, (key, value) in enumerate(items_of(mapping)):
            self.read(key, f"{path}[key {i}]")
            self.read(value, f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[value {i}]")

    def _read_sequence(self, sequence: Iterable[Any], path: str) -> None:
        self._add_container(sequence, path)
        self._note_places(sequence, enumerate(sequence), path)
        for i, value in enumerate(sequence):
            self.read(value, f"{path}[{i}]")

    def _note_places(self, table: Any, entries: Iterable[tuple[Any, Any]], path: str) -> None:
        if isinstance(table, (dict, list)) and not self._is_in_code:
            tensors = [(key, value) for key, value in entries if isinstance(value, Tensor)]
            self.state.places += [Place(table, key, value, f"{path}.{key}".lstrip(".")) for key, value in tensors]

    def _add_container(self, container: Any, path: str) -> None:
        self.state.values[path] = type(container), len(container)
        if not isinstance(container, (tuple, frozenset)):
            (self.state.watched_per_step if len(container) > _LARGE else self._watch).add_table(container)

    def _read_function(self, function: FunctionType, path: str) -> None:
        if _is_of_library(function.__module__):
            self.state.values[path] = Identity(function)
            return
        self.state.values[path] = function.__code__
        with self._in_code():
            self.read(function.__defaults__, f"{path}'s defaults")
            self.read(function.__kwdefaults__, f"{path}'s defaults by name")
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self._watch.add_cell(cell)
                self.read(content_of(cell), f"{path}'s {name}")
            self._read_globals(function.__globals__, _names_in(function.__code__))

    def _read_globals(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        named = tuple(name for name in names if name in namespace)
        self._watch.add_globals(namespace, named)
        for name in named:
            value, path = namespace[name], f"{namespace.get('__name__')}.{name}"
            if isinstance(value, ModuleType) and not _is_of_library(value.__name__):
                self._watch.add_globals(vars(value), tuple(other for other in names if other in vars(value)))
                for other in names:
                    self.read(vars(value).get(other), f"{path}.{other}")
            elif path not in self.state.values:
                self.read(value, path)

    def _read_method(self, method: MethodType, path: str) -> None:
        self.read(method.__func__, path)
        self.read(method.__self__, f"{path}'s self")

    def _read_partial(self, partial: Any, path: str) -> None:
        self.read(partial.func, path)
        self.read(partial.args, f"{path}'s arguments")
        self.read(partial.keywords, f"{path}'s keywords")

    def _read_descriptor(self, descriptor: Any, path: str) -> None:
        self.state.values[path] = Identity(type(descriptor))
        for name in ("fget", "func", "__func__"):  # of a property, a cached property, and a static or class method
            if hasattr(descriptor, name):
                self.read(getattr(descriptor, name), f"{path}'s function")

    def _read_cached(self, function: Any, path: str) -> None:
        tensors = cached_tensors(function)
        self.state.advanced[f"the cache of {path}"] = tensors
        self.state.caches.append((function, tensors))
        self.read(function.__wrapped__, path)

    def _read_reference(self, reference: Any, path: str) -> None:
        self.read(reference(), path)

    def _read_iterator(self, iterator: Any, path: str) -> None:
        if not self._is_in_code:
            kind = type(iterator).__name__
            message = "{path} is a {kind}, whose position cannot be read; {remedy}"
            raise InputError(message, path=str(path), kind=str(kind), remedy="use a number or a list instead")

    def _read_generator(self, generator: random.Random, path: str) -> None:
        self.state.values[path] = Identity(generator)
        self.state.advanced[f"the random numbers of {path}"] = generator.getstate()

    @property
    def _watch(self) -> Watch:
        return self.state.watched_per_step if self._is_in_code else self.state.watched

    @contextmanager
    def _in_code(self) -> Iterator[None]:
        """All that is reached inside belongs to code, and is compared once per step."""
        before, self._is_in_code = self._is_in_code, True
        try:
            yield
        finally:
            self._is_in_code = before


_READERS: tuple[tuple[Any, Callable[[_Reader, Any, str], None]], ...] = (
    (nn.Module, _Reader._read_module),
    ((dict, MappingProxyType), _Reader._read_mapping),
    ((list, tuple, set, frozenset, deque), _Reader._read_sequence),
    (FunctionType, _Reader._read_function),
    (MethodType, _Reader._read_method),
    (functools.partial, _Reader._read_partial),
    (type, _Reader._read_type),
    ((property, staticmethod, classmethod, functools.cached_property), _Reader._read_descriptor),
    (functools._lru_cache_wrapper, _Reader._read_cached),
    (weakref.ref, _Reader._read_reference),
    ((GeneratorType, itertools.count, itertools.cycle), _Reader._read_iterator),
    (random.Random, _Reader._read_generator),
    ((SimpleNamespace, Namespace), _Reader._read_instance),
)
"""Readers by class: the first match applies. Other objects are read as library objects or as user objects."""


def _is_of_library(name: str | None) -> bool:
    """Returns whether a Python module belongs to a package whose code is assumed constant."""
    return (name or "builtins").partition(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> list[str]:
    """Returns the names of globals and attributes that code and its inner functions use."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return list(dict.fromkeys([*code.co_names, *chain.from_iterable(map(_names_in, inner))]))


def _slots(kind: type) -> list[str]:
    """Returns the names that a class and its bases declare in `__slots__`, which may be a single string."""
    declared = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = chain.from_iterable([slots] if isinstance(slots, str) else slots for slots in declared)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


_NO_RESULTS = (FunctionType, BuiltinFunctionType, ModuleType, type, nn.Module, logging.Logger)
"""Types that are not part of a cached result, though it may refer to them."""


def cached_tensors(function: Any) -> frozenset[WeakIdRef]:
    """Returns weak references to all tensors that a function under `functools.cache` or `lru_cache` remembers, in any nesting.

    Cached numbers are harmless, but cached tensors of a trace must not be reused. Two results are equal if the tensors are the same
    objects. The references keep none alive.
    """
    found: set[WeakIdRef] = set()
    seen: set[int] = set()
    stack: list[Any] = [function]
    while stack:
        part = stack.pop()
        if isinstance(part, Tensor):
            found.add(WeakIdRef(part))
        elif id(part) not in seen and not isinstance(part, _NO_RESULTS):
            seen.add(id(part))
            stack += gc.get_referents(part)
    return frozenset(found)
