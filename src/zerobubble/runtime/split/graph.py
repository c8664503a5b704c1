"""A stage split by its graph: the module is traced once per kind of input, and B and W are parts of its backward graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.split.compiled.capture import Part, Slots
from zerobubble.runtime.split.compiled.compiler import Compiler, require_compiler
from zerobubble.runtime.split.compiled.part import PartMaker
from zerobubble.runtime.split.compiled.pending_weights import PendingWeights
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.split.splitter import go_back
from zerobubble.runtime.split.tracing.traces import Traces
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.payload import Cotangents, Tensors
from zerobubble.runtime.values.skips import refusing


class GraphSplitter:
    """Runs the passes of stage `index` by its traced graph; with `compiled`, each part is compiled by inductor.

    The first forward of inputs of new shapes, strides or types traces the module, and so does one in another state of Python, under
    another autocast, or with other parameters frozen. On a stage whose inputs have no gradient B still does the chain back to the first
    parameters, so that B and W weigh as on the other stages. `traces` are those that are kept.

    Raises `InputError` for what a graph cannot honour: hooks, compiled parts, modules that cannot be traced or that change
    themselves in a forward, and no compiler where one is needed. The message names the stage and the remedy.
    """

    splits = True
    ends_by_parameter = False

    def __init__(self, module: nn.Module, index: int, gradients: Gradients, *, compiled: bool = False, cuda_graphs: bool = False) -> None:
        self._module = module
        self._index = index
        self._gradients = gradients
        self._way = "compiled" if compiled else "graph"
        self._parameters = tuple(module.parameters())
        self._meter: Meter | None = None
        self._slots = Slots() if cuda_graphs else None
        self._left_by_b: PendingWeights | None = None
        self._pending: dict[int, PendingWeights] = {}
        self._compiler = Compiler(f"stage {index}") if compiled else None
        make_part = PartMaker(lambda: self.traces.owned.tensors, compiler=self._compiler, slots=self._slots)
        try:
            self.traces = Traces(module, make_part, self._leave, f"stage {index}")
        except InputError as error:
            raise self._refusal(error) from error
        if compiled:
            require_compiler((*module.parameters(), *module.buffers()), index)

    def begin(self, parameters: tuple[nn.Parameter, ...], meter: Meter | None) -> None:
        self._parameters = parameters
        self._meter = meter
        self.traces.begin()

    def stepping(self) -> AbstractContextManager[object]:
        return nullcontext()

    def forward(self, microbatch: int, inputs: Tensors) -> Callable[[], Any]:
        self._enter_slot(microbatch)
        try:
            with refusing("a graph does not repeat it"):
                trace, tensors = self.traces.find(inputs)
        except InputError as error:
            raise self._refusal(error) from error
        return partial(trace.run, self.traces.owned.tensors, tensors)

    def backward(self, microbatch: int, edges: list[Any], gradients: Cotangents) -> None:
        self._enter_slot(microbatch)
        go_back(edges, gradients)
        if self._left_by_b is not None:
            self._pending[microbatch] = self._left_by_b
            self._left_by_b = None

    def weight(self, microbatch: int) -> None:
        self._enter_slot(microbatch)
        pending = self._pending.pop(microbatch, None)
        if pending is not None:
            with torch.no_grad():
                pending.run(self._gradients)
        if self._slots is not None:
            self._slots.leave(microbatch)

    def begin_tail(self, microbatches: Sequence[int], complete: Callable[[Collection[nn.Parameter]], object]) -> None:
        """A graph computes the gradients of all parameters together."""

    def held(self, microbatch: int | None = None) -> Iterable[Tensor]:
        chosen = [pending for number, pending in self._pending.items() if microbatch in (None, number)]
        return [tensor for pending in chosen for tensor in pending.kept]

    def clear(self) -> None:
        self._pending.clear()
        self._left_by_b = None
        if self._slots is not None:
            self._slots.clear()

    def count(self) -> None:
        """The graph says how much W does; there is nothing to count."""

    def report(self) -> SplitReport:
        """The split of the last trace; the share is None before the first forward, and where no product gives a weight gradient."""
        split = None if self.traces.last is None else self.traces.last.split
        if split is None:
            return SplitReport(self._index, self._way, None, (), notes=tuple(self.traces.notes))
        share = split.flops_in_w / split.weight_flops if split.weight_flops else None
        names = [name for name, _ in self._module.named_parameters()]
        at_once = tuple(f"{names[i]}: {reason}" for i, reason in split.reasons.items())
        notes = (*self.traces.notes, *(() if self._compiler is None else self._compiler.notes))
        return SplitReport(self._index, self._way, share, at_once, notes=notes)

    def _leave(self, w: Part, waiting: tuple[int, ...], kept: list[Tensor]) -> None:
        """Called by the backward of a trace with what this B leaves for W."""
        parameters = [self._parameters[i] for i in waiting]
        self._left_by_b = PendingWeights(w, parameters, kept, self._meter)

    def _enter_slot(self, microbatch: int) -> None:
        if self._slots is not None:
            self._slots.enter(microbatch)

    def _refusal(self, error: InputError) -> InputError:
        """What to raise when this stage cannot be split, with the reason that `error` gives."""
        return InputError(
            f"stage {self._index} cannot be split by its graph: {error}; "
            f'give split={{{self._index}: "deferred"}}, or split={{{self._index}: "whole"}} to leave it whole'
        )
