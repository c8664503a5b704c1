"""Watches the forwards of a stage for values that pass from one microbatch to another, which one device keeps apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from zerobubble.runtime.stage.carried_state import CarriedState
from zerobubble.runtime.stage.unsaved_reads import UnsavedReads
from zerobubble.runtime.values.payload import Tensors


class ForwardWatch:
    """Compares what the forwards of stage `index` leave behind, in steps 1, 2, 4, 8 and so on.

    Unsaved reads have their own count of the steps with several microbatches in flight, and of those with R: `profile` runs one at a time.
    """

    def __init__(self, module: nn.Module, index: int) -> None:
        self._carried_state = CarriedState(module, index)
        self._unsaved_reads = UnsavedReads(module, index)
        self._forwards, self._in_flight, self._recomputed = self._counts = (_Doubling(), _Doubling(), _Doubling())

    def begin(self) -> None:
        """Begins a step with the current parameters of the module."""
        for count in self._counts:
            count.begin()
        self._carried_state.begin()
        if self._in_flight.is_due:
            self._unsaved_reads.begin()

    @property
    def compares_attributes(self) -> bool:
        """Whether this step compares what forwards set."""
        return self._forwards.is_due

    @contextmanager
    def forward(self, inputs: Tensors, nodes_in_flight: Callable[[], Sequence[Any]]) -> Iterator[None]:
        """Context of the forward of a microbatch; `nodes_in_flight` returns where the backward passes of other microbatches begin.

        Raises `InputError` if the forward continues from the microbatch before, or overwrites what such a backward pass reads.
        """
        nodes = nodes_in_flight() if self._in_flight.is_due else ()
        self._forwards.happens()
        if nodes or not self._in_flight.is_due:
            self._in_flight.happens()
        with ExitStack() as checks:
            if nodes:
                checks.enter_context(self._unsaved_reads.forward(nodes))
            if self._forwards.is_due:
                checks.enter_context(self._carried_state.forward(inputs))
            yield

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Context of an R. Raises `InputError` if it changes a parameter."""
        self._recomputed.happens()
        with ExitStack() as checks:
            if self._recomputed.is_due:
                checks.enter_context(self._unsaved_reads.recomputing())
            yield


class _Doubling:
    """Counts the steps in which something happens; it is due in those with numbers 1, 2, 4, 8 and so on."""

    def __init__(self) -> None:
        self._number = 1
        self._has_happened = False
        self.is_due = True

    def begin(self) -> None:
        """Begins a step."""
        self._number += self._has_happened
        self._has_happened = False
        self.is_due = self._number & (self._number - 1) == 0

    def happens(self) -> None:
        """Notes that this step counts."""
        self._has_happened = True
