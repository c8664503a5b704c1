"""Places in which Python code keeps what changes: attributes, containers, variables, arrays, tensors, generators and iterators."""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from operator import is_, length_hint
from types import GeneratorType, MemberDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.values.memory import is_plain
from zerobubble.runtime.values.random_state import in_bytes
from zerobubble.runtime.values.stored import (
    ABSENT,
    content_of,
    entries_of,
    fill,
    in_slot,
    is_a,
    put_in_array,
    put_in_cell,
    put_in_slot,
)

Content = tuple[Any, ...]
"""What a place holds: the same objects, or equal states, as long as nothing changes it."""


def are_same(now: Content, other: Content) -> bool:
    """Returns whether two contents of a place are the same objects."""
    return len(now) == len(other) and all(map(is_, now, other))


LARGEST = 1 << 24
"""The bytes of the largest array and tensor that are copied. Larger arrays are assumed constant, such as data sets."""


class Place:
    """A place of the object `owner`. Errors name it by its `path`."""

    def __init__(self, path: str, owner: Any) -> None:
        self.path = path
        self.owner = owner

    def read(self) -> Content:
        """Returns the content now."""
        raise NotImplementedError

    def write(self, content: Content) -> None:
        """Puts an earlier content back. Raises `InputError` if that is impossible."""
        raise NotImplementedError

    def objects(self, content: Content) -> Iterable[tuple[str, Any]]:
        """Returns the objects in a content that may have places of their own, each with its path."""
        return ((f"{self.path}[{i}]", value) for i, value in enumerate(content))


class DictPlace(Place):
    """The entries of a dict."""

    def read(self) -> Content:
        return entries_of(self.owner)

    def write(self, content: Content) -> None:
        half = len(content) // 2
        fill(self.owner, dict(zip(content[:half], content[half:], strict=True)))

    def objects(self, content: Content) -> Iterable[tuple[str, Any]]:
        half = len(content) // 2
        return ((f"{self.path}.{key}".lstrip("."), value) for key, value in zip(content[:half], content[half:], strict=True))


class Attributes(Place):
    """The attributes of an object, except those `left_out`. A content begins with their names."""

    def __init__(self, path: str, table: dict[str, Any], left_out: frozenset[str] = frozenset()) -> None:
        super().__init__(path, table)
        self._left_out = left_out
        self._names: tuple[str, ...] = ()
        self._length = -1

    def read(self) -> Content:
        table = self.owner
        if len(table) == self._length:
            try:
                return (self._names, *map(table.__getitem__, self._names))
            except KeyError:
                pass
        self._names, self._length = tuple(name for name in table if name not in self._left_out), len(table)
        return (self._names, *map(table.__getitem__, self._names))

    def write(self, content: Content) -> None:
        names, *values = content
        for name in [name for name in self.owner if name not in self._left_out and name not in names]:
            del self.owner[name]
        self.owner.update(zip(names, values, strict=True))

    def objects(self, content: Content) -> Iterable[tuple[str, Any]]:
        return ((f"{self.path}.{name}".lstrip("."), value) for name, value in zip(content[0], content[1:], strict=True))


class Items(Place):
    """The items of a list, deque or set."""

    def read(self) -> Content:
        return entries_of(self.owner)

    def write(self, content: Content) -> None:
        fill(self.owner, content)


class Entry(NamedTuple):
    """The entry `name` of a table, such as the attributes of an object, and its `path`."""

    path: str
    table: dict[str, Any]
    name: str


class Entries(Place):
    """Entries of several tables. Reading one takes about 50 ns."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__("", entries)
        self._paths, self._tables, self._names = zip(*entries, strict=True)

    def read(self) -> Content:
        return tuple(map(dict.get, self._tables, self._names, repeat(ABSENT)))

    def write(self, content: Content) -> None:
        for table, name, value in zip(self._tables, self._names, content, strict=True):
            if value is ABSENT:
                table.pop(name, None)
            else:
                table[name] = value

    def objects(self, content: Content) -> Iterable[tuple[str, Any]]:
        return zip(self._paths, content, strict=True)


class Variables(Place):
    """Variables of a namespace, or data attributes of a class, by `names`. `put` and `drop` write to the namespace."""

    def __init__(
        self,
        path: str,
        owner: Any,
        namespace: Mapping[str, Any],
        names: Sequence[str],
        put: Callable[[str, Any], object],
        drop: Callable[[str], object],
    ) -> None:
        super().__init__(path, owner)
        self._namespace, self._names, self._put, self._drop = namespace, names, put, drop

    def read(self) -> Content:
        return tuple(map(self._namespace.get, self._names, repeat(ABSENT)))

    def write(self, content: Content) -> None:
        for name, value, now in zip(self._names, content, self.read(), strict=True):
            if value is not now:
                _ = self._drop(name) if value is ABSENT else self._put(name, value)

    def objects(self, content: Content) -> Iterable[tuple[str, Any]]:
        return ((f"{self.path}.{name}", value) for name, value in zip(self._names, content, strict=True))


def class_place(kind: type, names: Sequence[str]) -> Place:
    """Returns the place of the data attributes `names` of a class."""
    return Variables(kind.__name__, kind, vars(kind), names, partial(type.__setattr__, kind), partial(type.__delattr__, kind))


def globals_place(namespace: dict[str, Any], names: Sequence[str]) -> Place:
    """Returns the place of the global variables `names` of a Python module."""
    return Variables(str(namespace.get("__name__")), namespace, namespace, names, namespace.__setitem__, namespace.__delitem__)


class Slots(Place):
    """The attributes of an object of a class with `__slots__`."""

    def __init__(self, path: str, owner: Any, slots: Sequence[MemberDescriptorType]) -> None:
        super().__init__(path, owner)
        self._slots = slots

    def read(self) -> Content:
        return tuple([in_slot(slot, self.owner) for slot in self._slots])

    def write(self, content: Content) -> None:
        for slot, value in zip(self._slots, content, strict=True):
            put_in_slot(slot, self.owner, value)

    def objects(self, content: Content) -> Iterable[tuple[str, Any]]:
        return ((f"{self.path}.{slot.__name__}", value) for slot, value in zip(self._slots, content, strict=True))


class Cell(Place):
    """A variable of a closure."""

    def read(self) -> Content:
        return (content_of(self.owner),)

    def write(self, content: Content) -> None:
        put_in_cell(self.owner, content[0])

    def objects(self, content: Content) -> Iterable[tuple[str, Any]]:
        return [(self.path, content[0])]


class Numbers(Place):
    """A state that is read as one value, such as the state of a random generator. Equal values are one object."""

    def __init__(self, path: str, owner: Any, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        super().__init__(path, owner)
        self._get, self._put = get, put
        self._last: Content = ()

    def read(self) -> Content:
        value = self._get()
        if not self._last or value != self._last[0]:
            self._last = (value,)
        return self._last

    def write(self, content: Content) -> None:
        self._put(content[0])

    def objects(self, content: Content) -> Iterable[tuple[str, Any]]:
        return ()


class Elements(Place):
    """The elements of a tensor, noticed by its version: a content is the version and, of a small tensor without a graph, a copy."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        super().__init__(path, tensor)
        self._is_copied = is_plain(tensor) and not tensor.requires_grad and tensor.numel() * tensor.element_size() <= LARGEST
        self._last: Content = ()

    def read(self) -> Content:
        with torch._C.DisableTorchFunctionSubclass():  # a released tensor refuses other uses
            version = self.owner._version
            if not self._last or version != self._last[0]:
                self._last = version, self.owner.detach().clone() if self._is_copied else None
        return self._last

    def write(self, content: Content) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if content[0] != self.owner._version:
                self.owner.copy_(self.copy_in(content))

    def copy_in(self, content: Content) -> Tensor:
        """Returns the elements of an earlier content. Raises `InputError` if they were not copied."""
        elements: Tensor | None = content[1]
        if elements is None:
            raise self.lost()
        return elements

    def lost(self) -> InputError:
        """Returns the error for elements that cannot be put back."""
        return InputError(
            "a forward changes {place} in place, a {shape} {dtype}, and what was there before is lost",
            place=self.path,
            shape=tuple(self.owner.shape),
            dtype=str(self.owner.dtype),
            remedy="assign a new tensor to an attribute, or keep it in a buffer (register_buffer)",
        )

    def objects(self, content: Content) -> Iterable[tuple[str, Any]]:
        return ()


class Position(Place):
    """The position of an iterator, which cannot be put back."""

    def __init__(self, path: str, iterator: Any) -> None:
        super().__init__(path, iterator)
        self._last: Content = ()

    def read(self) -> Content:
        now = _position(self.owner)
        if len(now) != len(self._last) or not all(map(_is_same_value, now, self._last)):
            self._last = now
        return self._last

    def write(self, content: Content) -> None:
        kind = type(self.owner).__name__
        message = "a forward advances {place}, a {kind}, which cannot be taken back"
        raise InputError(message, place=self.path, kind=kind, remedy="keep a number or a list instead")

    def objects(self, content: Content) -> Iterable[tuple[str, Any]]:
        return ((self.path, value) for value in content if is_a(value, (Iterator, tuple)))


def _is_same_value(now: Any, other: Any) -> bool:
    return now is other or (isinstance(now, (int, str)) and bool(now == other))


def _position(iterator: Any) -> Content:
    if isinstance(iterator, itertools.count):
        return (repr(iterator),)
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return () if frame is None else (frame.f_lasti, *gc.get_referents(iterator))
    return (length_hint(iterator, -1), *gc.get_referents(iterator))


class GeneratorState(Numbers):
    """The state of a random generator, as a Python literal."""

    @cached_property
    def mark(self) -> Callable[[], Any]:
        """Returns a value that differs after a draw, much faster than `read`. NumPy's second normal number of a pair moves nothing."""
        words = _words_of(self.owner)
        if words is None:
            return self._get
        return lambda: (bytes(words), getattr(self.owner, "gauss_next", None))


def _words_of(generator: Any) -> Any:
    """Returns the memory of a Mersenne Twister of Python or NumPy, None for others. It takes 0.2 us to read; `getstate` takes 12 us."""
    if isinstance(generator, random.Random):
        words = (ctypes.c_uint32 * _WORDS).from_address(id(generator) + object.__basicsize__)
        index, *state = words
        return words if (*state, index) == generator.getstate()[1] else None
    bits: Any = getattr(generator, "_bit_generator", None)
    return (ctypes.c_uint32 * _WORDS).from_address(bits.ctypes.state_address) if type(bits).__name__ == "MT19937" else None


_WORDS = 625
"""The words of a Mersenne Twister, and the place in them."""


def generator_place(path: str, value: Any) -> GeneratorState | None:
    """Returns the place of the state of a random generator of torch, Python or NumPy; None for any other object."""
    if isinstance(value, torch.Generator):
        return GeneratorState(path, value, lambda: value.get_state().numpy().tobytes(), lambda state: value.set_state(_as_state(state)))
    if isinstance(value, random.Random):
        return GeneratorState(path, value, value.getstate, value.setstate)
    if not type(value).__module__.startswith("numpy.random"):
        return None
    if hasattr(value, "get_state"):
        return GeneratorState(path, value, lambda: in_bytes(value.get_state()), lambda state: value.set_state(_with_words(state)))
    bits = getattr(value, "bit_generator", None)
    return (
        None
        if bits is None
        else GeneratorState(path, value, lambda: _with_bytes(bits.state), lambda state: setattr(bits, "state", _with_arrays(state)))
    )


def _with_bytes(state: Any) -> Any:
    """Returns a state of NumPy with the type and the bytes of each array."""
    if isinstance(state, dict):
        return {name: _with_bytes(value) for name, value in state.items()}
    return (state.dtype.str, state.tobytes()) if hasattr(state, "tobytes") else state


def _with_arrays(state: Any) -> Any:
    """Returns the state from the result of `_with_bytes`."""
    if isinstance(state, dict):
        return {name: _with_arrays(value) for name, value in state.items()}
    return sys.modules["numpy"].frombuffer(state[1], dtype=state[0]) if isinstance(state, tuple) else state


def _with_words(state: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, words, *rest = state
    return kind, sys.modules["numpy"].frombuffer(words, dtype="uint32"), *rest


def _as_state(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def array_place(path: str, array: Any) -> Place | None:
    """Returns the place of the bytes of a small, writable object with the buffer protocol; None for any other object."""
    try:
        with memoryview(array) as memory:  # a view that is kept would forbid the owner to resize the array
            if memory.readonly or memory.nbytes > LARGEST:
                return None
            memory.tobytes()
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None
    return Numbers(path, array, lambda: memoryview(array).tobytes(), lambda content: put_in_array(array, content))


def container_place(path: str, value: Any) -> Place | None:
    """Returns the place of the entries of a dict, list, deque or set; None for any other object."""
    if is_a(value, dict):
        return DictPlace(path, value)
    return Items(path, value) if is_a(value, (list, deque, set)) else None


def file_place(path: str, value: Any) -> Place | None:
    """Returns the place of the position in a file that is only read; None for any other object."""
    is_read = is_a(value, io.IOBase) and not value.closed and value.readable() and not value.writable() and value.seekable()
    return Numbers(path, value, partial(_offset, value), partial(_seek, value)) if is_read else None


def _offset(file: Any) -> int | None:
    try:
        return int(file.seek(0, io.SEEK_CUR))
    except OSError:  # while a loop reads its lines
        return None


def _seek(file: Any, offset: int | None) -> None:
    if offset is not None:
        file.seek(offset)


def iterator_place(path: str, value: Any) -> Place | None:
    """Returns the place of the position of an iterator of Python, such as a generator, a count or a cycle; None for any other object."""
    is_of_python = type(value).__module__ in ("builtins", "itertools") and is_a(value, Iterator)
    return Position(path, value) if is_of_python else None
