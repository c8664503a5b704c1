"""One stage at work: forward, backward for the input, backward for the weights, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zerobubble.errors import InputError
from zerobubble.ir import Kind
from zerobubble.rules import used_stages
from zerobubble.runtime.measure.held_bytes import held_bytes
from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.measure.storages import addresses_of
from zerobubble.runtime.split.autocast import AutocastCopies, outside_of_autocast
from zerobubble.runtime.split.count import WeightFlops, flops_of, is_compiled
from zerobubble.runtime.split.gate import reasons_not_to_wait
from zerobubble.runtime.split.report import SplitReport, at_once
from zerobubble.runtime.split.work import StepContext, WeightWork, in_pass
from zerobubble.runtime.stage.skips import carry
from zerobubble.runtime.values.gradients import IN_GRAD, Gradients
from zerobubble.runtime.values.payload import Cotangents, Payload, Tensors, take_apart
from zerobubble.runtime.values.shapes import shapes_of

run_backward = Variable._execution_engine.run_backward
_AVERAGING = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "DistributedDataParallel",
    "torch.distributed._composable.replicate.DDP": "module under replicate()",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FullyShardedDataParallel",
}
"""Classes of modules that reduce gradients in the middle of a step, by name: most programs never import them."""


class Stage:
    """Runs the passes of one stage of the model.

    `forward` takes and gives the tensors at the stage's boundaries, detached; `backward` takes the gradients of those outputs that
    `differentiable` names and gives those of the inputs that can have one. With `split`, the weight gradients wait for `weight`.
    `gradients` says where they are summed. `begin` comes before a step, and finds the parameters that the module has now.

    `forward` runs under the caller's autocast; `backward` and `weight` run outside of it, as torch asks, so that what was computed in full
    precision goes back in full precision.

    Raises `InputError` for a module that averages its gradients itself, in the middle of a step.
    """

    def __init__(self, module: nn.Module, index: int, *, split: bool, gradients: Gradients = IN_GRAD) -> None:
        averaging = [name for part in module.modules() for name in _kinds(part) if name in _AVERAGING]
        if averaging:
            raise InputError(
                f"stage {index} holds a {_AVERAGING[averaging[0]]}, which averages gradients before every microbatch has added to them; "
                "give the module without it, and average `.grad` over its group after each step"
            )
        self.module = module
        self.index = index
        self.meter: Meter | None = None
        self.split = split
        self._gradients = gradients
        self._copies = AutocastCopies()
        self._find_parameters()
        self._saved: dict[int, tuple[Tensors, list[Any], WeightWork | None]] = {}
        self._work: dict[int, WeightWork] = {}
        self._counts = False
        self._sample: int | None = None
        self._flops = 0
        self._share: float | None = None
        self._at_once: tuple[str, ...] = ()

    def begin(self, meter: Meter | None) -> None:
        """A step begins, whose bytes `meter` counts."""
        self.meter = meter
        self._find_parameters()

    def end(self) -> None:
        """The step is over."""
        self._copies.clear()

    def _find_parameters(self) -> None:
        self.parameters = tuple(self.module.parameters())
        self._reasons = reasons_not_to_wait(self.module) if self.split else {}
        can_wait = frozenset(parameter for parameter in self.parameters if parameter not in self._reasons)
        self._context = StepContext(can_wait, self.meter, self._gradients, self._copies)

    def count(self) -> None:
        """Count what W does in the next step, by its first microbatch, for `report`."""
        self._counts = True

    def forward(self, microbatch: int, inputs: Tensors, finish: Callable[[Any], Tensor] | None = None) -> Tensors:
        """F: run the module on `inputs`. `finish` (the loss, on the last stage) turns its output into the scalar to go back from."""
        work = WeightWork(self._context) if self.split else None
        run = self._run
        if self._counts:
            self._counts, self._sample, run = False, microbatch, self._run_counting
        with in_pass(work):
            outputs = carry(run, inputs, finish, self.index)
        edges = [_edge(y) for y in outputs if y.requires_grad]
        leaves = tuple(x for x in inputs if x.requires_grad)
        self._saved[microbatch] = (leaves, edges, work)
        return outputs

    def infer(self, inputs: Tensors, finish: Callable[[Any], Tensor] | None = None) -> Tensors:
        """F without a way back: nothing is kept. Call it under `torch.no_grad`."""
        return carry(self._run, inputs, finish, self.index)

    def _run(self, inputs: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
        if self.meter is None:
            output = self._call(inputs)
            return (finish(output),) if finish else as_tensors(output, self.index)
        with self.meter.counting():
            output = self._call(inputs)
            return (finish(output),) if finish else as_tensors(output, self.index)

    def _run_counting(self, inputs: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
        """As `_run`, and count what the weight gradients of a stage that splits take."""
        if not self.split or is_compiled(self.module):
            return self._run(inputs, finish)
        with WeightFlops(p for p in self.parameters if p.requires_grad) as counted:
            outputs = self._run(inputs, finish)
        self._flops = counted.total if counted.is_complete else 0
        return outputs

    def _call(self, inputs: Tensors) -> Any:
        try:
            if type(inputs) is tuple:
                return self.module(*inputs)
            assert isinstance(inputs, Payload)
            positional, named = inputs.arguments()
            return self.module(*positional, **named)
        except (RuntimeError, TypeError) as error:
            error.add_note(_what_it_got(self.index, inputs, str(error)))
            raise

    def backward(self, microbatch: int, gradients: Cotangents) -> Cotangents:
        """B, or BW when the stage does not split: `gradients` of the differentiable outputs give those of the inputs.

        As on one device, an output whose gradient is None is not gone back from, and an input that nothing came back to has None.
        """
        leaves, edges, work = self._saved.pop(microbatch)
        fresh = [parameter for parameter in self.parameters if parameter.grad is None]
        if edges:
            edges, gradients = _with_gradient(edges, gradients)
        if edges:
            with outside_of_autocast(), in_pass(work, backward=True):
                run_backward(tuple(edges), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
        if work is not None:
            self._work[microbatch] = work
            if microbatch == self._sample:
                trained = (p for p in self.parameters if p.grad is not None)
                self._at_once = at_once(self.module, work.weights(), trained, self._reasons)
        outputs = tuple(x.grad for x in leaves)
        if self._gradients.dtype is not None:
            self._gradients.collect(self.parameters)
        elif fresh:
            _set_apart(fresh, (*gradients, *outputs, *(work.held if work is not None else ())))
        return outputs

    def weight(self, microbatch: int) -> None:
        """W: do the weight work that B of this microbatch left."""
        work = self._work.pop(microbatch)
        with outside_of_autocast():
            if microbatch == self._sample and self._flops:
                self._share = min(1.0, flops_of(work.run) / self._flops)
                self._flops = 0
            else:
                work.run()

    def report(self) -> SplitReport:
        """What W did of the weight gradients in the last step that was to `count`."""
        if not self.split:
            return SplitReport(self.index, "whole", 0.0, ("every parameter: the schedule gives this stage BW",))
        return SplitReport(self.index, "deferred", self._share, self._at_once)

    def in_flight(self) -> tuple[int, int]:
        """The microbatches that wait for a backward pass, and the bytes held for them without parameters and buffers."""
        saved = list(self._saved.values())
        works = [*(work for _, _, work in saved if work is not None), *self._work.values()]
        tensors = [tensor for leaves, _, _ in saved for tensor in leaves]
        tensors += [tensor for work in works for tensor in work.held]
        nodes = [edge.node for _, edges, _ in saved for edge in edges]
        return len(self._saved.keys() | self._work.keys()), held_bytes(tensors, nodes, (*self.parameters, *self.module.buffers()))

    def clear(self) -> None:
        """Forget every microbatch in flight."""
        self._saved.clear()
        self._work.clear()


def _edge(y: Tensor) -> GradientEdge:
    """Where to go back from: for a node in Python, which lives no longer than its tensor, from a node of our own that keeps it."""
    node = y.grad_fn
    if node is None:
        return get_gradient_edge(y)
    if isinstance(node, torch._C._FunctionBase):
        node = y.view_as(y).grad_fn
        assert node is not None
        return GradientEdge(node, 0)
    return GradientEdge(node, y.output_nr)


def _kinds(module: nn.Module) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]


def _set_apart(parameters: Iterable[nn.Parameter], needed: Iterable[Tensor | None]) -> None:
    """Copy each `.grad` that autograd made a view of a tensor still `needed`: the next microbatch adds to it in place."""
    storages = addresses_of(tensor for tensor in needed if tensor is not None)
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is Tensor and gradient.layout is torch.strided and gradient.untyped_storage().data_ptr() in storages:
            parameter.grad = gradient.clone()


def _with_gradient(edges: list[Any], gradients: Cotangents) -> tuple[list[Any], Cotangents]:
    """The edges that a gradient came back to, and these gradients."""
    for gradient in gradients:
        if gradient is None:
            pairs = [(edge, g) for edge, g in zip(edges, gradients, strict=True) if g is not None]
            return [edge for edge, _ in pairs], tuple(g for _, g in pairs)
    return edges, gradients


def as_tensors(output: Any, index: int) -> Tensors:
    """A stage's output for the next stage, whose arguments it becomes: a tensor or a tuple as they are, a dict by its names.

    Raises `TypeError` naming the stage and the place for what is neither a tensor, a constant nor a nest of these.
    """
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and all(isinstance(part, Tensor) for part in output):
        return tuple(output)
    if not isinstance(output, (tuple, list, dict)):
        got = type(output).__name__
        raise TypeError(f"stage {index} must return a tensor, or a tuple, list or dict of tensors for the next stage, got {got}")
    tensors: list[Tensor] = []
    layout = take_apart(dict(output) if isinstance(output, dict) else output, tensors, f"the output of stage {index}")
    return Payload.of(tensors, layout)


def _what_it_got(index: int, inputs: Tensors, message: str) -> str:
    """What a stage that failed was given and by whom, and the remedy where it is known."""
    shapes = ", ".join(map(str, shapes_of(inputs))) or "no tensor"
    if isinstance(inputs, Payload):
        shapes = f"a {inputs.layout}: {shapes}"
    givers = [f"stage {stage}" for _, stage in used_stages(Kind.F, index, index + 1)]
    note = f"stage {index} was given {shapes} by {', '.join(givers) or 'the batch'}"
    if "a leaf Variable that requires grad" in message:
        note += "; a stage must not change its input in place: let it work on x.clone(), or use the operation that makes a new tensor"
    return note
