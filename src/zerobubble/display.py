"""Display of values: `repr` is one line, `print` one screen, and notebooks show HTML or SVG from an installed drawer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import islice
from pathlib import PurePath
from typing import Any, ClassVar, Literal

COLUMNS = 120
WIDEST = 240
"""Columns of a `repr` that ends in a sentence with a reason."""
LINES = 40
_LONGEST_WORD = 20

Drawer = Callable[[Any], str | None]


class Displayed:
    """A value with a summary of one line (`_summary`) and optional lines of details (`_details`).

    Values cannot import the code that draws them, since it is in a higher layer. It installs drawers with `draws` instead. A drawer returns
    HTML or SVG for notebooks, or None to show text.
    """

    __slots__ = ()
    _drawers: ClassVar[dict[tuple[type, str], Drawer]] = {}

    def _summary(self) -> str:
        raise NotImplementedError

    def _details(self) -> Iterable[str]:
        return ()

    def __repr__(self) -> str:
        return clipped(f"<{type(self).__name__} {self._summary()}>", ">")

    def __str__(self) -> str:
        return screen([f"{type(self).__name__} {self._summary()}", *islice(self._details(), LINES)])

    def _repr_html_(self) -> str | None:
        return self._drawn("html")

    def _repr_svg_(self) -> str | None:
        return self._drawn("svg")

    def _drawn(self, form: str) -> str | None:
        import_module("zerobubble.notebook")  # installs the drawers, with the first value that a notebook shows
        drawer = Displayed._drawers.get((type(self), form))
        return None if drawer is None else drawer(self)


def draws(kind: type[Displayed], form: Literal["html", "svg"]) -> Callable[[Drawer], Drawer]:
    """Decorate a function to install it as the drawer of class `kind`."""

    def install(drawer: Drawer) -> Drawer:
        Displayed._drawers[kind, form] = drawer
        return drawer

    return install


def clipped(line: str, end: str = "", columns: int = COLUMNS) -> str:
    """Return `line` cut to `columns`, by default the width of a screen, if possible between two words, with `end` kept."""
    if len(line) <= columns:
        return line
    head = line[: columns - 4 - len(end)]
    between = head.rfind(" ")
    return f"{head[:between]} ...{end}" if between > len(head) - _LONGEST_WORD else f"{head}...{end}"


def screen(lines: Iterable[str]) -> str:
    """Return the lines that fit on a screen, with "..." last if some are left out."""
    texts = list(lines)
    more = ["..."] if len(texts) > LINES else []
    return "\n".join([*map(clipped, texts[: LINES - len(more)]), *more])


def file_titles(paths: Sequence[str]) -> list[str]:
    """Returns the names under which pictures and tables show files: without their folders, unless two different files then look the same.

    >>> file_titles(["runs/a/plan.json", "mine.csv", "mine.csv"])
    ['plan.json', 'mine.csv', 'mine.csv']
    >>> file_titles(["runs/a/plan.json", "runs/b/plan.json"])
    ['runs/a/plan.json', 'runs/b/plan.json']
    """
    names = {path: PurePath(path).name or path for path in paths}
    counts = Counter(names.values())
    return [names[path] if counts[names[path]] == 1 else path for path in paths]
