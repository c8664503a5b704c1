"""The public names by namespace, for `docs/api.md`, `docs/api` and the pages of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import zerobubble as zb


class Namespace(NamedTuple):
    """A public module under its public name. `top` are those of its names that are also at the top, and described there."""

    title: str
    module: ModuleType
    names: list[str]
    top: list[str]


def namespaces() -> Iterator[Namespace]:
    """Yields the top, then the namespaces by name."""
    yield Namespace("zb", zb, zb.__all__, [])
    for name in dir(zb):
        module = getattr(zb, name)
        if isinstance(module, ModuleType):
            own = [each for each in module.__all__ if each not in zb.__all__]
            yield Namespace(f"zb.{name}", module, own, [each for each in module.__all__ if each not in own])


def is_refusal(member: Any) -> bool:
    """Whether a method only raises the error of a call that objects of other libraries have."""
    return getattr(member, "__annotations__", {}).get("return") == "NoReturn"
