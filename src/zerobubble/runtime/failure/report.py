"""Describes a failure: the report that reaches every rank, and the exception that each rank raises."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from zerobubble.error_reports.text import describe
from zerobubble.errors import PipelineError
from zerobubble.runtime.transport.contact import NOBODY


class RankStatus(NamedTuple):
    """What a rank does, and for whom it waits.

    Attributes:
        doing: What it does, such as `waiting for the loss`.
        peer: The rank that it waits for.
        reason: Why it stopped waiting, or left the pipeline early; empty while it waits.
        op: The current pass or action.
        pipeline: The name of the pipeline in whose call it is, as its own process numbers them.
        stalled_s: The seconds for which its process has recently stalled.
        among: The ranks of a collective that it waits in; empty for all.
        in_call: The seconds since it entered the current call.
        call: The method that it calls; empty if it has no name.
    """

    doing: str
    peer: int = NOBODY
    reason: str = ""
    op: str = ""
    pipeline: str = ""
    stalled_s: float = 0.0
    among: tuple[int, ...] = ()
    in_call: float = 0.0
    call: str = ""


class FailureReport(NamedTuple):
    """Which rank failed, at which pass or action, and why. `rank` is -1 if no single rank is to blame; `absent` ranks do not answer,
    or have left without an error."""

    rank: int
    op: str
    message: str
    absent: tuple[int, ...] = ()


class HoldsMicrobatches(Protocol):
    """A stage, as far as a report uses it."""

    def in_flight(self) -> tuple[int, int]:
        """Returns the number of microbatches that wait for a backward pass, and the bytes held for them."""


def error_of(report: FailureReport, rank: int) -> PipelineError:
    """Returns the exception that `rank` raises for a report."""
    culprit = report.rank if report.rank >= 0 else None
    return PipelineError(report.message, rank=culprit, op=report.op or None, is_of_other_rank=culprit not in (None, rank))


def describe_error(error: BaseException, stages: Mapping[int, HoldsMicrobatches]) -> str:
    """Describes an error with its notes. If memory ran out, adds the memory that stages hold and the remedies."""
    text = describe(error)
    if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in text:
        return text
    remedy = "choose a schedule that holds less, plan one within a memory limit, or use smaller microbatches"
    return "; ".join((text, *_held(stages), remedy))


def _held(stages: Mapping[int, HoldsMicrobatches]) -> list[str]:
    """Describes the memory that stages hold. Empty if counting fails too, as it may without memory."""
    try:
        in_flight = {index: stage.in_flight() for index, stage in stages.items()}
    except Exception:  # noqa: BLE001 - the error that is described matters more
        return []
    held = [f"stage {index} held {size} bytes for {count} microbatches in flight" for index, (count, size) in in_flight.items()]
    return [", ".join(held)] if held else []


def forget_locals(error: BaseException) -> None:
    """Clears the local variables in the tracebacks of an error and its causes: they would keep activations and connections alive.

    Frames that are still running keep theirs.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        current = left.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            traceback.clear_frames(current.__traceback__)
            left += [current.__cause__, current.__context__]
