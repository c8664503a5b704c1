"""How values show themselves: `repr` is one line, `print` one screen, and a notebook draws what a drawer was installed for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, ClassVar, Literal

COLUMNS = 120
LINES = 40

Drawer = Callable[[Any], str | None]


class Displayed:
    """A value that says what it is in a line (`_summary`) and, where there is more to tell, in some lines below it (`_details`).

    Drawing lies on a higher floor than the values, so whoever can draw a class installs a drawer with `draws`. A drawer gives HTML or
    SVG for notebooks, or None where text does better.
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
        drawer = Displayed._drawers.get((type(self), form))
        return None if drawer is None else drawer(self)


def draws(kind: type[Displayed], form: Literal["html", "svg"]) -> Callable[[Drawer], Drawer]:
    """Install the function below it as what notebooks show of values of class `kind`."""

    def install(drawer: Drawer) -> Drawer:
        Displayed._drawers[kind, form] = drawer
        return drawer

    return install


def clipped(line: str, end: str = "") -> str:
    """`line` cut to the width of a screen, still ending in `end`."""
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3 - len(end)]}...{end}"


def screen(lines: Iterable[str]) -> str:
    """The lines as far as they fit on a screen, the last one telling where some are left out."""
    known = list(lines)
    more = ["..."] if len(known) > LINES else []
    return "\n".join([*map(clipped, known[: LINES - len(more)]), *more])
