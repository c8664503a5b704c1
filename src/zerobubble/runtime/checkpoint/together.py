"""What the processes that save or load together do to agree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from zerobubble.errors import InputError

Answer = TypeVar("Answer")


class Together(Protocol):
    """The processes that save or load together; `rank` counts them."""

    rank: int
    num_ranks: int

    def activity(self, when: str) -> AbstractContextManager[None]:
        """Whatever fails inside is told to all ranks."""

    def alike(self) -> AbstractContextManager[None]:
        """An `InputError` raised inside is raised by all ranks, and leaves the pipeline open."""

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Everyone's `value`, in rank order, on every rank."""


def agreed(together: Together, make: Callable[[], Answer]) -> Answer:
    """What `make` gives; where it raises `InputError` on one rank, all of them raise it, with what is wrong on any."""
    made, fault = [], ""
    try:
        made.append(make())
    except InputError as error:
        fault = str(error)
    faults = faults_of_all(together, fault, "comparing what is wrong")
    if faults:
        with together.alike():
            raise InputError(faults)
    return made[0]


def faults_of_all(together: Together, fault: str, doing: str) -> str:
    """What is wrong on any rank, each fault once; all ranks call it."""
    return "; ".join(dict.fromkeys(fault for fault in together.gather(fault, doing) if fault))
