"""Keeps the reports of steps: in a run folder, in TensorBoard and in Weights & Biases.

A thread does all of this, so that a slow disk or network delays no step. It wakes once a second, because Python runs one thread at a time:
woken by each step, it would delay the passes of the next. If it falls behind by `MOST_WAITING` steps, steps are left out, and the next line
of the log has their number. A write that fails is logged once, and counts as left out.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple, Protocol

from zerobubble.costs import Costs
from zerobubble.errors import PipelineError
from zerobubble.ir import Schedule
from zerobubble.run_folder import BEGIN, FORM, HEADER, NUM_DETAILS, StepReport, detail_name, drifts, to_line
from zerobubble.runtime.hooks.rank_log_file import RankLogFile, writable
from zerobubble.runtime.measure.trace import Records
from zerobubble.whole_files import replace_text

MOST_WAITING = 1000
"""Steps that wait to be written."""
EVERY_S = 1.0
"""Seconds between two writes."""
STEPS_AT_ONCE = 8
"""After writing this many steps, the thread lets others run: a pass should not wait for a long write."""
CLOSING_S = 5.0
"""Seconds that closing waits for the last of them to be written."""

_log = logging.getLogger("zerobubble")


class Recorded(NamedTuple):
    """A step to keep: its report, its schedule, its records if all of its passes are kept, and when it ended (unix time)."""

    report: StepReport
    schedule: Schedule
    details: Records | None
    at: float


class Keeper(Protocol):
    """Where steps are kept, which its text names."""

    def keep(self, steps: Sequence[Recorded], left_out: int) -> None:
        """Keeps some steps; `left_out` steps before them are not kept."""

    def close(self, failure: PipelineError | None) -> None:
        """Ends the run, with its failure."""


class StepRecorder:
    """Hands steps to its `keepers` in a thread."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers
        # A deque and not a `Queue`, whose `put` would wake the thread.
        self._waiting: deque[Callable[[], Recorded]] = deque()
        self._num_refused = 0
        self._left_out = [0] * len(keepers)
        self._has_warned = False
        self._ends = False
        self._failure: PipelineError | None = None
        self._wake = Event()
        self._thread = Thread(target=self._run, name="zerobubble telemetry", daemon=True)
        self._thread.start()

    def put(self, step: Callable[[], Recorded], *, at_once: bool = False) -> None:
        """Keeps what `step()` returns in the thread, within a second or `at_once`; leaves the step out if too many wait."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(step)
        else:
            self._num_refused += 1
        if at_once:
            self._wake.set()

    def close(self, failure: PipelineError | None) -> None:
        """Ends the run. Returns after a few seconds even if not everything is written: a disk that hangs must not keep a process alive."""
        self._failure = failure
        self._ends = True
        self._wake.set()
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        refused, ends = 0, False
        while not ends:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            ends = self._ends  # before the steps are read, which may come while others are written
            before, refused = refused, self._num_refused
            self._write(refused - before)
        for keeper in self._keepers:
            self._try(keeper, partial(keeper.close, self._failure))

    def _write(self, refused: int) -> None:
        """Keeps the steps that wait; `refused` steps before them are left out."""
        steps = []
        for number in range(len(self._waiting)):
            if number and not number % STEPS_AT_ONCE:
                time.sleep(0.001)
            steps.append(self._waiting.popleft()())
        for place, keeper in enumerate(self._keepers if steps else ()):
            left_out = self._left_out[place] + refused
            is_kept = self._try(keeper, partial(keeper.keep, steps, left_out))
            self._left_out[place] = 0 if is_kept else left_out + len(steps)

    def _try(self, keeper: Keeper, write: Callable[[], None]) -> bool:
        """Returns whether `write` to `keeper` succeeded."""
        try:
            write()
        except Exception as error:  # noqa: BLE001 - a full disk, or anything in another package, does not end training
            if not self._has_warned:
                self._has_warned = True
                kind = type(error).__name__
                _log.warning("telemetry could not be written to %s, and training continues: %s: %s", keeper, kind, error)
            return False
        return True


class FolderKeeper:
    """Writes the files of one rank in a run folder. Raises `InputError` if the folder cannot be used, or another process records there.

    Only regular files in the folder are written, never what a link there points to. The folder itself may be a link.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, num_ranks: int, schedule: Schedule, costs: Costs | None) -> None:
        self._folder, self._rank, self._costs = Path(folder), rank, costs
        self._schedule: Schedule | None = None
        self._num_details = 0
        with writable(folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._log = RankLogFile(self._folder, rank)
        try:
            begin = {BEGIN: FORM, "at": time.time(), "host": socket.gethostname(), "pid": os.getpid(), "ranks": num_ranks}
            with writable(folder):
                self._note_schedule(schedule)
                self._log.begin(to_line(begin))
        except BaseException:
            self._log.close()
            raise

    def __str__(self) -> str:
        return f"the log of rank {self._rank} in '{self._folder}'"

    def keep(self, steps: Sequence[Recorded], left_out: int) -> None:
        """Appends a line for each step, and writes all passes of those for which they are to be kept."""
        for step in steps:
            if step.schedule is not self._schedule:
                self._note_schedule(step.schedule)
            if step.details is not None:
                self._write_details(step, step.details)
        lines = [{"at": step.at, **step.report.to_dict()} for step in steps]
        lines[0] |= {"left_out": left_out} if left_out else {}
        self._log.append("".join(map(to_line, lines)))

    def _note_schedule(self, schedule: Schedule) -> None:
        self._schedule = schedule
        if self._rank == 0:
            costs = None if self._costs is None else self._costs.to_dict()
            replace_text(self._folder / HEADER, to_line({"format": FORM, "schedule": schedule.to_text(), "costs": costs}))

    def _write_details(self, step: Recorded, records: Records) -> None:
        spans, memory, marks, sums, copies = records.shifted(0)
        clocks = {"host": socket.gethostname(), "counter": time.perf_counter_ns(), "time": time.time_ns()}
        parts = {"rows": spans, "memory": memory, "marks": marks, "reductions": sums, "copies": copies}
        report = {"step": step.report.step, "seconds": round(step.report.seconds, 9)}
        text = to_line({**report, "name": step.schedule.name, "clocks": clocks, **parts})
        replace_text(self._folder / detail_name(self._rank, self._num_details % NUM_DETAILS), text)
        self._num_details += 1

    def close(self, failure: PipelineError | None) -> None:
        """Writes the last line, and releases the log."""
        error = None if failure is None else {"message": str(failure), "rank": failure.rank, "op": failure.op}
        try:
            self._log.end(error)
        finally:
            self._log.close()


class ScalarKeeper:
    """Passes the numbers of each step to `write(numbers, step)` at a `place`, and calls `end()` when the run ends."""

    def __init__(
        self, place: str, write: Callable[[Mapping[str, float], int], object], end: Callable[[], object], costs: Costs | None
    ) -> None:
        self._place, self._write, self._end, self._costs = place, write, end, costs

    def __str__(self) -> str:
        return self._place

    def keep(self, steps: Sequence[Recorded], left_out: int) -> None:
        """Passes the numbers of each step."""
        for step in steps:
            self._write(scalars_of(step.report, self._costs), step.report.step)

    def close(self, failure: PipelineError | None) -> None:
        """Ends the run."""
        self._end()


def scalars_of(report: StepReport, costs: Costs | None = None) -> dict[str, float]:
    """Returns the numbers of a report by name; with `costs`, also the drift of stage times from them."""
    optional = {name: getattr(report, name) for name in ("seconds", "bubble", "loss", "mfu", "peak_bytes")}
    scalars = {name: float(value) for name, value in optional.items() if value is not None}
    scalars |= {f"loss/{name}": part for name, part in report.added_losses.items()}
    scalars |= {f"pass_seconds/{name}": seconds for name, seconds in report.passes.items()}
    scalars |= {f"waits_for_rank/{rank}": seconds for rank, seconds in report.waits.items()}
    return scalars | {f"drift/{name}": drift for name, drift in drifts(report.passes, costs).items()}


def tensorboard_keeper(folder: str | os.PathLike[str], rank: int, costs: Costs | None) -> ScalarKeeper:
    """Returns a keeper that writes events for TensorBoard, of each rank in a folder of its own."""
    from torch.utils.tensorboard import SummaryWriter

    with writable(folder):
        writer = SummaryWriter(str(Path(folder) / f"rank-{rank}"))

    def write(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(f"pipeline/{name}", value, step)

    return ScalarKeeper(f"the events of rank {rank} in '{folder}'", write, writer.close, costs)


def wandb_keeper(project: str, rank: int, costs: Costs | None) -> ScalarKeeper:
    """Returns a keeper that logs to a project of Weights & Biases, in a run per rank."""
    import wandb

    run = wandb.init(project=project, name=f"rank {rank}", group=os.environ.get("WANDB_RUN_GROUP"))

    def write(numbers: Mapping[str, float], step: int) -> None:
        run.log({f"pipeline/{name}": value for name, value in numbers.items()}, step=step)

    return ScalarKeeper(f"the run of rank {rank} in the project '{project}'", write, run.finish, costs)
