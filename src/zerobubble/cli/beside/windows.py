"""`zerobubble show --windows`: the idle time before passes, in which other work fits without delaying any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from zerobubble.cli.inputs.schedule_and_costs import Costed
from zerobubble.explain import Window, windows
from zerobubble.units import counted, ms, show_bytes, show_ms

windows_option = click.option(
    "--windows", "with_windows", is_flag=True, help="Tell and draw the windows: idle time before passes, in which other work fits."
)


def windows_of(costed: Costed) -> tuple[tuple[Window, ...], ...]:
    """The windows of each rank."""
    return windows(costed.schedule, costed.costs)


def told(found: Sequence[Sequence[Window]], costed: Costed) -> str:
    """A line for each rank."""
    return "\n".join(f"rank {rank}: {_line(costed, rank, own)}" for rank, own in enumerate(found))


def _line(costed: Costed, rank: int, own: Sequence[Window]) -> str:
    if not own:
        return "no window"
    whole, longest = sum(window.duration for window in own), max(own, key=lambda window: window.duration)
    free = show_bytes(longest.free) if costed.in_bytes else counted(longest.free / costed.microbatch_bytes[rank], "microbatch")
    parts = f"{counted(len(own), 'window')} of {show_ms(whole)} in all, the longest of {show_ms(longest.duration)}"
    return f"{parts} before step {longest.step}, with room for {free}"


def as_dicts(found: Sequence[Sequence[Window]]) -> list[dict[str, object]]:
    """The same as data: times in ms, memory in bytes."""
    return [{"rank": rank, "windows": list(_rows(own))} for rank, own in enumerate(found)]


def _rows(own: Sequence[Window]) -> Iterator[dict[str, float]]:
    for window in own:
        yield {"step": window.step, "start": ms(window.start), "end": ms(window.end), "free_bytes": window.free}
