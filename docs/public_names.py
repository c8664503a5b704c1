"""The public names by namespace, for `docs/api.md`, `docs/api` and the pages of the reference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import zerobubble as zb

DOCS = Path(__file__).parent


class Namespace(NamedTuple):
    """A public module under its public name.

    `names` that pages and examples use come before others, such as parts of results. `top` are names that are also at the top, and
    described there.
    """

    title: str
    module: ModuleType
    names: list[str]
    top: list[str]


def namespaces() -> Iterator[Namespace]:
    """Yields the top, then the namespaces by name, those that no page uses last."""
    yield Namespace("zb", zb, zb.__all__, [])
    modules = {name: module for name in dir(zb) if isinstance(module := getattr(zb, name), ModuleType)}
    for name, module in sorted(modules.items(), key=lambda item: not any(is_used(item[0], each) for each in item[1].__all__)):
        own = [each for each in module.__all__ if each not in zb.__all__]
        names = sorted(own, key=lambda each: not is_used(name, each))
        yield Namespace(f"zb.{name}", module, names, [each for each in module.__all__ if each not in own])


@cache
def used_names() -> frozenset[str]:
    """Returns the names that pages and examples use, such as `fit.fit_costs`."""
    files = [*DOCS.glob("*.md"), *DOCS.parent.glob("*.md"), *DOCS.parent.glob("examples/*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file != DOCS / "api.md")
    imported = re.findall(r"from zerobubble\.(\w+) import \(?([\w, ]+)", text)
    used = {f"{module}.{name}" for module, names in imported for name in names.replace(" ", "").split(",")}
    return frozenset(used | set(re.findall(r"\b(?=(\w+\.\w+)\b)", text)))


def is_used(module: str, name: str) -> bool:
    """Whether a page or an example uses a name of a namespace."""
    return f"{module}.{name}" in used_names()


def is_refusal(member: Any) -> bool:
    """Whether a method only raises the error of a call that objects of other libraries have."""
    return getattr(member, "__annotations__", {}).get("return") == "NoReturn"
