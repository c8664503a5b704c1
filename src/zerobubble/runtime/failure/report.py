"""One failure in words: what is told to every rank, and the exception that each of them raises."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from zerobubble.errors import PipelineError
from zerobubble.runtime.failure.error_text import describe
from zerobubble.runtime.transport.contact import NOBODY


class RankStatus(NamedTuple):
    """What a rank does, such as `waiting for the loss`, the `peer` it waits for, the `reason` why it gave up, if it did, and its pass.

    `pipeline` names the one in whose call it is, as its own process counts them. `stood_still` are the seconds for which its process has
    just stood still. Where it waits for everybody, these are the ranks `among` which it does something, all of them if there are none.
    `in_call` are the seconds since it entered the call of the pipeline that it is in.
    """

    doing: str
    peer: int = NOBODY
    reason: str = ""
    op: str = ""
    pipeline: str = ""
    stood_still: float = 0.0
    among: tuple[int, ...] = ()
    in_call: float = 0.0


class FailureReport(NamedTuple):
    """Who failed, at which pass or action, and why. `rank` is -1 where no single rank is to blame; `absent` ranks do not answer."""

    rank: int
    op: str
    message: str
    absent: tuple[int, ...] = ()


class HoldsMicrobatches(Protocol):
    """A stage, as far as a report knows it."""

    def in_flight(self) -> tuple[int, int]:
        """The microbatches that wait for a backward pass, and the bytes held for them."""


def error_of(report: FailureReport) -> PipelineError:
    """The exception that tells of a failure."""
    return PipelineError(report.message, rank=report.rank if report.rank >= 0 else None, op=report.op or None)


def describe_error(error: BaseException, stages: Mapping[int, HoldsMicrobatches]) -> str:
    """An error in words, with the notes added to it; where memory ran out, with what the stages hold and what would help."""
    told = describe(error)
    if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in told:
        return told
    remedy = "choose a schedule that holds less, plan one within a memory limit, or cut smaller microbatches"
    return "; ".join((told, *_held(stages), remedy))


def _held(stages: Mapping[int, HoldsMicrobatches]) -> list[str]:
    """What the stages hold, in words; none where it cannot be counted, as without memory for it."""
    try:
        in_flight = {index: stage.in_flight() for index, stage in stages.items()}
    except Exception:  # noqa: BLE001 - the error that is described matters more
        return []
    held = [f"stage {index} held {size} bytes for {count} microbatches in flight" for index, (count, size) in in_flight.items()]
    return [", ".join(held)] if held else []


def forget_locals(error: BaseException) -> None:
    """Forget the local variables on the way of an error and of those that led to it, which would keep activations and connections alive.

    Frames that still run keep theirs.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            left += [found.__cause__, found.__context__]
