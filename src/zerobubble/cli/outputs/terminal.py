"""Terminal output: colors, progress bars, and an ASCII fallback for encodings that lack box-drawing characters."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import IO, Any, TypeVar, cast

from rich import console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from zerobubble.planning.table import NOTE_WIDTH

Made = TypeVar("Made")

IN_ASCII = {"─": "-", "·": ".", "▏": "|", "▌": "#", "–": "-", "…": "...", "×": "x", "█": "#", "▓": "+", "▒": "=", "░": "-"}
"""Characters of pictures and tables, with their ASCII replacements."""

_HANDLER = "zerobubble-drawn-in-ascii"


class Console(console.Console):
    """A console of rich that leaves a closed pipe to the command, which ends with its exit code."""

    def on_broken_pipe(self) -> None:
        """Raises `BrokenPipeError`."""
        raise BrokenPipeError


def is_colored(console: Console) -> bool:
    """Returns whether pictures may distinguish kinds of passes by color alone: not with NO_COLOR, and not with fewer than 256 colors."""
    return not console.no_color and console.color_system in ("256", "truecolor")


class _Trimmed:
    """Standard output without the spaces at the ends of lines that `rich` leaves where it wraps text. Each write is of whole lines."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def stdout_console(width: int | None = None) -> Console:
    """Returns a console on standard output, of `width` columns or those of the terminal; without a terminal, as wide as a printed plan."""
    if sys.stdout.isatty():
        return Console(width=width)
    default = None if "COLUMNS" in os.environ else NOTE_WIDTH
    return Console(width=width or default, file=cast("IO[str]", _Trimmed()))


def with_bar(names: Sequence[str], make: Callable[[str], Made]) -> Iterator[Made]:
    """Yields `make(name)` for each of `names`, with a progress bar that shows the current name."""
    with progress(MofNCompleteColumn()) as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            bar.update(task, description=name)
            yield make(name)
            bar.advance(task)


@contextmanager
def progress(*columns: ProgressColumn) -> Iterator[Progress]:
    """Shows a progress bar on stderr with these additional columns, only in a terminal."""
    console = Console(stderr=True)
    shown = BarColumn(), *columns, TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


def draw_in_ascii_where_needed() -> None:
    """Makes stdout replace the characters of `IN_ASCII` if its encoding lacks them. Any other character remains an error."""
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
