"""Reports the numbers of each training step on one rank: to a function, a logger, a run folder, TensorBoard or Weights & Biases."""

from __future__ import annotations

import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from os import PathLike
from statistics import median
from time import time
from typing import Any

from zerobubble.arguments import COUNT, NUMBER, Wanted, faults_among, function, instance, number, optional, takes
from zerobubble.costs import Costs
from zerobubble.errors import raise_faults
from zerobubble.ir import Kind, Op, Schedule
from zerobubble.run_folder import StepReport
from zerobubble.runtime.hooks.step_recorder import FolderKeeper, Keeper, Recorded, StepRecorder, tensorboard_keeper, wandb_keeper
from zerobubble.runtime.measure.trace import Records
from zerobubble.runtime.split.weight_flops import FlopCounter
from zerobubble.runtime.step.hook import AttachedPipeline, StepHook, TrainingStep
from zerobubble.timeline import Doing
from zerobubble.units import show_percent

OnStep = Callable[[StepReport], object]
"""Called with the report of each step."""


@takes()
class Telemetry(StepHook):
    """Reports each training step of this rank, without communication: to a function, a run folder, TensorBoard or Weights & Biases.

    A thread writes the folder, TensorBoard and Weights & Biases once a second, so that a slow disk delays no step. `zerobubble watch`
    shows a run folder while the run goes on (docs/watch.md). A run that is continued may use the same folder.

    On an accelerator, a report waits for the device to finish the step; with `every`, only some steps do.

    Args:
        on_step: `on_step(report)` is called with a `StepReport` after each step, in the thread that trains.
        peak_flops: This rank's peak floating-point operations per second, such as 312e12. With it, reports have the MFU. It counts the
            operations of the first step of each input shape, which makes that step slower.
        folder: The run folder. The hook must be on every rank, and each replica of a mesh needs a folder of its own.
        costs: The expected times and bytes of passes, from `Pipeline.profile` or a plan. With them, records have the drift of stage times,
            and `zerobubble watch` compares the run with its plan.
        tensorboard: A folder for TensorBoard; each rank writes a run of its own.
        wandb: A project of Weights & Biases, in which each rank has a run.
        every: Reports only steps with numbers that are multiples of it.
        detail_every: One in `detail_every` reports has all passes and messages, for the timeline, and the measured memory. In these steps,
            bytes held for backward are counted.

    Raises `InputError` if there is no receiver for the reports, if a number is out of range, if a package is missing, if the folder cannot
    be written, and if another process records this rank there.
    """

    def __init__(
        self,
        on_step: OnStep | None = None,
        peak_flops: float | None = None,
        *,
        folder: str | PathLike[str] | None = None,
        costs: Costs | None = None,
        tensorboard: str | PathLike[str] | None = None,
        wandb: str | None = None,
        every: int = 1,
        detail_every: int = 50,
    ) -> None:
        _refuse_wrong(locals())
        self.report = on_step
        self._peak = peak_flops
        self._counter = FlopCounter()
        self._folder, self._costs, self._tensorboard, self._wandb = folder, costs, tensorboard, wandb
        self._every, self._detail_every = every, detail_every
        self._recorder: StepRecorder | None = None
        self._has_details = False
        self._rank = 0

    def __repr__(self) -> str:
        parts = {"folder": self._folder, "tensorboard": self._tensorboard, "wandb": self._wandb}
        takers = [f"{name} {str(value)!r}" for name, value in parts.items() if value is not None]
        return f"<Telemetry to {', '.join(['on_step'] * (self.report is not None) + takers)}>"

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """Opens the receivers of the reports of `pipeline`."""
        self._rank = rank = pipeline.rank
        keepers: list[Keeper] = []
        self._pipeline = weakref.ref(pipeline)
        if self._folder is not None:
            keepers.append(FolderKeeper(self._folder, rank, pipeline.num_ranks, pipeline.schedule, self._costs))
        if self._tensorboard is not None:
            keepers.append(tensorboard_keeper(self._tensorboard, rank, self._costs))
        if self._wandb is not None:
            keepers.append(wandb_keeper(self._wandb, rank, self._costs))
        self._recorder = StepRecorder(keepers) if keepers else None

    def on_step_begin(self, step: TrainingStep) -> None:
        """Counts the operations of `step` if its shapes are new, and measures memory if it is one with details."""
        number, rest = divmod(step.number, self._every)
        self._has_details = self._recorder is not None and not rest and has_details(number, self._detail_every)
        step.measures_memory |= self._has_details
        if self._peak is not None and "flops" not in step.memo:
            step.run_passes_in(self._counting(step.memo))

    @contextmanager
    def _counting(self, memo: dict[str, Any]) -> Iterator[None]:
        with self._counter:
            yield
        memo["flops"] = self._counter.get_total_flops()

    def on_start_over(self, step: TrainingStep) -> None:
        """Discards the counts of `step` so far: these passes run again."""
        self._counter.flop_counts.clear()

    def on_step_end(self, step: TrainingStep) -> None:
        """Reports `step`."""
        if step.number % self._every:
            return
        assert step.loss is not None
        seconds = step.seconds()
        mfu = None if self._peak is None else step.memo["flops"] / (seconds * self._peak)
        # Read now: the caller owns the loss after the step, and may change it.
        loss, added = step.loss.item(), {name: part.item() for name, part in step.added_losses.items()}
        records, schedule, number = step.later_records(), step.schedule, step.number

        at, has_details = time(), self._has_details

        def recorded() -> Recorded:
            record = records()
            report = _report_of(number, seconds, loss, mfu, added, record, schedule)
            return Recorded(report, schedule, record if has_details else None, at)

        if self.report is not None:
            self.report(recorded().report)
        if self._recorder is not None:
            self._recorder.put(recorded, at_once=has_details)

    def on_close(self) -> None:
        """Ends the record of the run, with the error that ended it."""
        if self._recorder is not None:
            pipeline = self._pipeline()
            self._recorder.close(None if pipeline is None else pipeline.failure)
            self._recorder = None


def has_details(report: int, every: int) -> bool:
    """Whether a report has all passes: one in `every`, and early ones at growing distances, so that a short run has a late one.

    The first report has none, since the first step is slower than others.

    >>> [report for report in range(120) if has_details(report, 50)]
    [1, 2, 4, 8, 16, 32, 51, 101]
    """
    return report % every == min(1, every - 1) or (0 < report < every and report.bit_count() == 1)


def _report_of(
    number: int,
    seconds: float,
    loss: float,
    mfu: float | None,
    added: Mapping[str, float],
    records: Records,
    schedule: Schedule,
) -> StepReport:
    """Returns the report of a step from its records."""
    steps = Counter((begin, end) for _, begin, end in records.spans)
    busy = sum(end - begin for begin, end in steps)
    waits: dict[int, int] = defaultdict(int)
    for doing, value, begin, end in records.messages:
        if doing is Doing.WAIT:
            waits[schedule.rank_of(value.stage, value.microbatch)] += end - begin
    peak = max((held for _, held in records.memory), default=None)
    in_seconds = {rank: time / 1e9 for rank, time in sorted(waits.items())}
    return StepReport(number, seconds, 1 - busy / 1e9 / seconds, loss, mfu, added, _pass_seconds(records.spans, steps), in_seconds, peak)


def _pass_seconds(spans: Sequence[tuple[Op, int, int]], steps: Mapping[tuple[int, int], int]) -> dict[str, float]:
    """Returns the median seconds of the passes of each kind and stage, without overlapped passes, whose times cannot be separated.

    `steps` are the begins and ends of passes, with the number of passes in each.
    """
    times: dict[tuple[int, Kind], list[int]] = defaultdict(list)
    for (kind, stage, _), begin, end in spans:
        if steps[begin, end] == 1:
            times[stage, kind].append(end - begin)
    return {f"{stage}{kind}": median(durations) / 1e9 for (stage, kind), durations in times.items()}


_WANTED: Mapping[str, Wanted | type] = {
    "on_step": optional(function("report")),
    "peak_flops": optional(
        number(
            "the most floating-point operations that a rank computes in a second, such as 312e12",
            lambda value: NUMBER.accepts(value) and value > 0,
        )
    ),
    "folder": optional(instance(str, PathLike)),
    "costs": optional(Costs),
    "tensorboard": optional(instance(str, PathLike)),
    "wandb": optional(str),
    "every": COUNT,
    "detail_every": COUNT,
}


def _refuse_wrong(arguments: Mapping[str, Any]) -> None:
    """Raises `InputError` with all faults of the arguments of `Telemetry`."""
    costs, faults = arguments["costs"], faults_among(arguments, _WANTED)
    if all(arguments[name] is None for name in ("on_step", "folder", "tensorboard", "wandb")):
        faults.append("Telemetry needs on_step, folder, tensorboard or wandb, which take its reports")
    if isinstance(costs, Costs) and costs.shares:
        faults.append("costs have shares of microbatches, but stage times are compared with those of equal microbatches: leave costs out")
    faults += [
        f"{package} needs the package {package}, which is not installed: pip install {package}"
        for package in ("tensorboard", "wandb")
        if arguments[package] is not None and find_spec(package) is None
    ]
    raise_faults(faults)


@takes()
def log_steps(logger: logging.Logger, every: int = 1, peak_flops: float | None = None) -> Telemetry:
    """Returns a hook that writes a line to `logger` every `every` steps; with `peak_flops` (see `Telemetry`) the line has the MFU.

    Each rank that has the hook logs its own step time and bubble, after its rank in the pipeline. The loss is the same on all ranks.
    """

    def on_step(report: StepReport) -> None:
        if report.step % every == 0:
            mfu = "" if report.mfu is None else f", MFU {show_percent(report.mfu)}"
            added = "".join(f", {name} {part:.4f}" for name, part in report.added_losses.items())
            times = f"{1000 * report.seconds:.1f} ms, bubble {show_percent(report.bubble)}"
            text = f"rank {hook._rank}, step {report.step}: loss {report.loss:.4f}{added}, {times}{mfu}"
            logger.info(text)

    hook = Telemetry(on_step, peak_flops)
    return hook


@takes()
def write_scalars(writer: Any, prefix: str = "pipeline/", peak_flops: float | None = None) -> Telemetry:
    """Returns a hook that passes the numbers of each step to `writer.add_scalar(name, value, step)`, such as TensorBoard's.

    Args:
        writer: An object with the method `add_scalar`.
        prefix: What each name begins with.
        peak_flops: This rank's peak floating-point operations per second, for the MFU, as in `Telemetry`.
    """

    def on_step(report: StepReport) -> None:
        for name in ("seconds", "bubble", "loss", "mfu"):
            value = getattr(report, name)
            if value is not None:
                writer.add_scalar(f"{prefix}{name}", value, report.step)
        for name, part in report.added_losses.items():
            writer.add_scalar(f"{prefix}loss/{name}", part, report.step)

    return Telemetry(on_step, peak_flops)
