"""Reads the Python state that a module's forward may depend on: all it can reach except inputs, parameters and buffers.

A trace bakes in the numbers, strings, flags and functions that the forward read while it was traced. `read_state` finds them:

- attributes of all submodules and of objects of user classes, through nested containers: numbers, strings, enums and dtypes by value;
  functions by code, defaults and closures; arrays by their bytes; all other objects by identity. It reads what is stored, and runs none of
  the code that a class has for access to it;
- which places share a parameter, a buffer or a submodule, and the order of submodules;
- the shape, dtype and device of other tensors. Traces depend on no more: torch refuses to trace a forward that uses their values;
- attributes of user classes, and globals that user functions name.

The code of the standard library, torch, numpy and tqdm is assumed constant. Not found are files, clocks, environment variables, and objects
that a function reaches by a computed name.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import types
import weakref
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import CodeType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from zerobubble.errors import InputError
from zerobubble.runtime.split.python_state.caches import cached_tensors
from zerobubble.runtime.split.python_state.identity import Identity, WeakIdentity
from zerobubble.runtime.split.python_state.watch import Watch
from zerobubble.runtime.values.python_objects import globals_in, is_of_library, names_in
from zerobubble.runtime.values.stored import (
    ABSENT,
    attributes_of,
    content_of,
    entries_of,
    entry,
    in_slot,
    is_a,
    items_of,
    num_entries,
    put,
    referent_of,
    slots_of,
)

_PLAIN = {int, bool, str, bytes, types.NoneType, types.EllipsisType, range, torch.dtype, torch.device, torch.layout} | {torch.memory_format}
"""Types compared by `==`, which covers all that a forward can read from them."""
_NUMBERS: dict[Any, Callable[[Any], Hashable]] = {
    int: int.__index__,
    float: float.hex,  # distinguishes 0.0 from -0.0, and NaN equals NaN
    complex: complex.__repr__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}
"""The plain value of an object of these classes or of their subclasses."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"} | {"_output_capturing_hooks_installed"}
"""Attributes of every module: its parts, which are read separately, its hooks, which are checked separately, and the flag that transformers
sets with its own hooks.
"""
MOST_PLACES = 1_000_000
"""Maximum number of watched places. A model of 32 blocks has 27,000; a forward that reaches the state of a whole framework has millions."""
_CACHES_OF_ENUMS = ("_value2member_map_", "_hashable_values_", "_unhashable_values_", "_unhashable_values_map_")
"""Attributes of a class of flags that grow when a forward combines flags."""
_CLASS: Any = vars(object)["__class__"]
"""The descriptor of the class of an object, which is watched like a slot."""
_LARGE = 256
"""Containers with more entries are compared once per step instead of before every pass."""


class TensorPlace(NamedTuple):
    """A place that holds a `tensor`: `table[key]` in an object's `__dict__`, a dict or a list. `path` names it in messages."""

    table: Any
    key: Any
    tensor: Tensor
    path: str

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether the place holds this tensor now."""
        return entry(self.table, self.key) is tensor

    def put(self, tensor: Tensor) -> None:
        """Stores a tensor in the place."""
        put(self.table, self.key, tensor)


@dataclass
class State:
    """The result of `read_state`.

    - `values` maps paths from the module to all that a forward may read. States with equal values give equal traces.
    - `advanced` maps paths to state that eager code may advance but a traced forward may not: random number generators and
      caches of functions. It is compared only before and after tracing.
    - `caches` are functions with a cache, each with the tensors in it.
    - `draws` set the random number generators of Python and numpy back.
    - `places` are the attributes and container entries that hold a tensor, other than the tables of parameters and buffers.
    - `watched` are the places compared before every pass: attributes of objects, submodules and containers.
    - `watched_per_step` are those compared once per step: classes, functions and globals, the tables of parameters and buffers, and large
      containers.
    """

    values: dict[str, Hashable] = field(default_factory=dict)
    advanced: dict[str, Hashable] = field(default_factory=dict)
    caches: list[tuple[Any, frozenset[WeakIdRef]]] = field(default_factory=list)
    draws: list[Callable[[], object]] = field(default_factory=list)
    places: list[TensorPlace] = field(default_factory=list)
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
        """Restores what all places held, and clears the caches of functions that hold other tensors than before."""
        self.watched.restore()
        self.watched_per_step.restore()
        for set_back in self.draws:
            set_back()
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
        reader.read_global_generators()
    except RecursionError:
        raise InputError(
            "its forward reaches Python objects nested too deeply to be compared; {remedy}", remedy="keep what it reads flat"
        ) from None
    reader.state.watched.note()
    reader.state.watched_per_step.note()
    return reader.state


class _Reader:
    """Traverses objects and records in `state` the value at each path, such as `layers.0.scale`."""

    def __init__(self, module: nn.Module) -> None:
        self.state = State()
        self._own = {id(tensor): i for i, tensor in enumerate(chain(module.parameters(), module.buffers()))}
        self._seen: dict[int, tuple[Any, str]] = {}
        """The visited objects, by `id`, each with its path. They are kept alive, since Python reuses the `id` of a freed object."""
        self._is_in_code = False
        self._is_weak = False

    def read(self, value: Any, path: str) -> None:
        """Records the value at `path`, and continues from there."""
        values = self.state.values
        if len(values) > MOST_PLACES:
            message = "its forward reaches more than {limit:,} Python objects, such as {path}, too many for a graph to watch"
            raise InputError(message, limit=MOST_PLACES, path=str(path))
        kind = type(value)
        if kind in _PLAIN:
            values[path] = kind, value
        elif kind is float:
            values[path] = kind, value.hex()
        elif is_a(value, Tensor):
            self._read_tensor(value, path)
        elif id(value) in self._seen:
            values[path] = "the same as", self._seen[id(value)][1]
        else:
            self._seen[id(value)] = value, path
            self._read_object(value, path)

    def _read_object(self, value: Any, path: str) -> None:
        for kinds, read in _READERS:
            if is_a(value, kinds):
                read(self, value, path)
                return
        if is_of_library(type(value).__module__):
            self._read_library_object(value, path)
        else:
            self._read_instance(value, path)

    def read_global_generators(self) -> None:
        """Records the random number generators of Python and numpy that all modules share."""
        self._note_draws("Python", random.getstate(), random.setstate)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            self._read_without_memory(numpy.random.mtrand._rand, "numpy")

    def _read_tensor(self, tensor: Tensor, path: str) -> None:
        name = self._own.get(id(tensor))
        kind = "another tensor", tensor.shape, tensor.dtype, tensor.device
        self.state.values[path] = kind if name is None else ("parameter or buffer", name)

    def _read_library_object(self, value: Any, path: str) -> None:
        """Records an object by its memory if it supports the buffer protocol, else by its identity."""
        try:
            memory = memoryview(value)
            content = memory.format, memory.shape, memory.tobytes()
        except (TypeError, ValueError, BufferError, NotImplementedError):
            self._read_without_memory(value, path)
            return
        self.state.values[path] = content
        self._watch.add_array(value)

    def _read_without_memory(self, value: Any, path: str) -> None:
        self.state.values[path] = self._identity(value)
        if type(value).__module__ in ("builtins", "itertools") and is_a(value, Iterator):
            self._read_iterator(value, path)
        elif (draws := _draws_of_numpy(value)) is not None:
            self._note_draws(path, pickle.dumps(draws.state), lambda state: setattr(draws, "state", pickle.loads(state)))

    def _read_module(self, module: nn.Module, path: str) -> None:
        table = vars(module)
        attributes = {name: value for name, value in items_of(table) if name not in _OF_EVERY_MODULE}
        self._watch.add_table(table, list(attributes))
        self._watch.add_table(module._modules)
        self.state.watched_per_step.add_slots(module, [_CLASS])
        self.state.watched_per_step.add_table(module._parameters)
        self.state.watched_per_step.add_table(module._buffers)
        self._read_class(module, path)
        self._note_places(table, attributes.items(), path)
        for parts in (attributes, module._parameters, module._buffers, module._modules):
            self._read_parts(parts, path)

    def _read_parts(self, parts: Mapping[str, Any], path: str) -> None:
        for name, part in items_of(parts):
            self.read(part, f"{path}.{name}".lstrip("."))

    def _read_class(self, value: Any, path: str) -> None:
        """Records the class of an object, and its mutable attributes."""
        self.state.values[f"the class of {path}"] = Identity(type(value))
        with self._in_code():
            for kind in type(value).__mro__:
                if id(kind) not in self._seen and not is_of_library(kind.__module__):
                    self._seen[id(kind)] = kind, path
                    self._read_attributes(kind)

    def _read_attributes(self, kind: type) -> None:
        self._watch.add_class(kind)
        for name, attribute in vars(kind).items():
            is_of_python = name.startswith("__") and (type(attribute) is not FunctionType or name == "__init__")
            if not is_of_python and name not in _CACHES_OF_ENUMS:
                self.read(attribute, f"{kind.__name__}.{name}")

    def _read_type(self, kind: type, path: str) -> None:
        self.state.values[path] = Identity(kind)
        if not is_of_library(kind.__module__):
            with self._in_code():
                self._read_attributes(kind)

    def _read_instance(self, value: Any, path: str) -> None:
        """Records an object of a user class, and its attributes."""
        self.state.values[path] = self._identity(value)
        self._read_attributes_of(value, path)

    def _read_attributes_of(self, value: Any, path: str) -> None:
        """Records what an object of a user class stores in `__dict__` and in slots, and its class."""
        self._read_class(value, path)
        attributes = attributes_of(value)
        if attributes is not None:
            self._watch.add_table(attributes)
            self._note_places(attributes, items_of(attributes), path)
            self._read_parts(attributes, path)
        slots = slots_of(type(value))
        if slots:
            self._watch.add_slots(value, slots)
            self._read_parts({slot.__name__: in_slot(slot, value) for slot in slots}, path)

    def _read_number(self, value: Any, path: str) -> None:
        """Records a number or a text, and the attributes that a user class adds to it."""
        plain = next(content for kind, content in _NUMBERS.items() if is_a(value, kind))
        self.state.values[path] = type(value), plain(value)
        self._read_added(value, path)

    def _read_added(self, value: Any, path: str) -> None:
        """Records the attributes that a user class adds to those of a built-in class."""
        if not is_of_library(type(value).__module__):
            self._read_attributes_of(value, path)

    def _read_enum(self, member: Enum, path: str) -> None:
        attributes = attributes_of(member) or {}
        self.state.values[path] = type(member), attributes.get("_name_")
        self._watch.add_table(attributes)
        self._read_parts({name: value for name, value in attributes.items() if name not in ("_name_", "__objclass__")}, path)

    def _read_slice(self, value: slice, path: str) -> None:
        self.state.values[path] = slice
        self._read_parts({name: getattr(value, name) for name in ("start", "stop", "step")}, path)

    def _read_mapping(self, mapping: Mapping[Any, Any], path: str) -> None:
        self._add_container(mapping, path)
        self._note_places(mapping, items_of(mapping), path)
        for i, (key, value) in enumerate(items_of(mapping)):
            self.read(key, f"{path}[key {i}]")
            self.read(value, f"{path}[{key!r}]" if type(key) in (str, int) else f"{path}[value {i}]")
        self._read_added(mapping, path)

    def _read_sequence(self, sequence: Iterable[Any], path: str) -> None:
        self._add_container(sequence, path)
        entries = entries_of(sequence)
        self._note_places(sequence, enumerate(entries), path)
        for i, value in enumerate(entries):
            self.read(value, f"{path}[{i}]")
        self._read_added(sequence, path)

    def _note_places(self, table: Any, entries: Iterable[tuple[Any, Any]], path: str) -> None:
        if is_a(table, (dict, list)) and not self._is_in_code:
            tensors = [(key, value) for key, value in entries if is_a(value, Tensor)]
            self.state.places += [TensorPlace(table, key, value, f"{path}.{key}".lstrip(".")) for key, value in tensors]

    def _add_container(self, container: Any, path: str) -> None:
        size = num_entries(container)
        self.state.values[path] = type(container), size
        if not is_a(container, (tuple, frozenset)):
            (self.state.watched_per_step if size > _LARGE else self._watch).add_table(container)

    def _read_function(self, function: FunctionType, path: str) -> None:
        if is_of_library(function.__module__):
            self.state.values[path] = Identity(function)
            return
        self.state.values[path] = function.__code__
        with self._in_code():
            self.read(function.__defaults__, f"{path}'s defaults")
            self.read(function.__kwdefaults__, f"{path}'s defaults by name")
            if function.__dict__:
                self.read(function.__dict__, f"{path}'s attributes")
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self._watch.add_cell(cell)
                self.read(content_of(cell), f"{path}'s {name}")
            self._read_globals(function.__globals__, function.__code__)

    def _read_globals(self, namespace: dict[str, Any], code: CodeType) -> None:
        names, named = names_in(code), tuple(name for name in globals_in(code) if name in namespace)
        self._watch.add_globals(namespace, named)
        for name in named:
            value, path = namespace[name], f"{namespace.get('__name__')}.{name}"
            if is_a(value, ModuleType) and not is_of_library(value.__name__):
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
            with suppress(AttributeError):
                self.read(object.__getattribute__(descriptor, name), f"{path}'s function")

    def _read_cached(self, function: Any, path: str) -> None:
        tensors = cached_tensors(function)
        self.state.advanced[f"the cache of {path}"] = tensors
        self.state.caches.append((function, tensors))
        self.read(function.__wrapped__, path)

    def _read_reference(self, reference: Any, path: str) -> None:
        self._watch.add_reference(reference)
        before, self._is_weak = self._is_weak, True
        self.read(referent_of(reference), path)
        self._is_weak = before

    def _identity(self, value: Any) -> Identity | WeakIdentity:
        try:
            return WeakIdentity(value) if self._is_weak else Identity(value)
        except TypeError:  # its class has no weak references
            return Identity(value)

    def _read_iterator(self, iterator: Any, path: str) -> None:
        if not self._is_in_code:
            kind = type(iterator).__name__
            message = "{path} is a {kind}, whose position cannot be read; {remedy}"
            raise InputError(message, path=str(path), kind=str(kind), remedy="use a number or a list instead")

    def _read_generator(self, generator: random.Random, path: str) -> None:
        self.state.values[path] = self._identity(generator)
        self._note_draws(path, generator.getstate(), generator.setstate)

    def _note_draws(self, path: str, state: Any, set_back: Callable[[Any], object]) -> None:
        self.state.advanced[f"the random numbers of {path}"] = state
        self.state.draws.append(functools.partial(set_back, state))

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


_OF_COLLECTIONS = (UserDict, UserList, ChainMap, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
"""Classes of the standard library that keep their contents in attributes."""
_READERS: tuple[tuple[Any, Callable[[_Reader, Any, str], None]], ...] = (
    (Enum, _Reader._read_enum),
    (tuple(_NUMBERS), _Reader._read_number),
    (slice, _Reader._read_slice),
    (nn.Module, _Reader._read_module),
    ((dict, MappingProxyType), _Reader._read_mapping),
    ((list, tuple, set, frozenset, deque), _Reader._read_sequence),
    (FunctionType, _Reader._read_function),
    (MethodType, _Reader._read_method),
    (functools.partial, _Reader._read_partial),
    (type, _Reader._read_type),
    ((property, staticmethod, classmethod, functools.cached_property), _Reader._read_descriptor),
    (functools._lru_cache_wrapper, _Reader._read_cached),
    ((weakref.ref, *weakref.ProxyTypes), _Reader._read_reference),
    (GeneratorType, _Reader._read_iterator),
    (random.Random, _Reader._read_generator),
    ((SimpleNamespace, Namespace, *_OF_COLLECTIONS), _Reader._read_instance),
)
"""Readers by class: the first match applies. Other objects are read as library objects or as user objects."""


def _draws_of_numpy(value: Any) -> Any:
    """Returns the object with the `state` of a generator of numpy, None for any other object."""
    if not type(value).__module__.startswith("numpy.random"):
        return None
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
    return bits if hasattr(bits, "state") else None
