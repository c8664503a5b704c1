"""What the terminal can show: whether in colour, and our characters in ASCII where its encoding has no others."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Made = TypeVar("Made")

IN_ASCII = {"─": "-", "·": ".", "▏": "|", "–": "-", "…": "...", "×": "x", "█": "#", "▓": "+", "▒": "=", "░": "-"}
"""Characters that pictures and tables are drawn with, and what stands for each of them where the output's encoding lacks it."""

_HANDLER = "zerobubble-drawn-in-ascii"


def is_coloured(console: Console) -> bool:
    """Whether pictures may tell kinds of passes apart by colour alone: not with NO_COLOR, nor where there are only a few colours."""
    return not console.no_color and console.color_system in ("256", "truecolor")


def with_bar(names: Sequence[str], make: Callable[[str], Made]) -> Iterator[Made]:
    """What `make` gives for each of `names`, with a bar on a terminal's stderr that tells the one it is at."""
    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            bar.update(task, description=name)
            yield make(name)
            bar.advance(task)


def draw_in_ascii_where_needed() -> None:
    """Have stdout write our own characters in ASCII where its encoding lacks them; any other character stays an error."""
    if isinstance(sys.stdout, TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors=_HANDLER)


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if character in IN_ASCII:
        return IN_ASCII[character], error.start + 1
    return codecs.lookup_error("surrogateescape")(error)


codecs.register_error(_HANDLER, _in_ascii)
