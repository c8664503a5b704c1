"""A page of the viewer in a browser: where its passes and bubbles are, and what it shows about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.browser.chromium import Browser
from zerobubble.timeline import Timeline
from zerobubble.view import Viewed

LEFT, RIGHT, CAPTION, BETWEEN = 58, 6, 28, 14
"""As in `layout.js`: a test that computed places from the page would follow its mistakes."""


class Picture:
    """The page of `html` opened at a width; places are of the whole makespan, before anything is zoomed or added below rows."""

    def __init__(self, browser: Browser, folder: Path, html: str, viewed: Sequence[Viewed], width: int = 1280, **options: Any) -> None:
        self.browser, self.timelines = browser, [each.timeline for each in viewed]
        file = folder / "page.html"
        file.write_text(html, encoding="utf-8")
        browser.open(file, width, **options)
        browser.run("document.querySelector('.stage').scrollIntoView()")
        browser.settle()

    @property
    def boxes(self) -> int:
        return int(self.data("boxes"))

    def data(self, name: str) -> str:
        self.browser.settle()
        return str(self.browser.run(f"document.querySelector('.stage').dataset.{name}"))

    @property
    def tip(self) -> str:
        """What the tip says; empty where it is hidden."""
        return str(self.browser.run("document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').innerText"))

    @property
    def row(self) -> int:
        ranks = max(timeline.num_ranks for timeline in self.timelines)
        return next(height for most, height in ((4, 27), (8, 22), (16, 18), (32, 15), (10**6, 12)) if ranks <= most)

    def place(self, n: int, rank: int, time: float, share: float = 0.5) -> tuple[float, float]:
        """Where `time` of a rank is in the window; `share` is how far down in the row."""
        left, top, width = self.browser.run(
            "(() => { const b = document.querySelector('.stage').getBoundingClientRect(); return [b.left, b.top, b.width]; })()"
        )
        pitches = [
            self.row + (4 if timeline.reductions else 0) + (7 if timeline.copies else 0) + (1 if self.row < 14 else 3)
            for timeline in self.timelines
        ]
        above = sum(CAPTION + t.num_ranks * pitch + BETWEEN for t, pitch in zip(self.timelines[:n], pitches, strict=False))
        total = max(timeline.makespan for timeline in self.timelines)
        x = left + LEFT + (time - self.timelines[n].start) / total * (width - LEFT - RIGHT)
        return x, top + above + CAPTION + rank * pitches[n] + share * self.row

    def place_of(self, n: int, op: str) -> tuple[float, float]:
        rank, span = next((rank, span) for rank, span in self.timelines[n].spans() if str(span.op) == op)
        return self.place(n, rank, (span.start + span.end) / 2, self._share(self.timelines[n], rank, op))

    def _share(self, timeline: Timeline, rank: int, op: str) -> float:
        """The middle of the row, or of the half that one of two overlapped passes has."""
        row = timeline.rows[rank]
        at = next(place for place, span in enumerate(row) if str(span.op) == op)
        if at + 1 < len(row) and row[at + 1].start < row[at].end:
            return 0.25
        return 0.75 if at and row[at].start < row[at - 1].end else 0.5

    def point_at_pass(self, n: int, op: str) -> None:
        self.browser.point(*self.place_of(n, op))

    def point_at(self, n: int, rank: int, time: float) -> None:
        self.browser.point(*self.place(n, rank, time))
