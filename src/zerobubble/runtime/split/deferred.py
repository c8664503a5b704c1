"""Splits a stage in eager mode: B computes input gradients and queues weight gradients layer by layer, and W computes them.

During a step, the `forward` of each supported layer is replaced on the instance by one that calls an autograd Function of ours. The
backward of that Function returns no gradient for the weight. Instead it queues the computation in the `WeightWork` of the microbatch, which
W runs. Layers without such a Function compute all gradients in B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.split.autocast import AutocastCopies
from zerobubble.runtime.split.layers.eligibility import fsdp2_parts, reasons_not_to_wait
from zerobubble.runtime.split.layers.stand_ins import shadowing
from zerobubble.runtime.split.layers.weight_tail import Complete, WeightTail
from zerobubble.runtime.split.layers.weight_work import StepContext, WeightWork
from zerobubble.runtime.split.report import InB, SplitReport, in_b
from zerobubble.runtime.split.splitter import Splitter, arguments_of, run_backward
from zerobubble.runtime.split.weight_flops import WeightFlops, flops_of, is_compiled
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.payload import Cotangents, Tensors


class DeferredSplitter(Splitter):
    """Defers the weight gradients of the supported layers of `module` to W, which adds them to `gradients`."""

    splits = True
    completes_by_parameter = True

    def __init__(self, module: nn.Module, index: int, gradients: Gradients) -> None:
        super().__init__(module, index)
        self._gradients = gradients
        self._copies = AutocastCopies()
        self._frees_weights = bool(fsdp2_parts(module))
        self._works: dict[int, WeightWork] = {}
        self._tail: WeightTail | None = None
        self._counts = False
        self._sample: int | None = None
        self._flops = 0
        self._share: float | None = None
        self._in_b: tuple[InB, ...] = ()
        self.begin(tuple(module.parameters()), None)

    def begin(self, parameters: tuple[nn.Parameter, ...], meter: Meter | None) -> None:
        self._parameters = parameters
        self._reasons = reasons_not_to_wait(self._module, parameters, in_grad=self._gradients.dtype is None)
        deferrable = frozenset(id(parameter) for parameter in parameters if parameter not in self._reasons)
        self._context = StepContext(deferrable, meter, self._gradients, self._copies, self._frees_weights)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        try:
            with shadowing(self._module):
                yield
        finally:
            self._copies.clear()

    def forward(self, microbatch: int, inputs: Tensors) -> Callable[[], Any]:
        work = self._works[microbatch] = WeightWork(self._context)
        positional, named = arguments_of(inputs)
        run: Callable[..., Any] = self._module
        if self._counts:
            self._counts = False
            self._sample = microbatch
            if not is_compiled(self._module):
                run = self._counted

        def call() -> Any:
            with work:
                return run(*positional, **named)

        return call

    def _counted(self, *positional: Any, **named: Any) -> Any:
        """Runs the module, and counts the FLOPs of its weight gradients."""
        with WeightFlops(parameter for parameter in self._parameters if parameter.requires_grad) as counted:
            output = self._module(*positional, **named)
        self._flops = counted.total if counted.is_complete else 0
        return output

    def backward(self, microbatch: int, edges: list[Any], gradients: Cotangents) -> None:
        work = self._works[microbatch]
        work.in_backward = True
        try:
            with work, work.followed(edges, gradients):
                run_backward(edges, gradients)
        finally:
            work.in_backward = False
        if microbatch == self._sample:
            trained = (parameter for parameter in self._parameters if parameter.grad is not None)
            self._in_b = in_b(self._module, work.weights(), trained, self._reasons)

    def begin_tail(self, microbatches: Sequence[int], complete: Complete) -> None:
        if self._flops and self._sample in microbatches:
            return  # the FLOPs of a W can be counted only if it does its own work
        works = [self._works.pop(microbatch) for microbatch in microbatches]
        self._tail = WeightTail(works, self._parameters, complete)

    def weight(self, microbatch: int) -> None:
        if self._tail is not None:
            self._tail.run_part()
            if self._tail.is_over:
                self._tail = None
            return
        work = self._works.pop(microbatch)
        if microbatch == self._sample and self._flops:
            self._share = min(1.0, flops_of(work.run) / self._flops)
            self._flops = 0
        else:
            work.run()

    def held(self, microbatch: int | None = None) -> Iterable[Tensor]:
        works = self._works.values() if microbatch is None else (self._works[microbatch],)
        in_tail = self._tail.held if microbatch is None and self._tail is not None else []
        return [*in_tail, *(tensor for work in works for tensor in work.held)]

    def clear(self) -> None:
        self._works.clear()
        self._tail = None

    def count(self) -> None:
        self._counts = True

    def report(self) -> SplitReport:
        return SplitReport(self._index, "deferred", self._share, self._in_b)
