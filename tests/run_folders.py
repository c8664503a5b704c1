"""Run folders as `zb.hooks.Telemetry` leaves them, written without ranks: of a schedule that takes its planned times, except as given."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from zerobubble import Costs, Schedule, make, simulate
from zerobubble.run_folder import BEGIN, END, FORM, HEADER, StepReport, detail_name, log_name, to_line
from zerobubble.timeline import Timeline

SCHEDULE = make("zb-h1", 2, 4)
COSTS = Costs.from_ms((10, 10), (10, 10), (8, 8), 0.5)


class Recorded:
    """A run of two ranks in `folder`, as recorded so far. `slow` is what F, B and W of stage 1 take, as multiples of their plan."""

    def __init__(self, folder: Path, schedule: Schedule = SCHEDULE, costs: Costs | None = COSTS, slow: float = 1.0) -> None:
        self.folder, self.schedule, self.slow = folder, schedule, slow
        self.began = time.time() - 100
        folder.mkdir(exist_ok=True)
        given = None if costs is None else costs.to_dict()
        (folder / HEADER).write_text(json.dumps({"format": FORM, "schedule": schedule.to_text(), "costs": given}))
        for rank in range(2):
            self.write(rank, {BEGIN: FORM, "at": self.began, "host": "elsewhere", "pid": 1, "ranks": 2})

    def write(self, rank: int, line: dict[str, Any]) -> None:
        """Append a line to the log of a rank."""
        with (self.folder / log_name(rank)).open("a") as file:
            file.write(to_line(line))

    def step(self, number: int, loss: float = 1.0, at: float | None = None, seconds: float = 0.2, bubble: float = 0.25) -> None:
        """Record a step on both ranks."""
        for rank in range(2):
            slow = self.slow if rank else 1.0
            passes = {f"{rank}{kind}": slow * ms / 1000 for kind, ms in (("F", 10), ("B", 10), ("W", 8))}
            report = StepReport(number, seconds, bubble, loss, None, {}, passes, {1 - rank: 0.01 * (rank + 1)}, 4 * (rank + 1))
            self.write(rank, {"at": time.time() if at is None else at, **report.to_dict()})

    def details(
        self, number: int, timeline: Timeline | None = None, slot: int = 0, ranks: tuple[int, ...] = (0, 1), seconds: float = 0.2
    ) -> None:
        """Record all passes of a step that took `seconds` as a whole."""
        data = (timeline or simulate(self.schedule, COSTS)).to_dict()
        for rank in ranks:
            clocks = {"host": f"host {rank}", "counter": 1_000 * rank, "time": 5_000_000}
            rows = [[op, start, end] for op, start, end, *_ in data["rows"][rank]]
            parts = {"rows": rows, "memory": [], "marks": [], "reductions": [], "copies": []}
            text = to_line({"step": number, "seconds": seconds, "name": self.schedule.name, "clocks": clocks, **parts})
            (self.folder / detail_name(rank, slot)).write_text(text)

    def end(self, rank: int, failure: dict[str, Any] | None = None) -> None:
        """Write the last line of a rank."""
        self.write(rank, {END: failure, "at": time.time()})


def on_this_host(run: Recorded, rank: int, pid: int) -> None:
    """Begin a rank again, in a process of this host."""
    run.write(rank, {BEGIN: FORM, "at": run.began, "host": socket.gethostname(), "pid": pid, "ranks": 2})
