"""Types of compiled values, and values as lists of machine words: numbers, arrays, records of arrays, and tuples of all these."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np


class Scalar(Enum):
    """A number, by its name in LLVM."""

    INT = "i64"
    FLOAT = "double"
    BOOL = "i1"


@dataclass(frozen=True)
class Array:
    """A contiguous array: a pointer, then its lengths."""

    dtype: np.dtype[Any]
    ndim: int


@dataclass(frozen=True)
class Record:
    """A reference to one element of an array with named fields. Writing to it changes the array."""

    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Several:
    """A tuple, with names if it is a named one."""

    parts: tuple[Type, ...]
    names: tuple[str, ...] = ()


Type = Scalar | Array | Record | Several

ELEMENTS = {np.dtype(np.int64): "i64", np.dtype(np.float64): "double", np.dtype(np.uint8): "i8"}
"""Element types of arrays and of fields, with their LLVM types."""


class Value(NamedTuple):
    """A value that is known only at run time: its type, and the names of its words in LLVM."""

    type: Type
    words: tuple[str, ...]


class Known(NamedTuple):
    """A compile-time constant, such as a number, a function or a module."""

    value: Any


class NotCompiledError(Exception):
    """A kernel uses a feature that this compiler does not support. The message names the line."""


def words_of(kind: Type) -> Iterator[str]:
    """The LLVM types of the words of a value."""
    if isinstance(kind, Scalar):
        yield kind.value
    elif isinstance(kind, Several):
        for part in kind.parts:
            yield from words_of(part)
    else:
        yield "ptr"
        if isinstance(kind, Array):
            yield from ["i64"] * kind.ndim


def part_of(value: Value, at: int) -> Value:
    """A part of a tuple."""
    assert isinstance(value.type, Several)
    before = sum(1 for part in value.type.parts[:at] for _ in words_of(part))
    part = value.type.parts[at]
    return Value(part, value.words[before : before + sum(1 for _ in words_of(part))])


def joined(values: list[Value]) -> Value:
    """The tuple of some values."""
    return Value(Several(tuple(value.type for value in values)), tuple(word for value in values for word in value.words))


def unified(one: Type, other: Type) -> Type | None:
    """Returns the common type of both; None if there is none."""
    if one == other:
        return one
    if isinstance(one, Scalar) and isinstance(other, Scalar):
        return Scalar.FLOAT if Scalar.FLOAT in (one, other) else Scalar.INT
    if isinstance(one, Several) and isinstance(other, Several) and len(one.parts) == len(other.parts):
        parts = [unified(*pair) for pair in zip(one.parts, other.parts, strict=True)]
        if all(part is not None for part in parts):
            return Several(tuple(part for part in parts if part is not None), one.names if one.names == other.names else ())
    return None


def constant(value: Any) -> Value | None:
    """A number or a tuple of numbers as a value; None for anything else."""
    if isinstance(value, (bool, np.bool_)):
        return Value(Scalar.BOOL, ("true" if value else "false",))
    if isinstance(value, (int, np.integer)):
        return Value(Scalar.INT, (str(int(value)),))
    if isinstance(value, (float, np.floating)):
        return Value(Scalar.FLOAT, (f"0x{struct.unpack('>Q', struct.pack('>d', float(value)))[0]:016X}",))
    if isinstance(value, tuple):
        parts = [constant(part) for part in value]
        return None if None in parts else joined([part for part in parts if part is not None])
    return None
