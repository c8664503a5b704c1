"""Detects quickly whether mutable Python places still hold the same objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_, itemgetter
from types import CellType, MappingProxyType
from typing import Any, TypeAlias

ABSENT = object()
"""Marks a missing variable or attribute."""

_Table: TypeAlias = Any
"""A dict, a list, a set, a deque, or the `__dict__` of a class."""


@dataclass
class Watch:
    """Mutable places and the objects they held. A comparison by identity takes about half a microsecond per place."""

    _tables: list[tuple[_Table, int, Callable[[_Table], Iterable[Any]]]] = field(default_factory=list)
    _contents: list[_Table] = field(default_factory=list)
    _globals: list[tuple[dict[str, Any], tuple[str, ...]]] = field(default_factory=list)
    _cells: list[CellType] = field(default_factory=list)
    _slots: list[tuple[Any, list[str]]] = field(default_factory=list)
    _arrays: list[Any] = field(default_factory=list)
    _entries: list[Any] = field(default_factory=list)
    _bytes: list[bytes] = field(default_factory=list)

    def add_table(self, table: _Table, names: Sequence[str] = ()) -> None:
        """Watches a table. With `names`, watches only these entries of a dict, and its length."""
        is_mapping = isinstance(table, (dict, MappingProxyType))
        read = itemgetter(*names, names[0]) if names else _keys_and_values if is_mapping else tuple
        self._tables.append((table, len(table), read))
        self._contents.append(_copy(table))

    def add_globals(self, namespace: dict[str, Any], names: tuple[str, ...]) -> None:
        """Watches these global variables."""
        self._globals.append((namespace, names))

    def add_cell(self, cell: CellType) -> None:
        """Watches a closure variable."""
        self._cells.append(cell)

    def add_slots(self, value: Any, names: list[str]) -> None:
        """Watches the attributes of an object of a class with `__slots__`."""
        self._slots.append((value, names))

    def add_array(self, array: Any) -> None:
        """Watches the bytes of an object with the buffer protocol, such as a numpy array."""
        self._arrays.append(array)

    def note(self) -> None:
        """Records the contents of all places, after the last one is added."""
        self._entries = self._look() or []
        self._bytes = self._look_at_bytes()

    def is_unchanged(self) -> bool:
        """Returns whether every place holds the recorded objects."""
        now = self._look()
        return now is not None and all(map(is_, now, self._entries)) and self._look_at_bytes() == self._bytes

    def restore(self) -> None:
        """Restores the contents that the tables had when they were added."""
        for (table, _, _), content in zip(self._tables, self._contents, strict=True):
            if isinstance(table, MappingProxyType) or _is_same(table, content):
                continue
            table.clear()
            if isinstance(table, (list, deque)):
                table.extend(content)
            else:
                table.update(content)

    def _look(self) -> list[Any] | None:
        """Returns the contents of all places, None if a table has gained or lost entries."""
        entries: list[Any] = []
        for table, size, read in self._tables:
            if len(table) != size:
                return None
            try:
                entries += read(table)
            except KeyError:
                return None
        for namespace, names in self._globals:
            entries += [namespace.get(name, ABSENT) for name in names]
        for value, slots in self._slots:
            entries += [getattr(value, slot, ABSENT) for slot in slots]
        entries += [content_of(cell) for cell in self._cells]
        return entries

    def _look_at_bytes(self) -> list[bytes]:
        return [memoryview(array).tobytes() for array in self._arrays]


def items_of(table: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Returns the stored items of a dict: a subclass may compute other items, or import modules for them."""
    return dict.items(table) if isinstance(table, dict) else table.items()


def _keys_and_values(table: Mapping[Any, Any]) -> Iterable[Any]:
    if isinstance(table, dict):
        return (*dict.keys(table), *dict.values(table))
    return (*table, *table.values())


def _copy(table: _Table) -> _Table:
    kinds: tuple[Any, ...] = (dict, list, set, deque)
    for kind in kinds:
        if isinstance(table, kind):
            return kind.copy(table)
    return dict(table)


def _is_same(table: _Table, content: _Table) -> bool:
    read = _keys_and_values if isinstance(table, dict) else tuple
    return len(table) == len(content) and all(map(is_, read(table), read(content)))


def content_of(cell: CellType) -> Any:
    """Returns the value of a closure variable, `ABSENT` if it is unbound."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return ABSENT
