"""The traces for inputs that differ in sizes alone, such as batches of other lengths: one trace with symbols serves them all if it can.

The first input is traced with its sizes as numbers. With the second, the sizes that have changed become symbols, and the trace serves all
inputs for which its guards hold. It is trusted only if its graph, with the sizes of an input that was traced with numbers, is that input's
graph, node by node and number by number. Otherwise each input is traced with its numbers, and `notes` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.runtime.split.graphs.symbolic_sizes import NotGeneralError
from zerobubble.runtime.split.tracing.symbols import Dim, sizes_of
from zerobubble.runtime.split.tracing.trace import Trace

MakeTrace: TypeAlias = Callable[[Collection[Dim]], Trace]
"""Traces the module, with symbols for these dimensions of its inputs."""
_MOST = 8
"""Traces with symbols, one for each branch, and inputs traced with numbers that are remembered."""


class Lengths:
    """The traces for inputs that are alike but for their sizes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._numbered: list[tuple[list[tuple[int, ...]], tuple[int, ...], Trace]] = []
        """The first inputs that were traced with numbers: their shapes, their sizes, and the trace."""
        self._general: list[Trace] = []
        self._symbols: set[Dim] = set()
        """Dimensions that have changed."""
        self._pinned: set[Dim] = set()
        """Dimensions that are no symbols: the forward makes numbers of them."""
        self._is_refused = False

    def find(self, owned: Sequence[Tensor], inputs: Sequence[Tensor]) -> Trace | None:
        """A trace with symbols that holds for these inputs."""
        sizes = sizes_of(inputs)
        return next((trace for trace in self._general if trace.holds_for_sizes(sizes) and trace.holds_for_numbers(owned, inputs)), None)

    def make(self, inputs: Sequence[Tensor], make: MakeTrace) -> Trace:
        """A new trace for these inputs, with symbols if there may be one."""
        shapes = [tuple(tensor.shape) for tensor in inputs]
        self._symbols |= self._changed(shapes)
        general = self._try({(i, d) for i, d in self._symbols - self._pinned if shapes[i][d] > 1}, make)
        if general is not None and self._is_proven(general):
            return self._add(general)
        numbered = make(())
        if len(self._numbered) < _MOST:
            self._numbered.append((shapes, sizes_of(inputs), numbered))
        if general is not None:
            if self._is_proven(general):  # not before, if it took other branches than those that were traced
                return self._add(general)
            self._refuse("its graph with symbols for sizes is not the one with numbers")
        return numbered

    def _changed(self, shapes: Sequence[tuple[int, ...]]) -> set[Dim]:
        """The dimensions in which these shapes differ from some that were traced, if they may be symbols: 0 and 1 may not."""
        found: set[Dim] = set()
        for known, _, _ in self._numbered:
            sizes = {(i, d): {size, known[i][d]} for i, shape in enumerate(shapes) for d, size in enumerate(shape)}
            changed = {dim: both for dim, both in sizes.items() if len(both) > 1}
            if all(min(both) > 1 for both in changed.values()):
                found |= changed.keys()
        return found

    def _try(self, dims: set[Dim], make: MakeTrace) -> Trace | None:
        """A trace with symbols for these dimensions, or those of them of which the forward makes no numbers."""
        if self._is_refused or not dims or len(self._general) == _MOST:
            return None
        try:
            trace = make(dims)
        except (NotGeneralError, InputError) as error:
            self._refuse(str(error))
            return None
        pinned = trace.pinned
        if not pinned:
            return trace
        self._pinned |= pinned
        names = ", ".join(f"dimension {d} of input {i}" for i, d in sorted(pinned))
        self.notes.append(f"traced anew for each size of {names}: its forward makes a number of it")
        return self._try(dims - pinned, make)

    def _is_proven(self, general: Trace) -> bool:
        """Whether a trace with symbols gives the graph of an input that was traced with numbers."""
        return any(general.holds_for_sizes(sizes) and general.is_general_of(trace, sizes) for _, sizes, trace in self._numbered)

    def _add(self, general: Trace) -> Trace:
        self._general.append(general)
        return general

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        self.notes.append(f"traced anew for inputs of each size: {reason}")
