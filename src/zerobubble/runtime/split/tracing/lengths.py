"""Traces for inputs that differ only in sizes, such as batches of varying length: one symbolic trace for all of them if possible.

The first input is traced with constant sizes. When a second one arrives, the dimensions that changed become symbols, and the new trace
serves all inputs that satisfy its guards. A symbolic trace is used only if it is proven: with the sizes of an input that was traced with
constants, it must equal that input's graph, node by node and number by number. Otherwise each input gets its own trace, and `notes` has the
reason.
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
"""Traces the module with symbols for these dimensions of its inputs."""
_MAX_TRACES = 8
"""Maximum number of symbolic traces (one per branch), and of traces with constant sizes that are remembered."""


class Lengths:
    """The traces for inputs that differ only in sizes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._constant_traces: list[tuple[list[tuple[int, ...]], tuple[int, ...], Trace]] = []
        """The first inputs traced with constant sizes: their shapes, their sizes, and the trace."""
        self._symbolic_traces: list[Trace] = []
        self._symbols: set[Dim] = set()
        """Dimensions whose size has changed."""
        self._pinned: set[Dim] = set()
        """Dimensions that cannot be symbols: the forward converts them to numbers."""
        self._is_refused = False

    def find(self, owned: Sequence[Tensor], inputs: Sequence[Tensor]) -> Trace | None:
        """Returns a symbolic trace that is valid for these inputs."""
        sizes = sizes_of(inputs)
        return next(
            (trace for trace in self._symbolic_traces if trace.holds_for_sizes(sizes) and trace.holds_for_numbers(owned, inputs)), None
        )

    def make(self, inputs: Sequence[Tensor], make: MakeTrace) -> Trace:
        """Creates a trace for these inputs, symbolic if possible."""
        shapes = [tuple(tensor.shape) for tensor in inputs]
        self._symbols |= self._changed(shapes)
        general = self._try({(i, d) for i, d in self._symbols - self._pinned if shapes[i][d] > 1}, make)
        if general is not None and self._is_proven(general):
            return self._add(general)
        numbered = make(())
        if len(self._constant_traces) < _MAX_TRACES:
            self._constant_traces.append((shapes, sizes_of(inputs), numbered))
        if general is not None:
            if self._is_proven(general):  # now provable, if it took branches that had not been traced before
                return self._add(general)
            self._refuse("its graph with symbolic sizes differs from the one with constant sizes")
        return numbered

    def _changed(self, shapes: Sequence[tuple[int, ...]]) -> set[Dim]:
        """Returns the dimensions that differ from traced shapes and may be symbols. Sizes 0 and 1 may not: torch specializes them."""
        changing: set[Dim] = set()
        for traced, _, _ in self._constant_traces:
            sizes = {(i, d): {size, traced[i][d]} for i, shape in enumerate(shapes) for d, size in enumerate(shape)}
            changed = {dim: both for dim, both in sizes.items() if len(both) > 1}
            if all(min(both) > 1 for both in changed.values()):
                changing |= changed.keys()
        return changing

    def _try(self, dims: set[Dim], make: MakeTrace) -> Trace | None:
        """Traces with symbols for these dimensions, except those that the forward converts to numbers."""
        if self._is_refused or not dims or len(self._symbolic_traces) == _MAX_TRACES:
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
        self.notes.append(f"traced again for each size of {names}: its forward converts it to a number")
        return self._try(dims - pinned, make)

    def _is_proven(self, general: Trace) -> bool:
        """Returns whether a symbolic trace reproduces the graph of an input that was traced with constant sizes."""
        return any(general.holds_for_sizes(sizes) and general.is_general_of(trace, sizes) for _, sizes, trace in self._constant_traces)

    def _add(self, general: Trace) -> Trace:
        self._symbolic_traces.append(general)
        return general

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        self.notes.append(f"traced again for inputs of each size: {reason}")
