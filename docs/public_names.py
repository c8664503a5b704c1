"""The public names by their namespaces, as `docs/api.md` lists them and the reference has a page for each."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import zerobubble as zb


class Namespace(NamedTuple):
    """A public module under the name by which programs reach it. `again` are names that also stand at the top and are told there."""

    title: str
    module: ModuleType
    names: list[str]
    again: list[str]


def namespaces() -> Iterator[Namespace]:
    """The top, then the namespaces in the order of their names."""
    yield Namespace("zb", zb, zb.__all__, [])
    for name in dir(zb):
        module = getattr(zb, name)
        if isinstance(module, ModuleType):
            own = [each for each in module.__all__ if each not in zb.__all__]
            yield Namespace(f"zb.{name}", module, own, [each for each in module.__all__ if each not in own])
