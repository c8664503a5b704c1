"""The log of one rank in a run folder, read as it grows."""

from __future__ import annotations

import fcntl
import json
import os
from collections import defaultdict, deque
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from zerobubble.errors import ParseError
from zerobubble.run_folder import BEGIN, END, RESERVED, Begin, End, StepReport, count, time_of
from zerobubble.watch.series import Series
from zerobubble.whole_files import opened_regular

RECENT = 20
"""Steps over which current figures are means."""
REFERENCE = 10
"""Steps whose medians are the reference for the drift of stage times, if a run has no costs."""
LONGEST_LINE = 1 << 20
"""The most bytes of a line that is read."""
PIECE_BYTES = 4 * LONGEST_LINE
MOST_STAGES = 1024
"""The most stages of a rank whose times are kept."""


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
        unreadable: Lines that are no record, such as the rest of a process that was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = -1
        self._clear()

    def _clear(self) -> None:
        self._offset = 0
        self._reserved_at = -1
        self._is_in_long_line = False
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
        """Read the lines that were added, or all lines of another file. Raises `InputError` if it cannot be read."""
        with opened_regular(self.path) as file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._offset:
                self._clear()
                self._inode = state.st_ino
            file.seek(self._offset)
            while piece := file.read(PIECE_BYTES):
                whole = piece.rfind(b"\n") + 1
                if not whole and len(piece) <= LONGEST_LINE:
                    break
                self._take_piece(piece[:whole] if whole else piece, ends=bool(whole))
                self._offset += whole or len(piece)
                file.seek(self._offset)
            self._read_reserved(file)

    def _read_reserved(self, file: BinaryIO) -> None:
        """Take the end that a process has written into the line after its first, because the disk was full."""
        if self.begin is not None and self.end is None:
            file.seek(self._reserved_at)
            line = file.read(RESERVED).partition(b"\n")[0].strip()
            if line.startswith(f'{{"{END}"'.encode()):
                self._take(line, self._reserved_at)

    def _take_piece(self, piece: bytes, *, ends: bool) -> None:
        """Take whole lines, or a part of a line that is too long and does not end here."""
        place = self._offset
        for line in piece.split(b"\n")[: -1 if ends else None]:
            place += len(line) + 1
            if not self._is_in_long_line:
                self._take(line, place)
            self._is_in_long_line = not ends

    def _take(self, line: bytes, end: int) -> None:
        """Take a line that ends at this offset."""
        if not line.strip():
            return
        try:
            data = json.loads(line) if len(line) <= LONGEST_LINE else None
            if not isinstance(data, dict):
                raise ParseError("a line is an object")
            if BEGIN in data:
                self.begin, self.end, self._reserved_at = Begin.from_dict(data), None, end
            elif END in data:
                self.end = End.from_dict(data)
            else:
                left_out = count(data.get("left_out", 0))
                self._take_step(StepReport.from_dict(data), time_of(data))
                self.left_out += left_out
        except (ValueError, KeyError, RecursionError):
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
            if stage in self.stages or len(self.stages) < MOST_STAGES:
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
        with opened_regular(self.path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
            return False


def stage_seconds(passes: dict[str, float] | Any) -> dict[int, float]:
    """Return the seconds of one pass of each kind together, by stage."""
    by_stage: dict[int, float] = defaultdict(float)
    for name, seconds in passes.items():
        by_stage[stage_of(name)] += seconds
    return dict(by_stage)


def stage_of(name: str) -> int:
    """Return the stage of passes with a name such as "0F"."""
    return int(name.rstrip("".join(char for char in name if not char.isdigit())))


def medians(reports: list[StepReport]) -> dict[str, float]:
    """Return the medians over several steps of the seconds of passes."""
    times: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, seconds in report.passes.items():
            times[name].append(seconds)
    return {name: median(values) for name, values in times.items()}
