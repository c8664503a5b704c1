"""The log of one rank in a run folder, read as it grows."""

from __future__ import annotations

import fcntl
import json
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from zerobubble.run_folder import BEGIN, END, StepReport
from zerobubble.watch.series import Series

RECENT = 20
"""Steps over which current figures are means."""
REFERENCE = 10
"""Steps whose medians are the reference for the drift of stage times, if a run has no costs."""
PIECE_BYTES = 1 << 24


class Begin(NamedTuple):
    """The first line of a process: its host, its number there, when it began (unix time), and the ranks of its pipeline."""

    host: str
    pid: int
    at: float
    ranks: int


class End(NamedTuple):
    """The last line of a process: when it was written (unix time), and the failure that ended the pipeline, if any."""

    at: float
    message: str = ""
    rank: int | None = None
    op: str | None = None


class RankLog:
    """What a rank has recorded so far. `refresh` reads what is new; the last line counts once it is complete.

    Attributes:
        begin: The latest begin of a process; None before the first.
        end: The end of that process; None while it runs, and if it was killed.
        last: The report of the latest step, written at `at` (unix time).
        recent: The reports of the latest steps.
        seconds, bubble, loss: Those of each step.
        stages: The seconds of one pass of each kind together, by stage.
        peak_bytes: The latest measurement.
        left_out: Steps that could not be written.
        unreadable: Complete lines that are no record, such as the rest of a process that was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.begin: Begin | None = None
        self.end: End | None = None
        self.last: StepReport | None = None
        self.at = 0.0
        self.recent: deque[StepReport] = deque(maxlen=RECENT)
        self.seconds, self.bubble, self.loss = Series(), Series(), Series()
        self.stages: dict[int, Series] = defaultdict(Series)
        self.peak_bytes: int | None = None
        self.left_out = 0
        self.unreadable = 0
        self._first: list[StepReport] = []

    def refresh(self) -> None:
        """Read the lines that were added."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while piece := file.read(PIECE_BYTES):
                whole = piece.rfind(b"\n") + 1
                if not whole:
                    return
                for line in piece[:whole].splitlines():
                    if line:
                        self._take(line)
                self._offset += whole
                file.seek(self._offset)

    def _take(self, line: bytes) -> None:
        try:
            data = json.loads(line)
            if BEGIN in data:
                self.begin, self.end = Begin(data["host"], data["pid"], float(data["at"]), int(data["ranks"])), None
            elif END in data:
                self.end = End(float(data["at"]), **(data[END] or {}))
            else:
                self._take_step(StepReport.from_dict(data), float(data["at"]))
                self.left_out += data.get("left_out", 0)
        except (ValueError, KeyError, TypeError, AttributeError):
            self.unreadable += 1

    def _take_step(self, report: StepReport, at: float) -> None:
        if self.last is not None and report.step <= self.last.step:
            for series in (self.seconds, self.bubble, self.loss, *self.stages.values()):
                series.rewind(report.step)
        self.last, self.at = report, at
        self.recent.append(report)
        self.seconds.add(report.step, report.seconds)
        self.bubble.add(report.step, report.bubble)
        if abs(report.loss) < float("inf"):
            self.loss.add(report.step, report.loss)
        for stage, seconds in stage_seconds(report.passes).items():
            self.stages[stage].add(report.step, seconds)
        if report.peak_bytes is not None:
            self.peak_bytes = report.peak_bytes
        if len(self._first) <= REFERENCE:
            self._first.append(report)

    @property
    def reference(self) -> dict[str, float]:
        """The median seconds of passes in the first steps, without the very first."""
        return medians(self._first[1:])

    def is_open(self) -> bool:
        """Whether the process that writes the log still has it open, on this host."""
        with suppress(OSError), self.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        return True


def stage_seconds(passes: dict[str, float] | Any) -> dict[int, float]:
    """Return the seconds of one pass of each kind together, by stage."""
    found: dict[int, float] = defaultdict(float)
    for name, seconds in passes.items():
        found[stage_of(name)] += seconds
    return dict(found)


def stage_of(name: str) -> int:
    """Return the stage of passes with a name such as "0F"."""
    return int(name.rstrip("".join(char for char in name if not char.isdigit())))


def medians(reports: list[StepReport]) -> dict[str, float]:
    """Return the medians over several steps of the seconds of passes."""
    times: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, seconds in report.passes.items():
            times[name].append(seconds)
    return {name: median(found) for name, found in times.items()}
