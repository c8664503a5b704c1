"""Compares objects by identity."""

from __future__ import annotations

import weakref
from typing import Any


class Identity:
    """Compares by identity of the wrapped object, and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value


class WeakIdentity:
    """Compares by identity of an object that only a weak reference leads to, and does not keep it alive."""

    __slots__ = ("_hash", "_reference")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._reference = weakref.ref(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakIdentity) and self._reference is other._reference
