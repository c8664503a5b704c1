"""Live numbers: what a rank tells of each step by itself, and where it can be told to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from zerobubble.errors import InputError
from zerobubble.ir import Op
from zerobubble.runtime.values.shapes import Known


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step as one rank saw it.

    `step` counts from 0, `seconds` is how long `Pipeline.step` took, `bubble` the share of it (0 to 1) in which the rank ran no pass;
    of forwards that started over (`PostValidation`), the first time is bubble. `loss` is the mean loss. `mfu` is the rank's share of its
    `peak_flops`, None where the pipeline was not given them.
    """

    step: int
    seconds: float
    bubble: float
    loss: float
    mfu: float | None


OnStep = Callable[[StepReport], object]


def busy_seconds(spans: Sequence[tuple[Op, int, int]]) -> float:
    """How long passes ran; overlapped ones, which have the same times, count once."""
    return sum(end - begin for begin, end in {(begin, end) for _, begin, end in spans}) / 1e9


class FlopBook:
    """The floating-point operations of a step on this rank, counted once for each set of message shapes, against a `peak` per second."""

    def __init__(self, peak: float) -> None:
        if not peak > 0:
            raise InputError(f"peak_flops is what a rank computes at most in a second, such as 312e12, got {peak}")
        self._peak = peak
        self._last = 0
        self._counter = FlopCounterMode(display=False)

    @contextmanager
    def counting(self, known: Known) -> Iterator[None]:
        """Count the operations of a step inside, unless they are `known`."""
        if known.flops is None:
            with self._counter:
                yield
            known.flops = self._counter.get_total_flops()
        else:
            yield
        self._last = known.flops

    def counting_last(self, goes_on: Callable[[], bool]) -> Callable[[], bool]:
        """`goes_on`; when it lets a step start over, what was counted before is forgotten."""

        def asked() -> bool:
            stood = goes_on()
            if not stood:
                self._counter.flop_counts.clear()
            return stood

        return asked

    def mfu(self, seconds: float) -> float:
        """The share of the peak that the last step reached in `seconds`."""
        return self._last / (seconds * self._peak)


def log_steps(logger: logging.Logger, every: int = 1) -> OnStep:
    """An `on_step` that writes a line to `logger` every `every` steps."""

    def told(report: StepReport) -> None:
        if report.step % every == 0:
            mfu = "" if report.mfu is None else f", MFU {100 * report.mfu:.1f} %"
            text = f"step {report.step}: loss {report.loss:.4f}, {1000 * report.seconds:.1f} ms, bubble {100 * report.bubble:.1f} %{mfu}"
            logger.info(text)

    return told


def write_scalars(writer: Any, prefix: str = "pipeline/") -> OnStep:
    """An `on_step` that gives every number to `writer.add_scalar(name, value, step)`, as TensorBoard's `SummaryWriter` takes them."""

    def told(report: StepReport) -> None:
        for name in ("seconds", "bubble", "loss", "mfu"):
            value = getattr(report, name)
            if value is not None:
                writer.add_scalar(f"{prefix}{name}", value, report.step)

    return told
