"""Splits a stage by its graph: traces the module once per kind of input, and runs B and W as parts of its backward graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter, addresses_of
from zerobubble.runtime.split.compiled.capture import CapturedPart, CaptureSlots, Part
from zerobubble.runtime.split.compiled.compiler import Compiler, require_compiler
from zerobubble.runtime.split.compiled.part import PartMaker
from zerobubble.runtime.split.layers.weight_work import refuse_changed
from zerobubble.runtime.split.report import InB, SplitReport
from zerobubble.runtime.split.splitter import Splitter, run_backward
from zerobubble.runtime.split.tracing.traces import Traces
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.payload import Cotangents, Tensors
from zerobubble.runtime.values.skips import refusing


class GraphSplitter(Splitter):
    """Runs the passes of stage `index` with its traced graph; with `compiled`, inductor compiles each part.

    The module is traced at the first forward for inputs of new shapes, strides or dtypes, for a new Python state, under another autocast,
    or with other parameters frozen. `traces` holds the traces. If no input of the stage requires grad, B still computes the chain back to
    the first parameters, so that B and W take about as long as on other stages.

    Raises `InputError` for what a graph cannot reproduce: hooks, compiled parts, modules that cannot be traced or that change themselves in
    a forward. Also raises it if a needed compiler is missing. The message names the stage and the remedy.
    """

    splits = True
    is_traced = True

    def __init__(self, module: nn.Module, index: int, gradients: Gradients, *, compiled: bool = False, cuda_graphs: bool = False) -> None:
        super().__init__(module, index)
        self._gradients = gradients
        self._way = "compiled" if compiled else "graph"
        self._parameters = tuple(module.parameters())
        self._meter: Meter | None = None
        self._slots = CaptureSlots() if cuda_graphs else None
        self._pending_of_b: PendingWeights | None = None
        self._pending: dict[int, PendingWeights] = {}
        self._compiler = Compiler(f"stage {index}") if compiled else None
        make_part = PartMaker(lambda: self.traces.owned.tensors, compiler=self._compiler, slots=self._slots)
        try:
            self.traces = Traces(module, make_part, self._set_pending, f"stage {index}")
        except InputError as error:
            raise self._refusal(error) from error
        if compiled:
            require_compiler((*module.parameters(), *module.buffers()), index)

    def begin(self, parameters: tuple[nn.Parameter, ...], meter: Meter | None) -> None:
        self._parameters = parameters
        self._meter = meter
        self.traces.begin()

    def refuse_hooks(self) -> None:
        try:
            self.traces.refuse_hooks()
        except InputError as error:
            raise self._refusal(error) from error

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
        run_backward(edges, gradients)
        if self._pending_of_b is not None:
            self._pending[microbatch] = self._pending_of_b
            self._pending_of_b = None

    def weight(self, microbatch: int) -> None:
        self._enter_slot(microbatch)
        pending = self._pending.pop(microbatch, None)
        if pending is not None:
            with torch.no_grad():
                pending.run(self._gradients)
        if self._slots is not None:
            self._slots.leave(microbatch)

    def held(self, microbatch: int | None = None) -> Iterable[Tensor]:
        chosen = [pending for number, pending in self._pending.items() if microbatch in (None, number)]
        return [tensor for pending in chosen for tensor in pending.kept]

    def clear(self) -> None:
        self._pending.clear()
        self._pending_of_b = None
        if self._slots is not None:
            self._slots.clear()

    def report(self) -> SplitReport:
        """Returns the split of the last trace. The share is None before the first forward, and if no product gives a weight gradient."""
        split = None if self.traces.last is None else self.traces.last.split
        if split is None:
            return SplitReport(self._index, self._way, None, (), notes=tuple(self.traces.notes))
        share = split.flops_in_w / split.weight_flops if split.weight_flops else None
        names = [name for name, _ in self._module.named_parameters()]
        in_b = tuple(InB(names[i], reason) for i, reason in split.reasons.items())
        notes = (*self.traces.notes, *(() if self._compiler is None else self._compiler.notes))
        return SplitReport(self._index, self._way, share, in_b, notes=notes)

    def _set_pending(self, w: Part, waiting: tuple[int, ...], kept: list[Tensor]) -> None:
        """Called by the backward of a trace with the work that this B defers to W."""
        parameters = [self._parameters[i] for i in waiting]
        self._pending_of_b = PendingWeights(w, parameters, kept, self._meter)

    def _enter_slot(self, microbatch: int) -> None:
        if self._slots is not None:
            self._slots.enter(microbatch)

    def _refusal(self, error: InputError) -> InputError:
        """Returns the error to raise if this stage cannot be split, with the reason of `error`."""
        remedy = f'give split={{{self._index}: "deferred"}}, or split={{{self._index}: "whole"}} to leave it whole'
        message = "stage {stage} cannot be split by its graph: {reason}; {remedy}"
        return InputError(message, stage=self._index, reason=str(error), remedy=remedy)


class PendingWeights:
    """Weight gradients of `parameters` that W computes with the graph `w` from the tensors `kept`; `meter` counts their bytes."""

    def __init__(self, w: Part, parameters: Sequence[nn.Parameter], kept: list[Tensor], meter: Meter | None) -> None:
        self.kept = kept
        self._w = w
        self._parameters = parameters
        self._versions = [tensor._version for tensor in kept]
        self._metered: list[Held] = [] if meter is None else [meter.hold(tensor) for tensor in kept]

    def run(self, gradients: Gradients) -> None:
        """Adds the gradients to `gradients`. Raises `InputError` if a tensor that W reads was changed in place after B."""
        for tensor, version in zip(self.kept, self._versions, strict=True):
            refuse_changed(tensor, version)
        has_first = any(gradients.get(parameter) is None for parameter in self._parameters)
        in_use = addresses_of(self.kept) if has_first else set()
        results = self._w(self.kept)
        if has_first and isinstance(self._w, CapturedPart):
            in_use |= addresses_of(results)  # its results are in static memory, which the next W overwrites
        for parameter, gradient in zip(self._parameters, results, strict=True):
            is_first = gradients.get(parameter) is None
            gradients.add(parameter, _own_tensor(parameter, gradient, in_use) if is_first else gradient)
        self._metered.clear()


def _own_tensor(parameter: nn.Parameter, gradient: Tensor, in_use: set[int]) -> Tensor:
    """Returns the tensor for a first `.grad`: the gradient itself, or a copy if its memory is shared (`in_use`) or its strides differ."""
    address = gradient.untyped_storage().data_ptr()
    is_own = address not in in_use and gradient.stride() == parameter.stride()
    in_use.add(address)
    return gradient if is_own else torch.empty_like(parameter).copy_(gradient)
