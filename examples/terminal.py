"""What the demo prints: sections, and a progress bar where there is a terminal, plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import indent, wrap

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PLAIN_WIDTH = 110
"""Columns where there is no terminal to ask."""
PLAIN_LINES = 6
"""About so many progress lines for a run where there is no terminal."""


class Terminal:
    """Speaks for one rank of all; the others keep quiet."""

    def __init__(self, *, speaks: bool) -> None:
        self._console = Console(quiet=not speaks, highlight=False)
        if not self._console.is_terminal:
            self._console = Console(quiet=not speaks, highlight=False, width=PLAIN_WIDTH)

    def section(self, title: str) -> None:
        """Begin a part of the demo."""
        self._console.print(f"\n[bold]{title}[/bold]")

    def say(self, text: str) -> None:
        """A sentence or two."""
        lines = wrap(text, self._console.width - 2, break_long_words=False, break_on_hyphens=False)
        self._console.print(indent("\n".join(lines), "  "), soft_wrap=True)

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows of text under titles: the first column is a name, the others are numbers."""
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        table.add_column(f"  {titles[0]}")
        for title in titles[1:]:
            table.add_column(title, justify="right")
        for row in rows:
            table.add_row(f"  {row[0]}", *row[1:])
        self._console.print(table)

    def list(self, entries: Iterable[tuple[object, str]]) -> None:
        """Names, each with what it is, one a line."""
        named = [(str(name), what) for name, what in entries]
        width = max(len(name) for name, _ in named)
        for name, what in named:
            self._console.print(f"  {name:<{width}}  {what}", soft_wrap=True)

    @contextmanager
    def progress(
        self, title: str, steps: int, tokens_per_step: int, step_seconds: float | None = None
    ) -> Iterator[Callable[[int, float], None]]:
        """Gives a function to call after each step with its number and its loss; `step_seconds` are told instead of measured ones."""
        ends: list[float] = []

        def status(loss: float) -> str:
            """The speed is that since the first step, which is not a usual one."""
            ends.append(time.perf_counter())
            seconds = step_seconds or (ends[-1] - ends[0]) / max(1, len(ends) - 1)
            return f"loss {loss:.4f}  {tokens_per_step / seconds:,.0f} tokens/s" if seconds else f"loss {loss:.4f}"

        if self._console.is_terminal:
            columns = (TextColumn("  {task.description:<12}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
            with Progress(*columns, TimeElapsedColumn(), console=self._console, refresh_per_second=4) as bars:
                bar = bars.add_task(title, total=steps, status="")
                yield lambda step, loss: bars.update(bar, completed=step + 1, status=status(loss))
            return
        every = max(1, steps // PLAIN_LINES)

        def line(step: int, loss: float) -> None:
            text = f"{title:<12} step {step + 1}/{steps}  {status(loss)}"
            if (step + 1) % every == 0 or step + 1 == steps:
                self._console.print(f"  {text}", soft_wrap=True)

        yield line
