"""A run folder as a whole: its ranks, whether it runs or why it ended, and the last step that all ranks recorded in detail."""

from __future__ import annotations

import os
import re
import socket
import time
from enum import StrEnum
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from zerobubble.display import file_titles
from zerobubble.errors import InputError, ParseError, ZeroBubbleError
from zerobubble.explain import Difference, diff
from zerobubble.run_folder import HEADER, MOST_RANKS, NUM_DETAILS, detail_name, log_name
from zerobubble.timeline import Timeline
from zerobubble.watch.rank_log import RankLog
from zerobubble.watch.records import REMEDY, Details, Remembered, RunHeader, timeline_of
from zerobubble.watch.series import Series, mean_of

_RIGHT_FOLDER = "give the folder of zb.hooks.Telemetry(folder=...)"
_LOG = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.jsonl")
SILENT_S = 60.0
"""Seconds without a step after which a run on another host is reported as silent."""
SILENT_STEPS = 20
"""The same, in steps of the run."""


class RunState(StrEnum):
    """The state of a run: it begins (no step yet), runs, has been silent for long, was closed, failed, or its processes are gone."""

    BEGINS = "begins"
    RUNS = "running"
    SILENT = "silent"
    CLOSED = "ended"
    FAILED = "failed"
    GONE = "gone"


class RunStatus(NamedTuple):
    """The state of a run since `at` (unix time), why, and the rank and pass to blame if they are known."""

    state: RunState
    at: float
    why: str = ""
    rank: int | None = None
    op: str | None = None


class WatchedRun:
    """A run folder. `refresh` reads what is new.

    Attributes:
        name, path, title: The folder as given, its absolute path, and the name under which a page shows it: the last part of the path.
        header: The schedule of the latest part of the run, its costs (None if the hook had none), and the plan and memory by these costs.
        details: The latest step that every rank recorded in detail, whose number is `details_step`.
        details_seconds: The time of this step on the slowest rank; 0 if a rank recorded none.
        difference: This step against its plan; None without costs, and if the step ran another schedule than the latest.
        series: The figures of each step: the loss, the seconds of the step and its bubble, and the seconds of each stage's passes.

    Raises `InputError` for a folder that is not a run, and for a damaged file, in each `refresh` until it is restored. Files may be from
    anyone: they take memory and time in proportion to their size.
    """

    def __init__(self, folder: str) -> None:
        self.name = folder
        self._folder = Path(folder)
        self.path = str(self._folder.absolute())
        (self.title,) = file_titles([self.path])
        if not self._folder.is_dir():
            raise InputError("there is no folder {folder}", folder=folder, remedy=_RIGHT_FOLDER)
        self._all_logs: dict[int, RankLog] = {}
        self._header = Remembered(self._folder / HEADER, RunHeader.from_dict)
        self._details: dict[tuple[int, int], Remembered[Details]] = {}
        self.header = RunHeader()
        self.details: Timeline | None = None
        self.difference: Difference | None = None
        self.details_step = -1
        self.details_seconds = 0.0
        self._shown: dict[int, Details] = {}
        self.series: dict[str, Series] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what the ranks have written since the last time."""
        names = self._names()
        for name in names:
            if match := _LOG.fullmatch(name):
                self._all_logs.setdefault(int(match[1]), RankLog(self._folder / name))
        missing = [name for name, is_there in ((HEADER, HEADER in names), (log_name(0), bool(self._all_logs))) if not is_there]
        if missing:
            message = "{folder} is not a run folder: it has no {file}"
            inside = min((header.parent for header in self._folder.glob(f"*/{HEADER}")), default=None)
            remedy = _RIGHT_FOLDER if inside is None else f"give a run in it, such as {inside}"
            raise InputError(message, folder=self.name, file=" and no ".join(missing), remedy=remedy)
        for log in self._all_logs.values():
            log.refresh()
        self.header = self._header.content()
        self._read_details(names)
        self.series = series_of(list(self.logs.values()))

    def _names(self) -> frozenset[str]:
        try:
            return frozenset(os.listdir(self._folder))
        except OSError as error:
            raise InputError("cannot read {folder}: {reason}", folder=self.name, reason=error.strerror, remedy=_RIGHT_FOLDER) from error

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the latest part of the run has, of which some may not have begun."""
        begins = [log.begin for log in self._all_logs.values() if log.begin]
        return max(begins, key=lambda begin: begin.at).ranks if begins else min(len(self._all_logs), MOST_RANKS)

    @property
    def logs(self) -> dict[int, RankLog]:
        """The logs of these ranks, in order."""
        return {rank: log for rank, log in sorted(self._all_logs.items()) if rank < self.num_ranks}

    @property
    def step(self) -> int:
        """The latest step that any rank has recorded; -1 before the first."""
        return max((log.last.step for log in self.logs.values() if log.last), default=-1)

    def _read_details(self, names: frozenset[str]) -> None:
        """Read the latest step that every rank recorded in detail, if it is new."""
        of_steps: dict[int, dict[int, Details]] = {}
        for rank, slot in product(self.logs, range(NUM_DETAILS)):
            name = detail_name(rank, slot)
            if name in names:
                path = self._folder / name
                details = self._details.setdefault((rank, slot), Remembered(path, Details.from_dict)).content()
                of_steps.setdefault(details.step, {})[rank] = details
        whole = [step for step, ranks in of_steps.items() if len(ranks) == self.num_ranks]
        if whole and of_steps[max(whole)] != self._shown:
            try:
                self.details = timeline_of(of_steps[max(whole)])
            except ParseError as error:
                files = f"details of step {max(whole)} in {self.name}"
                raise InputError("the {file} do not fit together: {cause}", file=files, cause=str(error), remedy=REMEDY) from error
            self.details_step, self._shown = max(whole), of_steps[max(whole)]
            self.details_seconds = max(details.seconds for details in self._shown.values())
            self.difference = self._compare(self.details)

    def _compare(self, step: Timeline) -> Difference | None:
        if self.header.schedule is None or self.header.costs is None:
            return None
        try:
            return diff(self.header.schedule, self.header.costs, step)
        except ZeroBubbleError:
            return None

    def status(self) -> RunStatus:
        """Return whether the run goes on, and otherwise when and why it ended."""
        latest = max((log.begin.at for log in self.logs.values() if log.begin), default=0.0)
        at = max((log.at for log in self.logs.values()), default=0.0) or latest
        if ended := self._ended(latest, at):
            return ended
        if self.step < 0:
            return RunStatus(RunState.BEGINS, latest, "no step has ended yet")
        quiet, limit = time.time() - at, max(SILENT_S, SILENT_STEPS * self.step_seconds)
        if quiet > limit:
            return RunStatus(
                RunState.SILENT, at, f"no step has ended for {quiet:.0f} s; the last steps took {self.step_seconds:.2g} s each"
            )
        return RunStatus(RunState.RUNS, at)

    def _ended(self, latest: float, at: float) -> RunStatus | None:
        """Return how the part of the run that began at `latest` ended; `at` is its last sign of life. None if it goes on."""
        logs = self.logs
        # A rank that has not begun again still has the end of the part before.
        ended = [log.end for log in logs.values() if log.end is not None and log.end.at >= latest]
        failures = [end for end in ended if end.message]
        if failures:
            first = min(failures, key=lambda end: end.at)
            return RunStatus(RunState.FAILED, first.at, first.message, first.rank, first.op)
        gone = [rank for rank, log in logs.items() if _is_gone(log)]
        if gone:
            return RunStatus(RunState.GONE, at, self._gone_text(gone), gone[0])
        is_closed = bool(ended) and len(ended) == len(logs)
        return RunStatus(RunState.CLOSED, max(end.at for end in ended), "the pipeline was closed") if is_closed else None

    def _gone_text(self, gone: list[int]) -> str:
        begin = self.logs[gone[0]].begin
        assert begin is not None
        others = f", and those of ranks {', '.join(map(str, gone[1:]))}" if gone[1:] else ""
        return (
            f"the process of rank {gone[0]} ({begin.pid} on {begin.host}) ended without a report{others}: it was killed, or its host failed"
        )

    @property
    def step_seconds(self) -> float:
        """The median time of the latest steps, of the slowest rank; 0 before the first."""
        return max((median(report.seconds for report in log.recent) for log in self.logs.values() if log.recent), default=0.0)


def series_of(logs: list[RankLog]) -> dict[str, Series]:
    """Return the figures of each step, over all ranks."""
    if not logs:
        return {}
    stages = sorted({stage for log in logs for stage in log.stages})
    per_stage = {f"stage {stage}": mean_of([log.stages[stage] for log in logs if stage in log.stages]) for stage in stages}
    # All ranks have the same loss.
    loss = max((log.loss for log in logs), key=lambda series: len(series.means()))
    means = {"step_seconds": mean_of([log.seconds for log in logs]), "bubble": mean_of([log.bubble for log in logs])}
    return {"loss": loss, **means, **per_stage}


def _is_gone(log: RankLog) -> bool:
    """Whether the process of a log ended without a report. False for one on another host, where this is unknown."""
    if log.begin is None or log.end is not None or log.begin.host != socket.gethostname() or log.is_open():
        return False
    log.refresh()  # it may have ended properly since the log was read
    return log.end is None
