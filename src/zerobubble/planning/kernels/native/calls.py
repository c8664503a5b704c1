"""Kernels in Python: functions that are compiled for the types of their arguments at the first call with them."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import RLock, local
from typing import Any

import numpy as np

from zerobubble.planning.kernels.native import random_numbers
from zerobubble.planning.kernels.native.emit import Module
from zerobubble.planning.kernels.native.expressions import takes
from zerobubble.planning.kernels.native.lines import Source
from zerobubble.planning.kernels.native.machine import loaded, processor
from zerobubble.planning.kernels.native.values import ELEMENTS, Array, Scalar, Several, Type, words_of

_LOCK = RLock()

_THREAD = local()

_KINDS: dict[tuple[Any, ...], tuple[Any, Type]] = {}
"""One object for each type seen, with the objects whose ids are its key, so that they stay alive."""


class Kernel:
    """A function that is compiled. Its arguments are numbers, contiguous arrays, and tuples of these. A tuple adds no words of its own."""

    def __init__(self, function: Callable[..., Any], is_inlined: bool = False) -> None:
        self.python, self.is_inlined = function, is_inlined
        self.__wrapped__, self.__doc__, self.__name__, self.__module__ = function, function.__doc__, function.__name__, function.__module__
        self._entries: dict[tuple[int, ...], _Entry] = {}

    def __call__(self, *given: Any) -> Any:
        kinds = [type_of(each) for each in given]
        key = tuple(map(id, kinds))
        entry = self._entries.get(key)
        if entry is None:
            with _LOCK:
                entry = self._entries[key] = _Entry(self.python, tuple(kinds))
        return entry(_random_state(), *given)


class _Entry:
    """A kernel for some types of arguments, compiled or loaded."""

    def __init__(self, function: Callable[..., Any], given: tuple[Type, ...]) -> None:
        random = type_of(_random_state())
        seen = "\n".join([processor(), _compiler(), repr(given), *_fingerprint(function)])
        key = hashlib.sha256(seen.encode()).hexdigest()[:32]
        name = f"entry_{key}"

        def made() -> tuple[str, str]:
            module = Module(random, source_of)
            wanted = takes(function, given)
            emitted = module.emitted(Source(function, False), wanted)
            return f"{module.text()}\n{_entry(name, emitted.name, emitted.result, random, given, wanted)}", _shape(emitted.result)

        address, shape = loaded(name, key, made)
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address)
        self._shape = json.loads(shape)
        self._size = sum(1 for kind in (random, *given) for _ in words_of(kind))

    def __call__(self, *given: Any) -> Any:
        words, results = np.empty(self._size, np.int64), np.zeros(8, np.int64)
        filled = _fill(words, words.view(np.float64), 0, given)
        assert filled == self._size
        self._call(words.__array_interface__["data"][0], results.__array_interface__["data"][0])
        return _read(self._shape, results, results.view(np.float64), [0])


def type_of(given: Any) -> Type:
    """The type of an argument; the same object for equal types."""
    if isinstance(given, np.ndarray):
        key: tuple[Any, ...] = (id(given.dtype), given.ndim)
        if key not in _KINDS:
            assert given.dtype in ELEMENTS or given.dtype.names, f"no kernel takes arrays of {given.dtype}"
            _KINDS[key] = given.dtype, _one(Array(given.dtype, given.ndim))
        return _KINDS[key][1]
    if isinstance(given, tuple):
        parts = [type_of(each) for each in given]
        key = (type(given), *map(id, parts))
        if key not in _KINDS:
            _KINDS[key] = parts, _one(Several(tuple(parts), getattr(given, "_fields", ())))
        return _KINDS[key][1]
    if isinstance(given, (bool, np.bool_)):
        return Scalar.BOOL
    if isinstance(given, (int, np.integer)):
        return Scalar.INT
    assert isinstance(given, (float, np.floating)), f"no kernel takes {given!r}"
    return Scalar.FLOAT


def _one(kind: Type) -> Type:
    """Returns the first object seen among equal types."""
    return _KINDS.setdefault((kind,), (kind, kind))[1]


def _fill(words: Any, floats: Any, at: int, given: tuple[Any, ...]) -> int:
    """Writes the words of some values from an index on. Returns the index after them."""
    for each in given:
        if isinstance(each, np.ndarray):
            assert each.flags.c_contiguous, "kernels take contiguous arrays"
            words[at] = each.__array_interface__["data"][0]
            for size in each.shape:
                at += 1
                words[at] = size
        elif isinstance(each, tuple):
            at = _fill(words, floats, at, each)
            continue
        elif isinstance(each, (float, np.floating)):
            floats[at] = each
        else:
            words[at] = each
        at += 1
    return at


def _shape(kind: Type) -> str:
    """A text form of a kernel's result: numbers, or tuples of them."""
    if isinstance(kind, Several):
        return f"[{', '.join(map(_shape, kind.parts))}]"
    assert isinstance(kind, Scalar), "kernels give numbers to Python"
    return f'"{kind.value}"'


def _read(shape: Any, words: Any, floats: Any, place: list[int]) -> Any:
    """Returns the numbers of the result in their tuples; None for an empty tuple."""
    if isinstance(shape, list):
        return tuple([_read(part, words, floats, place) for part in shape]) if shape else None
    at = place[0]
    place[0] += 1
    return float(floats[at]) if shape == "double" else bool(words[at]) if shape == "i1" else int(words[at])


def _entry(name: str, called: str, result: Type, random: Type, given: tuple[Type, ...], wanted: tuple[Type, ...]) -> str:
    """Returns the LLVM text of the function that Python calls: it reads the words of the arguments and writes those of the result."""
    lines = [f"define void @{name}(ptr %words, ptr %results) {{"]
    arguments, at = list[str](), 0
    have = [word for kind in (random, *given) for word in words_of(kind)]
    need = [word for kind in (random, *wanted) for word in words_of(kind)]
    for at, (word, type_) in enumerate(zip(have, need, strict=True)):
        lines.append(f"  %p{at} = getelementptr i8, ptr %words, i64 {8 * at}")
        lines.append(f"  %w{at} = load {'i64' if word == 'i1' else word}, ptr %p{at}, align 8")
        if word == "i1":
            lines.append(f"  %b{at} = icmp ne i64 %w{at}, 0")
        value = f"%b{at}" if word == "i1" else f"%w{at}"
        if word != type_:
            how = {("i64", "double"): "sitofp", ("i1", "double"): "uitofp", ("i1", "i64"): "zext"}[word, type_]
            lines.append(f"  %c{at} = {how} {word} {value} to {type_}")
            value = f"%c{at}"
        arguments.append(f"{type_} {value}")
    kinds = list(words_of(result))
    kind = "void" if not kinds else kinds[0] if len(kinds) == 1 else "{" + ", ".join(kinds) + "}"
    lines.append(f"  {'%r = ' if kinds else ''}call {kind} @{called}({', '.join(arguments)})")
    for at, word in enumerate(kinds):
        value = "%r" if len(kinds) == 1 else f"%r{at}"
        if len(kinds) > 1:
            lines.append(f"  %r{at} = extractvalue {kind} %r, {at}")
        if word == "i1":
            lines.append(f"  %z{at} = zext i1 {value} to i64")
            word, value = "i64", f"%z{at}"
        lines += [f"  %o{at} = getelementptr i8, ptr %results, i64 {8 * at}", f"  store {word} {value}, ptr %o{at}, align 8"]
    return "\n".join([*lines, "  ret void", "}"])


def source_of(given: Any) -> Source | None:
    """Returns the Python function of a kernel or of a random-number function."""
    if isinstance(given, Kernel):
        return Source(given.python, given.is_inlined)
    if getattr(given, "__module__", "") == random_numbers.__name__:
        return Source(given, False)
    return None


@cache
def _compiler() -> str:
    """A digest of the compiler itself."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _fingerprint(function: Callable[..., Any], seen: set[str] | None = None) -> Iterator[str]:
    """The source of a function and of all kernels that it names, with the numbers that they name."""
    seen = set() if seen is None else seen
    code = function.__code__
    yield f"{function.__qualname__} {code.co_code.hex()} {code.co_consts!r} {code.co_names} {code.co_varnames} {function.__annotations__}"
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, Kernel):
            if name not in seen:
                seen.add(name)
                yield f"{value.is_inlined}"
                yield from _fingerprint(value.python, seen)
        elif isinstance(value, (bool, int, float, tuple)):
            yield f"{name} {value!r}"
        elif isinstance(value, np.ndarray):
            yield f"{name} {value.tolist()} {value.dtype}"


def _random_state() -> random_numbers.RandomState:
    """The random numbers of this thread."""
    if not hasattr(_THREAD, "state"):
        _THREAD.state = random_numbers.new_state()
    state: random_numbers.RandomState = _THREAD.state
    return state
