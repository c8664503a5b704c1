"""The output of the demo: sections, and a progress bar in a terminal or plain lines without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import indent, wrap

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PLAIN_WIDTH = 110
"""Columns without a terminal."""
PLAIN_LINES = 10
"""Approximate progress lines per run without a terminal."""


class Terminal:
    """Prints on one rank; the others are quiet."""

    def __init__(self, *, speaks: bool) -> None:
        self._console = Console(quiet=not speaks, highlight=False)
        if not self._console.is_terminal:
            self._console = Console(quiet=not speaks, highlight=False, width=PLAIN_WIDTH)

    def section(self, title: str) -> None:
        """Starts a section of the demo."""
        self._console.print(f"\n[bold]{title}[/bold]")

    def say(self, text: str) -> None:
        """Prints a sentence or two."""
        lines = wrap(text, self._console.width - 2, break_long_words=False, break_on_hyphens=False)
        self._console.print(indent("\n".join(lines), "  "), soft_wrap=True)

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Prints rows under titles. The first column is a name, the others are numbers."""
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        table.add_column(f"  {titles[0]}")
        for title in titles[1:]:
            table.add_column(title, justify="right")
        for row in rows:
            table.add_row(f"  {row[0]}", *row[1:])
        self._console.print(table)

    def list(self, entries: Iterable[tuple[object, str]]) -> None:
        """Prints names with descriptions, one per line."""
        named = [(str(name), what) for name, what in entries]
        width = max(len(name) for name, _ in named)
        for name, what in named:
            self._console.print(f"  {name:<{width}}  {what}", soft_wrap=True)

    @contextmanager
    def progress(
        self, title: str, steps: int, tokens_per_step: int, step_seconds: float | None = None
    ) -> Iterator[Callable[[int, float], None]]:
        """Yields a function to call after each step with its number and loss. `step_seconds` replaces the measured time."""
        ends: list[float] = []

        def status(loss: float) -> str:
            """Returns loss and speed; the first step is not counted."""
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
