"""The `dir` of public modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def listing(names: Iterable[str]) -> Callable[[], list[str]]:
    """Return the `__dir__` of a module with these public `names`, without the names that it imports."""
    return lambda: sorted(names)
