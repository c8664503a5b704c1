"""A run folder as a whole: its ranks, whether it runs or why it ended, and the last step that all ranks recorded in detail."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from zerobubble.costs import Costs
from zerobubble.errors import InputError, ZeroBubbleError
from zerobubble.ir import Schedule
from zerobubble.run_folder import FORM, HEADER, NUM_DETAILS, detail_name
from zerobubble.simulation import peak_memory, simulate
from zerobubble.timeline import Timeline
from zerobubble.watch.rank_log import RankLog
from zerobubble.watch.series import Series, mean_of

_RIGHT_FOLDER = "give the folder of zb.hooks.Telemetry(folder=...)"
SILENT_S = 60.0
"""Seconds without a step after which a run on another host is reported as silent."""
SILENT_STEPS = 20
"""The same, in steps of the run."""


class State(StrEnum):
    """The state of a run: it begins (no step yet), runs, has been silent for long, was closed, failed, or its processes are gone."""

    BEGINS = "begins"
    RUNS = "running"
    SILENT = "silent"
    CLOSED = "ended"
    FAILED = "failed"
    GONE = "gone"


class Status(NamedTuple):
    """The state of a run since `at` (unix time), why, and the rank and pass to blame if they are known."""

    state: State
    at: float
    why: str = ""
    rank: int | None = None
    op: str | None = None


class Run:
    """A run folder. `refresh` reads what is new.

    Attributes:
        schedule, costs: Those of the latest part of the run; costs are None if the hook had none.
        plan: The step as simulated with these costs.
        forecast: The most bytes that each rank holds for backward by the costs; empty without them.
        details: The latest step that every rank recorded in detail, whose number is `details_step`.
        series: The figures of each step: the loss, the seconds of the step and its bubble, and the seconds of each stage's passes.

    Raises `InputError` for a folder that is not a run, and for files of another form.
    """

    def __init__(self, folder: str) -> None:
        self.name = folder
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise InputError("there is no folder {folder}", folder=folder, remedy=_RIGHT_FOLDER)
        self._all_logs: dict[int, RankLog] = {}
        self.schedule: Schedule | None = None
        self.costs: Costs | None = None
        self.plan: Timeline | None = None
        self.forecast: tuple[int, ...] = ()
        self.details: Timeline | None = None
        self.details_step = -1
        self.series: dict[str, Series] = {}
        self._seen: dict[Path, int] = {}
        self._details_in: dict[Path, dict[str, Any]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what the ranks have written since the last time."""
        for path in self._folder.glob("rank-*.jsonl"):
            if found := re.fullmatch(r"rank-(\d+)\.jsonl", path.name):
                self._all_logs.setdefault(int(found[1]), RankLog(path))
        header = self._folder / HEADER
        missing = [name for name, is_there in ((HEADER, header.is_file()), ("rank-0.jsonl", bool(self._all_logs))) if not is_there]
        if missing:
            message = "{folder} is not a run folder: it has no {file}"
            raise InputError(message, folder=self.name, file=" and no ".join(missing), remedy=_RIGHT_FOLDER)
        for log in self._all_logs.values():
            log.refresh()
        if self._changed(header):
            self._read_header(header)
        self._read_details()
        self.series = series_of(list(self.logs.values()))

    def _changed(self, path: Path) -> bool:
        """Whether a file is another one than at the last call."""
        was, self._seen[path] = self._seen.get(path), path.stat().st_mtime_ns
        return was != self._seen[path]

    def _read_header(self, header: Path) -> None:
        data = self._read(header)
        if data.get("format") != FORM:
            message = "{file} has the form {got!v}, and this version of zerobubble reads {expected!v}"
            raise InputError(message, file=str(header), got=data.get("format"), expected=FORM, remedy="update zerobubble")
        try:
            self.schedule = Schedule.from_text(data["schedule"])
            self.costs = None if data["costs"] is None else Costs.from_dict(data["costs"])
            if self.costs is not None:
                self.plan, self.forecast = simulate(self.schedule, self.costs), peak_memory(self.schedule, self.costs)
        except (KeyError, TypeError, ZeroBubbleError) as error:
            raise InputError(
                "{file} is damaged: {cause}", file=str(header), cause=str(error), remedy="restore it, or record again"
            ) from error

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError("cannot read {file}: {cause}", file=str(path), cause=str(error)) from error
        if not isinstance(data, dict):
            raise InputError("cannot read {file}: it has no object", file=str(path))
        return data

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the latest part of the run has, of which some may not have begun."""
        begins = [log.begin for log in self._all_logs.values() if log.begin]
        return max(begins, key=lambda begin: begin.at).ranks if begins else len(self._all_logs)

    @property
    def logs(self) -> dict[int, RankLog]:
        """The logs of these ranks, in order."""
        return {rank: log for rank, log in sorted(self._all_logs.items()) if rank < self.num_ranks}

    @property
    def step(self) -> int:
        """The latest step that any rank has recorded; -1 before the first."""
        return max((log.last.step for log in self.logs.values() if log.last), default=-1)

    def _read_details(self) -> None:
        """Read the latest step that every rank recorded in detail, if it is new."""
        found: dict[int, dict[int, dict[str, Any]]] = {}
        for rank in self.logs:
            for slot in range(NUM_DETAILS):
                path = self._folder / detail_name(rank, slot)
                if path.is_file():
                    if self._changed(path) or path not in self._details_in:
                        self._details_in[path] = self._read(path)
                    data = self._details_in[path]
                    found.setdefault(data["step"], {})[rank] = data
        whole = [step for step, ranks in found.items() if len(ranks) == self.num_ranks]
        if whole and max(whole) != self.details_step:
            self.details_step = max(whole)
            self.details = timeline_of(found[self.details_step])

    def status(self) -> Status:
        """Return whether the run goes on, and otherwise when and why it ended."""
        logs = self.logs
        latest = max((log.begin.at for log in logs.values() if log.begin), default=0.0)
        # A rank that has not begun again still has the end of the part before.
        ended = [log.end for log in logs.values() if log.end is not None and log.end.at >= latest]
        failures = [end for end in ended if end.message]
        if failures:
            first = min(failures, key=lambda end: end.at)
            return Status(State.FAILED, first.at, first.message, first.rank, first.op)
        at = max((log.at for log in logs.values()), default=0.0) or latest
        gone = [rank for rank, log in logs.items() if _is_gone(log)]
        if gone:
            return Status(State.GONE, at, self._gone_text(gone), gone[0])
        if ended and len(ended) == len(logs):
            return Status(State.CLOSED, max(end.at for end in ended), "the pipeline was closed")
        if self.step < 0:
            return Status(State.BEGINS, latest, "no step has ended yet")
        quiet, limit = time.time() - at, max(SILENT_S, SILENT_STEPS * self.step_seconds)
        if quiet > limit:
            return Status(State.SILENT, at, f"no step has ended for {quiet:.0f} s; the last steps took {self.step_seconds:.2g} s each")
        return Status(State.RUNS, at)

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


def timeline_of(details: Mapping[int, dict[str, Any]]) -> Timeline:
    """Return the timeline of a step from what each rank recorded, in the clock of rank 0.

    Ranks of one host share a clock. Those of others are aligned by wall-clock time, and so only as exactly as the hosts' clocks agree.
    """
    first = details[min(details)]
    shifts = {rank: _shift(data["clocks"], first["clocks"]) for rank, data in details.items()}
    origin = min(row[1] + shifts[rank] for rank, data in details.items() for row in data["rows"])

    def moved(rank: int, name: str, places: tuple[int, ...]) -> list[list[Any]]:
        by = shifts[rank] - origin
        return [[value + by if place in places else value for place, value in enumerate(row)] for row in details[rank][name]]

    ranks = sorted(details)
    columns = {"rows": (1, 2), "memory": (0,), "marks": (1, 2), "reductions": (1, 2), "copies": (3, 4)}
    parts = {name: [moved(rank, name, places) for rank in ranks] for name, places in columns.items()}
    known = {name: rows for name, rows in parts.items() if name == "rows" or any(rows)}
    return Timeline.from_dict({"format": "zerobubble timeline 1", "name": first["name"], "source": "measured", **known})


def _shift(clocks: Mapping[str, Any], first: Mapping[str, Any]) -> int:
    if clocks["host"] == first["host"]:
        return 0
    return int((clocks["time"] - clocks["counter"]) - (first["time"] - first["counter"]))
