"""Writes the lines of a function in LLVM: values, their words, and addresses in arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from zerobubble.planning.kernels.native.values import (
    ELEMENTS,
    Array,
    Known,
    NotCompiledError,
    Record,
    Scalar,
    Several,
    Type,
    Value,
    constant,
    joined,
    part_of,
    unified,
    words_of,
)

INT, FLOAT, BOOL = Scalar.INT, Scalar.FLOAT, Scalar.BOOL


class Source(NamedTuple):
    """The Python function of a kernel, and whether every call of it is inlined."""

    function: Callable[..., Any]
    is_inlined: bool


class Emitted(NamedTuple):
    """A function in LLVM: its name and the type of its result."""

    name: str
    result: Type


class ModuleText(Protocol):
    """The module that a function is written into."""

    arrays: dict[int, str]
    intrinsics: set[str]
    source_of: Callable[[Any], Source | None]

    def emitted(self, source: Source, given: Sequence[Type]) -> Emitted:
        """Returns the function for arguments of these types, and writes it first if it does not exist."""


class Lines:
    """The lines that a walk over a function writes."""

    def __init__(self, module: ModuleText, function: Callable[..., Any]) -> None:
        self.module, self.function = module, function
        self.lines: list[str] = []
        self.allocas: list[str] = []
        self.label, self.is_ended, self.has_returned, self.line = "begin", False, False, 0
        self._names = 0

    # Lines

    def new_name(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def new_label(self) -> str:
        self._names += 1
        return f"b{self._names}"

    def put(self, text: str) -> str:
        """Writes an instruction. Returns the name of its value."""
        name = self.new_name()
        self.lines.append(f"  {name} = {text}")
        return name

    def alloca(self, kind: str) -> str:
        """Allocates a variable, which LLVM keeps in a register."""
        name = self.new_name()
        self.allocas.append(f"  {name} = alloca {kind}")
        return name

    def begin(self, label: str) -> None:
        """Continues with the block of this name."""
        self.lines.append(f"{label}:")
        self.label, self.is_ended = label, False

    def end(self, text: str) -> None:
        """End the block."""
        self.lines.append(f"  {text}")
        self.is_ended = True

    def end_if_open(self, text: str) -> None:
        """End the block unless it has ended."""
        if not self.is_ended:
            self.end(text)

    def fault(self, what: str) -> NotCompiledError:
        """Returns the error for this line."""
        return NotCompiledError(f"{self.function.__code__.co_filename}:{self.line}: {what}")

    def llvm_result(self, kind: Type) -> str:
        """Returns the LLVM type of a function's result."""
        words = list(words_of(kind))
        return "void" if not words else words[0] if len(words) == 1 else "{" + ", ".join(words) + "}"

    # Values

    def as_value(self, given: Value | Known) -> Value:
        """A number, tuple or array of the module as a value at run time."""
        if isinstance(given, Value):
            return given
        if isinstance(given.value, np.ndarray):
            return self._global_array(given.value)
        found = constant(given.value)
        if found is None:
            raise self.fault(f"{given.value!r} is no value")
        return found

    def _global_array(self, array: np.ndarray[Any, Any]) -> Value:
        name, word = f"@array.{id(array)}", ELEMENTS[array.dtype]
        parts = [constant(each) for each in array.ravel().tolist()]
        written = ", ".join(f"{word} {part.words[0]}" for part in parts if part is not None)
        self.module.arrays[id(array)] = f"{name} = internal constant [{array.size} x {word}] [{written}]"
        return Value(Array(array.dtype, array.ndim), (name, *map(str, array.shape)))

    def fitted(self, value: Value, kind: Type) -> Value:
        """Converts a value to a wider type."""
        if value.type == kind:
            return value
        if isinstance(kind, Several) and isinstance(value.type, Several):
            parts = [self.fitted(part_of(value, at), part) for at, part in enumerate(kind.parts)]
            return Value(kind, joined(parts).words)
        word = value.words[0]
        if kind is FLOAT:
            return Value(FLOAT, (self.put(f"{'sitofp i64' if value.type is INT else 'uitofp i1'} {word} to double"),))
        if kind is INT and value.type is BOOL:
            return Value(INT, (self.put(f"zext i1 {word} to i64"),))
        return Value(kind, tuple("undef" for _ in words_of(kind)))  # only in a walk that is repeated

    # Arrays

    def field(self, record: Value, name: str) -> tuple[str, str]:
        """The address of a field of a record, and its LLVM type."""
        assert isinstance(record.type, Record)
        assert record.type.dtype.fields is not None
        kind, offset = record.type.dtype.fields[name][:2]
        return self.put(f"getelementptr i8, ptr {record.words[0]}, i64 {offset}"), ELEMENTS[kind]

    def read(self, place: str, kind: str | Record) -> Value:
        """Returns the value at an address."""
        if isinstance(kind, Record):
            return Value(kind, (place,))
        if kind == "i8":
            return Value(INT, (self.put(f"zext i8 {self.put(f'load i8, ptr {place}, align 1')} to i64"),))
        return Value(INT if kind == "i64" else FLOAT, (self.put(f"load {kind}, ptr {place}, align 8"),))

    def write(self, place: str, kind: str | Record, value: Value) -> None:
        """Stores a value at an address, or all fields of a record."""
        if isinstance(kind, Record):
            for at in range(0, kind.dtype.itemsize, 8):
                from_there, to_here = (self.put(f"getelementptr i8, ptr {each}, i64 {at}") for each in (value.words[0], place))
                self.lines.append(f"  store i64 {self.put(f'load i64, ptr {from_there}, align 8')}, ptr {to_here}, align 8")
        elif kind == "i8":
            self.lines.append(f"  store i8 {self.put(f'trunc i64 {self.fitted(value, INT).words[0]} to i8')}, ptr {place}, align 1")
        else:
            wanted = INT if kind == "i64" else FLOAT
            if unified(value.type, wanted) is not wanted:
                raise self.fault(f"{value.type} is written to an array of {kind}")
            self.lines.append(f"  store {kind} {self.fitted(value, wanted).words[0]}, ptr {place}, align 8")

    def place_in(self, array: Value, at: Sequence[Value]) -> tuple[str, np.dtype[Any]]:
        """Returns the address of an element, or of the first element of a row, and the type of the elements."""
        assert isinstance(array.type, Array)
        if array.type.ndim > 2 or len(at) > array.type.ndim:
            raise self.fault("arrays have one or two axes")
        place = at[0].words[0]
        if array.type.ndim == 2:
            place = self.put(f"mul nsw i64 {place}, {array.words[2]}")
            if len(at) == 2:
                place = self.put(f"add nsw i64 {place}, {at[1].words[0]}")
        size = array.type.dtype.itemsize
        offset = place if size == 1 else self.put(f"mul nsw i64 {place}, {size}")
        return self.put(f"getelementptr i8, ptr {array.words[0]}, i64 {offset}"), array.type.dtype

    def element(self, array: Value, *at: Value) -> Value:
        """Returns an element of an array, or a row of an array with two axes."""
        assert isinstance(array.type, Array)
        place, kind = self.place_in(array, at)
        if len(at) < array.type.ndim:
            return Value(Array(kind, 1), (place, array.words[2]))
        return self.read(place, Record(kind) if kind.names else ELEMENTS[kind])
