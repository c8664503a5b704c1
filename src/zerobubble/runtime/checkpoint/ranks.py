"""Lets the processes that save or load together agree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from zerobubble.errors import InputError

Answer = TypeVar("Answer")


class CheckpointRanks(Protocol):
    """The processes that save or load together: `rank` counts them from 0, and `numbers` are their numbers in errors."""

    rank: int
    num_ranks: int
    numbers: tuple[int, ...]

    def activity(self, when: str) -> AbstractContextManager[None]:
        """Returns a context in which any failure is reported to all ranks."""

    def agreed_errors(self) -> AbstractContextManager[None]:
        """Returns a context in which every rank raises the same `InputError`, which leaves the pipeline open."""

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Returns the `value` of each rank, in rank order."""


def agreed(ranks: CheckpointRanks, make: Callable[[], Answer]) -> Answer:
    """Returns what `make` returns. If it raises `InputError` on any rank, all ranks raise it, with the faults of all."""
    answers, fault = [], ""
    try:
        answers.append(make())
    except InputError as error:
        fault = str(error)
    faults = faults_of_all(ranks, fault, "waiting for the other ranks to make the same call")
    if faults:
        with ranks.agreed_errors():
            raise InputError(faults)
    return answers[0]


def faults_of_all(ranks: CheckpointRanks, fault: str, doing: str) -> str:
    """Returns the faults of all ranks, each once; all ranks call it."""
    return "; ".join(dict.fromkeys(fault for fault in ranks.gather(fault, doing) if fault))
