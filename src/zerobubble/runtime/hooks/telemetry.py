"""Reports the numbers of each training step on one rank: to a function, a logger or TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zerobubble.arguments import takes
from zerobubble.errors import InputError
from zerobubble.runtime.split.weight_flops import FlopCounter
from zerobubble.runtime.step.hook import AttachedPipeline, StepHook, TrainingStep


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step as one rank saw it.

    Attributes:
        step: The number of the step, from 0.
        seconds: The time of `Pipeline.step` on this rank.
        bubble: The share of it (0 to 1) in which the rank ran no pass. Forwards that started over (`PostValidation`) count as bubble.
        loss: The mean loss.
        mfu: Model FLOPs utilization, the share of `peak_flops` that the rank reached; None without a peak.
        added_losses: The parts of the loss that stages added, by name.
    """

    step: int
    seconds: float
    bubble: float
    loss: float
    mfu: float | None
    added_losses: Mapping[str, float] = field(default_factory=dict)


OnStep = Callable[[StepReport], object]
"""Called with the report of each step."""


@takes()
class Telemetry(StepHook):
    """Calls `on_step(report)` with a `StepReport` of this rank after each training step, without communication.

    `peak_flops` is this rank's peak floating-point operations per second, such as 312e12. With it, reports have the MFU. It counts the
    operations of the first step of each input shape, which makes that step slower. Reading the loss waits for the device.
    """

    def __init__(self, on_step: OnStep, peak_flops: float | None = None) -> None:
        self.report = on_step
        self._peak = peak_flops
        self._counter = FlopCounter()

    def on_attach(self, pipeline: AttachedPipeline) -> None:
        """Raises `InputError` for a peak that is not above 0."""
        if self._peak is not None and not self._peak > 0:
            raise InputError(f"peak_flops is what a rank computes at most in a second, such as 312e12, got {self._peak}")

    def on_step_begin(self, step: TrainingStep) -> None:
        """Counts the operations of a step whose shapes are new."""
        if self._peak is not None and "flops" not in step.memo:
            step.run_passes_in(self._counting(step.memo))

    @contextmanager
    def _counting(self, memo: dict[str, Any]) -> Iterator[None]:
        with self._counter:
            yield
        memo["flops"] = self._counter.get_total_flops()

    def on_start_over(self, step: TrainingStep) -> None:
        """Discards the counts so far: these passes run again."""
        self._counter.flop_counts.clear()

    def on_step_end(self, step: TrainingStep) -> None:
        """Reports the step."""
        assert step.loss is not None
        seconds = step.seconds()
        busy = sum(end - begin for begin, end in step.times()) / 1e9
        bubble = 1 - busy / seconds
        mfu = None if self._peak is None else step.memo["flops"] / (seconds * self._peak)
        added = {name: part.item() for name, part in step.added_losses.items()}
        self.report(StepReport(step.number, seconds, bubble, step.loss.item(), mfu, added))


@takes()
def log_steps(logger: logging.Logger, every: int = 1, peak_flops: float | None = None) -> Telemetry:
    """Returns a hook that writes a line to `logger` every `every` steps; with `peak_flops` (see `Telemetry`) the line has the MFU."""

    def on_step(report: StepReport) -> None:
        if report.step % every == 0:
            mfu = "" if report.mfu is None else f", MFU {100 * report.mfu:.1f} %"
            added = "".join(f", {name} {part:.4f}" for name, part in report.added_losses.items())
            times = f"{1000 * report.seconds:.1f} ms, bubble {100 * report.bubble:.1f} %"
            text = f"step {report.step}: loss {report.loss:.4f}{added}, {times}{mfu}"
            logger.info(text)

    return Telemetry(on_step, peak_flops)


@takes()
def write_scalars(writer: Any, prefix: str = "pipeline/", peak_flops: float | None = None) -> Telemetry:
    """Returns a hook that passes the numbers of each step to `writer.add_scalar(name, value, step)`, such as TensorBoard's."""

    def on_step(report: StepReport) -> None:
        for name in ("seconds", "bubble", "loss", "mfu"):
            value = getattr(report, name)
            if value is not None:
                writer.add_scalar(f"{prefix}{name}", value, report.step)
        for name, part in report.added_losses.items():
            writer.add_scalar(f"{prefix}loss/{name}", part, report.step)

    return Telemetry(on_step, peak_flops)
