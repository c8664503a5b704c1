"""Sends values that user code keeps to other ranks: numbers, texts, small tensors and arrays, and containers and objects of these.

An object of a user's class is written as its attributes. The receiver makes one of the class of the object that it holds in the same place,
or of a class that it has imported; no code of the class runs.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from copy import copy
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.runtime.values.python_objects import NAMESPACES, is_of_library
from zerobubble.runtime.values.stored import ABSENT, attributes_of, base_of, entries_of, in_slot, is_a, items_of, put_in_slot, slots_of

ATOMS = (bool, int, float, complex, str, bytes, type(None))
"""Types of values that are sent as they are."""
MOST_SHARED = 4096
"""The largest number of elements of a shared tensor or array, and of entries of a shared container."""
DEPTH = 8
_BASES: dict[str, Any] = {kind.__name__: kind for kind in (OrderedDict, dict, list, tuple, set, frozenset, deque)}
"""Built-in classes of containers, by name."""
_PLAIN = (*_BASES.values(), Counter)
"""Classes of containers that are made of their entries."""
CONTAINERS = tuple(_BASES.values())
_CODE = (FunctionType, MethodType, ModuleType)
_CONTAINER, _OBJECT, _TENSOR, _ARRAY = "container", "object", "tensor", "array"


def is_array(value: Any) -> bool:
    """Returns whether `value` is an array or a number of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and is_a(value, (numpy.ndarray, numpy.generic))


def is_object(value: Any) -> bool:
    """Returns whether `value` is an object of a user's class that only keeps attributes."""
    kind = type(value)
    if kind not in NAMESPACES and (is_of_library(kind.__module__) or is_a(value, (nn.Module, Tensor, type, *CONTAINERS, *_CODE))):
        return False
    return _table_of(value) is not None or bool(slots_of(kind))


def _table_of(value: Any) -> dict[str, Any] | None:
    return vars(value) if type(value) in NAMESPACES else attributes_of(value)


def attributes_in(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, including attributes in slots."""
    slots = {slot.__name__: in_slot(slot, value) for slot in slots_of(type(value))}
    return {**(_table_of(value) or {}), **{name: held for name, held in slots.items() if held is not ABSENT}}


def put_attribute(value: Any, name: str, content: Any) -> None:
    """Sets an attribute of an object, also of a frozen one; deletes it if `content` is `ABSENT`."""
    slot = next((slot for slot in slots_of(type(value)) if slot.__name__ == name), None)
    attributes = _table_of(value)
    if slot is not None:
        put_in_slot(slot, value, content)
    elif attributes is not None and content is ABSENT:
        attributes.pop(name, None)
    elif attributes is not None:
        attributes[name] = content


def sent(value: Any, depth: int = DEPTH) -> Any:
    """Returns `value` as a kind and its contents, None if it is not shared."""
    if type(value) in ATOMS:
        return "", value
    if is_a(value, Tensor):
        is_small = value.numel() <= MOST_SHARED and value.layout is torch.strided
        return (_TENSOR, (value.dtype, tuple(value.shape), value.detach().flatten().tolist())) if is_small else None
    if is_array(value):
        return (
            (_ARRAY, (value.dtype.str, value.shape, value.tolist())) if value.size <= MOST_SHARED and value.dtype.kind in "biufc" else None
        )
    if is_a(value, CONTAINERS):
        return _sent_container(value, depth)
    return _sent_object(value, depth) if is_object(value) else None


def _sent_container(value: Any, depth: int) -> Any:
    entries = [part for item in items_of(value) for part in item] if is_a(value, dict) else list(entries_of(value))
    inside = _all_sent(entries, depth)
    if inside is None:
        return None
    maxlen = value.maxlen if is_a(value, deque) else None
    return _CONTAINER, (base_of(value).__name__, _name_of(type(value)), maxlen, inside)


def _sent_object(value: Any, depth: int) -> Any:
    attributes = attributes_in(value)
    inside = _all_sent(attributes.values(), depth)
    return None if inside is None else (_OBJECT, (_name_of(type(value)), list(attributes), inside))


def _all_sent(values: Iterable[Any], depth: int) -> list[Any] | None:
    values = list(values)
    inside = [sent(entry, depth - 1) for entry in values] if depth and len(values) <= 2 * MOST_SHARED else [None]
    return None if None in inside else inside


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


class UnknownObjectError(LookupError):
    """An object was sent that this rank neither holds nor can make."""


def received(contents: Any, like: Any = None) -> Any:
    """Returns the value that was sent, as a new object. It has the classes of `like`, which this rank holds in the same place.

    Raises `UnknownObjectError` for an object of a class that this rank neither holds there nor has imported.
    """
    kind, contents = contents
    if kind == "":
        return contents
    if kind == _TENSOR:
        dtype, shape, numbers = contents
        return torch.tensor(numbers, dtype=dtype, device=like.device if is_a(like, Tensor) else None).reshape(shape)
    if kind == _ARRAY:
        dtype, shape, numbers = contents
        array = sys.modules["numpy"].array(numbers, dtype=dtype).reshape(shape)
        return array if shape else array[()]
    if kind == _OBJECT:
        name, names, inside = contents
        return _received_object(name, names, inside, like)
    base_name, name, maxlen, inside = contents
    return _received_container(base_name, name, maxlen, inside, like)


def _received_container(base_name: str, name: str, maxlen: int | None, inside: list[Any], like: Any) -> Any:
    base = _BASES[base_name]
    is_dict = issubclass(base, dict)
    entries = _items_like(inside, like) if is_dict else _entries_like(inside, like)
    kind = next((kind for kind in _PLAIN if _name_of(kind) == name), None)
    if kind is deque:
        return deque(entries, maxlen)
    if kind is not None:
        return kind(dict(entries) if is_dict else entries)
    if base is tuple:
        return tuple.__new__(_class_of(name), entries)
    if _name_of(type(like)) != name:
        raise UnknownObjectError(name)
    return _filled(copy(like), entries)


def _items_like(inside: list[Any], like: Any) -> list[Any]:
    before = dict(items_of(like)) if is_a(like, dict) else {}
    pairs = [(received(key), part) for key, part in zip(inside[::2], inside[1::2], strict=True)]
    return [(key, received(part, before.get(key))) for key, part in pairs]


def _entries_like(inside: list[Any], like: Any) -> list[Any]:
    before = entries_of(like) if is_a(like, (list, tuple, deque)) else ()
    return [received(part, before[place] if place < len(before) else None) for place, part in enumerate(inside)]


def _received_object(name: str, names: list[str], inside: list[Any], like: Any) -> Any:
    is_like = _name_of(type(like)) == name
    kind: Any = type(like) if is_like else _class_of(name)
    if kind.__new__ is not object.__new__ and kind not in NAMESPACES:
        raise UnknownObjectError(name)
    value, before = kind.__new__(kind), attributes_in(like) if is_like else {}
    for attribute, contents in zip(names, inside, strict=True):
        put_attribute(value, attribute, received(contents, before.get(attribute)))
    return value


def _class_of(name: str) -> type:
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, type) or _name_of(value) != name or is_of_library(module):
        raise UnknownObjectError(name)
    return value


def with_contents(held: Any, value: Any) -> Any:
    """Returns `held` with the contents of `value` if both are of one kind that can change in place, else `value`."""
    if type(held) is not type(value):
        return value
    if is_a(held, (list, deque, set)):
        return _filled(held, entries_of(value))
    if is_a(held, dict):
        return _filled(held, list(items_of(value)))
    if isinstance(held, Tensor) and held.shape == value.shape and held.dtype == value.dtype and not held.requires_grad:
        held.copy_(value)
    elif is_object(held) or (not isinstance(held, (Tensor, tuple, frozenset)) and hasattr(held, "__dict__")):
        now = attributes_in(value)
        for name in {**attributes_in(held), **now}:
            put_attribute(held, name, now.get(name, ABSENT))
    else:
        return value
    return held


def _filled(held: Any, entries: Any) -> Any:
    """Fills a container with these entries; a dict with these items."""
    base = base_of(held)
    base.clear(held)
    if is_a(held, dict):
        for key, value in entries:
            base.__setitem__(held, key, value)
    else:
        _ = base.extend(held, entries) if base in (list, deque) else base.update(held, entries)
    return held
