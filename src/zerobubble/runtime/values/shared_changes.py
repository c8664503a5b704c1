"""Describes how a value that user code keeps has changed, so that another rank can make the same change of its own value.

Only changes are sent: entries of dicts, attributes of objects, items appended to a list. So an object that changes stays the same object on
all ranks, a new object becomes a new object, and a long list of losses is not sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerobubble.runtime.values.python_places import are_same
from zerobubble.runtime.values.shared_values import (
    ATOMS,
    CONTAINERS,
    DEPTH,
    UnknownObjectError,
    attributes_in,
    is_array,
    is_object,
    put_attribute,
    received,
    sent,
    with_contents,
)
from zerobubble.runtime.values.stored import ABSENT, base_of, entries_of, is_a, items_of

_MOST_BYTES = 1 << 20
"""Larger arrays are assumed constant."""
_MOST_INSIDE = 256
"""Entries of larger containers are compared by identity, in about 20 ns each, and not what is inside of them."""
_MOST_ENTRIES = 1 << 13
"""Of larger containers, only the number of entries is compared."""
_NEW, _FILLED, _MORE, _INSIDE = "new", "filled", "more", "inside"
"""Changes: another object, the same object with new contents, further items of a list, and changes of entries."""


class Kept(NamedTuple):
    """A `value` at one time: the version of a tensor, the bytes of an array, and the entries of a container or object."""

    value: Any
    mark: Any = None
    entries: dict[Any, Kept] | None = None

    @classmethod
    def of(cls, value: Any, depth: int = DEPTH) -> Kept:
        """Returns the value as it is now."""
        if type(value) in ATOMS or not depth:
            return cls(value)
        if is_a(value, Tensor):
            with torch._C.DisableTorchFunctionSubclass():  # a guarded tensor refuses other uses
                return cls(value, None if value.is_inference() else value._version)
        if is_array(value):
            return cls(value, value.tobytes() if value.nbytes <= _MOST_BYTES else None)
        if is_a(value, CONTAINERS) and len(value) > _MOST_INSIDE:
            return cls(value, entries_of(value) if len(value) <= _MOST_ENTRIES else (len(value),))
        entries = _entries_in(value)
        return cls(value, None, None if entries is None else {key: cls.of(entry, depth - 1) for key, entry in entries.items()})

    def holds(self, value: Any) -> bool:
        """Returns whether a value is unchanged."""
        if value is not self.value:
            return type(value) in ATOMS and type(value) is type(self.value) and bool(value == self.value)
        if self.entries is None:
            return _are_equal(Kept.of(value, 1).mark, self.mark)
        if is_a(value, CONTAINERS) and len(value) != len(self.entries):
            return False
        entries = _entries_in(value) or {}
        return entries.keys() == self.entries.keys() and all(before.holds(entries[key]) for key, before in self.entries.items())

    def change(self, value: Any) -> Any:
        """Returns the change from the earlier contents to `value`, None if there is none."""
        if self.holds(value):
            return None
        if value is not self.value:
            return _NEW, sent(value)
        if is_a(value, list) and self._was_appended_to(value):
            return _MORE, [sent(entry) for entry in value[self._length :]]
        entries = None if self.entries is None or is_a(value, (set, frozenset, tuple, deque)) else _entries_in(value)
        if entries is None or (is_a(value, list) and len(value) != self._length):
            return _FILLED, sent(value)
        return _INSIDE, self._changes_inside(entries)

    def _changes_inside(self, entries: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        """Returns the changes of entries by key, None for an entry that is gone."""
        before = self.entries or {}
        changes: list[tuple[Any, Any]] = [(sent(key), None) for key in before if key not in entries]
        for key, entry in entries.items():
            change = before[key].change(entry) if key in before else (_NEW, sent(entry))
            changes += [] if change is None else [(sent(key), change)]
        return changes

    @property
    def _length(self) -> int:
        if self.entries is not None:
            return len(self.entries)
        return len(self.mark) if len(self.mark) > 1 else self.mark[0]

    def _was_appended_to(self, value: list[Any]) -> bool:
        if len(value) <= self._length:
            return False
        if self.entries is not None:
            return all(before.holds(value[place]) for place, before in self.entries.items())
        return len(self.mark) == 1 or all(map(is_, self.mark, value))


def _entries_in(value: Any) -> dict[Any, Any] | None:
    """Returns the entries of a container or object by key, place or name; None for any other value."""
    if is_a(value, dict):
        return dict(items_of(value))
    if is_a(value, (list, tuple, deque)):
        return dict(enumerate(entries_of(value)))
    if is_a(value, (set, frozenset)):
        return {entry: entry for entry in entries_of(value)}
    return attributes_in(value) if is_object(value) else None


def _are_equal(now: Any, before: Any) -> bool:
    """Compares marks, the entries of large containers by identity."""
    if isinstance(now, tuple) and isinstance(before, tuple) and len(now) > 1:
        return are_same(now, before)
    return bool(now == before)


def apply_change(change: Any, held: Any, refused: Callable[[], Any]) -> Any:
    """Returns the `held` value with a `change` of another rank, and with `refused()` in place of values that the rank could not send."""
    kind, contents = change
    if kind in (_NEW, _FILLED):
        value = refused() if contents is None else _received(contents, held, refused)
        return with_contents(held, value) if kind == _FILLED else value
    if kind == _MORE and is_a(held, list):
        list.extend(held, [refused() if entry is None else _received(entry, None, refused) for entry in contents])
        return held
    entries = _entries_in(held)
    if kind == _MORE or entries is None:
        return refused()
    for sent_key, inner in contents:
        key = received(sent_key)
        _put_entry(held, key, ABSENT if inner is None else apply_change(inner, entries.get(key), refused))
    return held


def _received(contents: Any, held: Any, refused: Callable[[], Any]) -> Any:
    try:
        return received(contents, held)
    except UnknownObjectError:
        return refused()


def _put_entry(held: Any, key: Any, value: Any) -> None:
    if not is_a(held, (dict, list)):
        put_attribute(held, key, value)
    elif is_a(held, list):
        list.__setitem__(held, key, value)
    elif value is ABSENT:
        base_of(held).pop(held, key, None)
    else:
        base_of(held).__setitem__(held, key, value)
