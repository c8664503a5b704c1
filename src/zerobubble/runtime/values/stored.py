"""Reads and writes what objects store, by the methods of their built-in classes: subclasses may compute, insert or import on access."""

from __future__ import annotations

import gc
import itertools
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from types import CellType, GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import Any, TypeAlias

ABSENT = object()
"""Marks a missing variable or attribute."""

Table: TypeAlias = Any
"""A dict, a list, a set, a deque, a tuple, or a read-only view of a dict."""

_DICTS: tuple[Any, ...] = (OrderedDict, dict)
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque)


def is_a(value: Any, kinds: Any) -> bool:
    """Returns whether the type of an object is one of `kinds`, whatever the object claims in `__class__`."""
    return issubclass(type(value), kinds)


def base_of(table: Table) -> Any:
    """Returns the built-in class of a container."""
    return next(kind for kind in (*_DICTS, *_SEQUENCES) if is_a(table, kind))


def is_mapping(table: Table) -> bool:
    """Returns whether a container is a dict, or a view of one."""
    return is_a(table, (dict, MappingProxyType))


def behind(table: Table) -> Table:
    """Returns the dict behind a read-only view, any other container itself."""
    return behind(gc.get_referents(table)[0]) if type(table) is MappingProxyType else table


def num_entries(table: Table) -> int:
    """Returns the number of stored entries."""
    table = behind(table)
    return int(base_of(table).__len__(table)) if is_a(table, (*_DICTS, *_SEQUENCES)) else len(table)


def items_of(mapping: Table) -> Iterable[tuple[Any, Any]]:
    """Returns the stored items of a dict, in its order."""
    mapping = behind(mapping)
    items: Iterable[tuple[Any, Any]] = base_of(mapping).items(mapping) if is_a(mapping, dict) else mapping.items()
    return items


def entries_of(table: Table) -> tuple[Any, ...]:
    """Returns the stored keys and values of a dict, or the entries of another container."""
    table = behind(table)
    if is_a(table, dict):
        base = base_of(table)
        return (*base.keys(table), *base.values(table))
    return tuple(base_of(table).__iter__(table)) if is_a(table, _SEQUENCES) else (*table, *table.values())


def entry(table: Table, key: Any) -> Any:
    """Returns the stored entry of a dict or a list, `ABSENT` if there is none."""
    if is_a(table, dict):
        return dict.get(table, key, ABSENT)
    return list.__getitem__(table, key) if key < list.__len__(table) else ABSENT


def put(table: Table, key: Any, value: Any) -> None:
    """Stores an entry in a dict or a list."""
    base_of(table).__setitem__(table, key, value)


def copy_of(table: Table) -> Any:
    """Returns the stored contents, as a plain dict or a tuple."""
    return dict(items_of(table)) if is_mapping(table) else entries_of(table)


def fill(table: Table, content: Any) -> None:
    """Restores the contents that `copy_of` returned, if other objects are stored now."""
    if is_same(table, content):
        return
    base = base_of(table)
    base.clear(table)
    if base is OrderedDict:
        for key, value in content.items():
            base.__setitem__(table, key, value)
    elif base in (list, deque):
        base.extend(table, content)
    else:
        base.update(table, content)


def is_same(table: Table, content: Any) -> bool:
    """Returns whether a container stores the same objects as `content`, in the same order."""
    now, before = entries_of(table), entries_of(content)
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the `__dict__` of an object, without asking its class for attributes; None if it has none."""
    for kind in type(value).__mro__:
        descriptor = vars(kind).get("__dict__")
        if isinstance(descriptor, (GetSetDescriptorType, MemberDescriptorType)):  # the latter of SimpleNamespace
            attributes = descriptor.__get__(value)
            return attributes if isinstance(attributes, dict) else None
    return None


def slots_of(kind: type) -> list[MemberDescriptorType]:
    """Returns the descriptors that a class and its bases declare in `__slots__`."""
    declaring = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [member for names in declaring for member in names.values() if type(member) is MemberDescriptorType]


def in_slot(slot: MemberDescriptorType, value: Any) -> Any:
    """Returns what an object stores in a slot, `ABSENT` if nothing."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return ABSENT


def put_in_slot(slot: MemberDescriptorType, value: Any, content: Any) -> None:
    """Stores an object's attribute in a slot."""
    if content is not ABSENT:
        slot.__set__(value, content)
    elif in_slot(slot, value) is not ABSENT:
        slot.__delete__(value)


def content_of(cell: CellType) -> Any:
    """Returns the value of a closure variable, `ABSENT` if it is unbound."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return ABSENT


def put_in_cell(cell: CellType, content: Any) -> None:
    """Binds a closure variable."""
    if content is not ABSENT:
        cell.cell_contents = content
    elif content_of(cell) is not ABSENT:
        del cell.cell_contents


def put_in_class(kind: type, content: dict[str, Any]) -> None:
    """Restores the attributes of a class, except Python's own, such as the `__annotations__` that a first access creates."""
    for name in {**vars(kind), **content}:
        before, now = content.get(name, ABSENT), vars(kind).get(name, ABSENT)
        if before is now or (name.startswith("__") and name.endswith("__")):
            continue
        if before is ABSENT:
            type.__delattr__(kind, name)
        else:
            type.__setattr__(kind, name, before)


def put_in_array(values: Any, content: bytes) -> None:
    """Restores the bytes of an object with the buffer protocol."""
    with memoryview(values) as now:
        if now.readonly or now.tobytes() == content:
            return
        if now.nbytes == len(content):
            _overwrite(now, content)
            return
    if is_a(values, bytearray):
        bytearray.__setitem__(values, slice(None), content)
    elif is_a(values, array):
        array.__delitem__(values, slice(None))
        array.frombytes(values, content)


def _overwrite(now: memoryview, content: bytes) -> None:
    if now.c_contiguous:
        now.cast("B")[:] = content
        return
    before = memoryview(content).cast(now.format, now.shape)  # type: ignore[call-overload]
    for position in itertools.product(*map(range, now.shape or ())):
        now[position] = before[position]


def referent_of(reference: Any) -> Any:
    """Returns the object of a weak reference or a proxy, None if it is gone."""
    if is_a(reference, weakref.ref):
        return weakref.ref.__call__(reference)
    try:
        return reference.__init__.__self__
    except ReferenceError:
        return None
