"""Detects quickly whether mutable Python places still hold the same objects, and restores what they held."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_, itemgetter
from types import CellType, MemberDescriptorType
from typing import Any

from zerobubble.runtime.values.stored import (
    ABSENT,
    Table,
    behind,
    content_of,
    copy_of,
    entries_of,
    fill,
    in_slot,
    num_entries,
    put,
    put_in_array,
    put_in_cell,
    put_in_class,
    put_in_slot,
    referent_of,
)


@dataclass
class Watch:
    """Mutable places and the objects they held. A comparison by identity takes about half a microsecond per place."""

    _tables: list[tuple[Table, Callable[[Table], int], int, Callable[[Table], Iterable[Any]]]] = field(default_factory=list)
    _globals: list[tuple[dict[str, Any], tuple[str, ...]]] = field(default_factory=list)
    _cells: list[CellType] = field(default_factory=list)
    _slots: list[tuple[Any, MemberDescriptorType]] = field(default_factory=list)
    _references: list[Any] = field(default_factory=list)
    _arrays: list[Any] = field(default_factory=list)
    _entries: list[Any] = field(default_factory=list)
    _bytes: list[bytes] = field(default_factory=list)
    _restore: list[Callable[[], None]] = field(default_factory=list)

    def add_table(self, table: Table, names: Sequence[str] = ()) -> None:
        """Watches a table. With `names`, watches only these entries of a dict, and its length."""
        self._look_at(table, names)
        self._restore.append(partial(fill, table, copy_of(table)))

    def add_class(self, kind: type) -> None:
        """Watches the attributes of a class."""
        self._look_at(behind(vars(kind)))
        self._restore.append(partial(put_in_class, kind, dict(vars(kind))))

    def add_globals(self, namespace: dict[str, Any], names: tuple[str, ...]) -> None:
        """Watches these global variables."""
        self._globals.append((namespace, names))
        self._restore += [partial(put, namespace, name, namespace[name]) for name in names if name in namespace]

    def add_cell(self, cell: CellType) -> None:
        """Watches a closure variable."""
        self._cells.append(cell)
        self._restore.append(partial(put_in_cell, cell, content_of(cell)))

    def add_slots(self, value: Any, slots: Sequence[MemberDescriptorType]) -> None:
        """Watches the attributes of an object of a class with `__slots__`."""
        self._slots += [(value, slot) for slot in slots]
        self._restore += [partial(put_in_slot, slot, value, in_slot(slot, value)) for slot in slots]

    def add_reference(self, reference: Any) -> None:
        """Watches whether the object of a weak reference is alive."""
        self._references.append(reference)

    def add_array(self, array: Any) -> None:
        """Watches the bytes of an object with the buffer protocol, such as a numpy array."""
        self._arrays.append(array)
        self._restore.append(partial(put_in_array, array, memoryview(array).tobytes()))

    def note(self) -> None:
        """Records the contents of all places, after the last one is added."""
        self._entries = self._look() or []
        self._bytes = self._look_at_bytes()

    def is_unchanged(self) -> bool:
        """Returns whether every place holds the recorded objects."""
        now = self._look()
        return now is not None and all(map(is_, now, self._entries)) and self._look_at_bytes() == self._bytes

    def restore(self) -> None:
        """Restores what all places held when they were added."""
        for restore in self._restore:
            restore()

    def _look_at(self, table: Table, names: Sequence[str] = ()) -> None:
        read: Callable[[Table], Iterable[Any]] = _READ_PLAIN.get(type(table), entries_of)
        if names and type(table) is dict:
            read = itemgetter(*names, names[0])
        self._tables.append((table, len if type(table) in _READ_PLAIN else num_entries, num_entries(table), read))

    def _look(self) -> list[Any] | None:
        """Returns the contents of all places, None if a table has gained or lost entries."""
        entries: list[Any] = []
        for table, length, size, read in self._tables:
            if length(table) != size:
                return None
            try:
                entries += read(table)
            except KeyError:
                return None
        for namespace, names in self._globals:
            entries += [namespace.get(name, ABSENT) for name in names]
        entries += [in_slot(slot, value) for value, slot in self._slots]
        entries += [content_of(cell) for cell in self._cells]
        entries += [referent_of(reference) is None for reference in self._references]
        return entries

    def _look_at_bytes(self) -> list[bytes]:
        return [memoryview(array).tobytes() for array in self._arrays]


_READ_PLAIN: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: lambda table: (*table, *table.values()),
    list: tuple,
    set: tuple,
    deque: tuple,
}
"""The fastest way to read containers that are no subclasses."""
