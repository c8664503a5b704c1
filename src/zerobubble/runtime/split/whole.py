"""No split: B computes all gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.split.splitter import arguments_of, run_backward
from zerobubble.runtime.values.payload import Cotangents, Tensors


class WholeSplitter:
    """Computes all gradients in B. `reason` is shown in the report."""

    splits = False
    completes_by_parameter = False

    def __init__(self, module: nn.Module, index: int, reason: str) -> None:
        self._module = module
        self._index = index
        self._reason = reason

    def begin(self, parameters: tuple[nn.Parameter, ...], meter: Meter | None) -> None:
        """Does nothing."""

    def stepping(self) -> AbstractContextManager[object]:
        return nullcontext()

    def forward(self, microbatch: int, inputs: Tensors) -> Callable[[], Any]:
        positional, named = arguments_of(inputs)
        return partial(self._module, *positional, **named)

    def backward(self, microbatch: int, edges: list[Any], gradients: Cotangents) -> None:
        run_backward(edges, gradients)

    def weight(self, microbatch: int) -> None:
        """Does nothing: B has computed the weight gradients."""

    def begin_tail(self, microbatches: Sequence[int], complete: Callable[[Collection[nn.Parameter]], object]) -> None:
        """Does nothing: B has completed all gradients."""

    def held(self, microbatch: int | None = None) -> Iterable[Tensor]:
        return ()

    def clear(self) -> None:
        """Does nothing: no tensors are kept."""

    def count(self) -> None:
        """Does nothing: W has no work."""

    def report(self) -> SplitReport:
        return SplitReport(self._index, "whole", 0.0, (f"every parameter: {self._reason}",))
