"""One stage at work: forward, backward for the input, backward for the weights, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory import Meter
from zerobubble.runtime.split.work import WeightWork, collect_into

Tensors = tuple[Tensor, ...]


class Stage:
    """Runs the passes of one stage of the model.

    `forward` takes and gives the tensors at the stage's boundaries, detached; `backward` takes the gradients of those outputs that
    `differentiable` names and gives those of the inputs that can have one. With `split`, the weight gradients wait for `weight`.

    Raises `InputError` for a module that averages its gradients itself, in the middle of a step.
    """

    def __init__(self, module: nn.Module, index: int, *, split: bool) -> None:
        if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
            raise InputError(
                f"stage {index} holds a DistributedDataParallel, which averages gradients before every microbatch has added to them; "
                "give the module without it, and average `.grad` over its group after each step"
            )
        self.module = module
        self._call: Callable[..., Any] = module
        self.index = index
        self.meter: Meter | None = None
        self.split = split
        self._parameters = tuple(module.parameters())
        self._saved: dict[int, tuple[Tensors, list[Any], WeightWork | None]] = {}
        self._work: dict[int, WeightWork] = {}

    def forward(self, microbatch: int, inputs: Tensors, finish: Callable[[Any], Tensor] | None = None) -> Tensors:
        """F: run the module on `inputs`. `finish` (the loss, on the last stage) turns its output into the scalar to go back from."""
        work = WeightWork(self.meter) if self.split else None
        collect_into(work)
        outputs = self._run(inputs, finish)
        edges = [get_gradient_edge(y) for y in outputs if y.requires_grad]
        leaves = tuple(x for x in inputs if x.requires_grad)
        self._saved[microbatch] = (leaves, edges, work)
        return outputs

    def infer(self, inputs: Tensors, finish: Callable[[Any], Tensor] | None = None) -> Tensors:
        """F without a way back: nothing is kept. Call it under `torch.no_grad`."""
        return self._run(inputs, finish)

    def _run(self, inputs: Tensors, finish: Callable[[Any], Tensor] | None) -> Tensors:
        if self.meter is None:
            output = self._call(*inputs)
            return (finish(output),) if finish else as_tensors(output, self.index)
        with self.meter.counting():
            output = self._call(*inputs)
            return (finish(output),) if finish else as_tensors(output, self.index)

    def backward(self, microbatch: int, gradients: tuple[Tensor | None, ...]) -> Tensors:
        """B, or BW when the stage does not split: `gradients` of the differentiable outputs give those of the inputs."""
        leaves, edges, work = self._saved.pop(microbatch)
        collect_into(work, backward=True)
        fresh = [parameter for parameter in self._parameters if parameter.grad is None]
        if edges:
            Variable._execution_engine.run_backward(tuple(edges), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
        if work is not None:
            self._work[microbatch] = work
        outputs = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
        if fresh:
            _set_apart(fresh, (*gradients, *outputs, *(work.held if work is not None else ())))
        return outputs

    def weight(self, microbatch: int) -> None:
        """W: do the weight work that B of this microbatch left."""
        self._work.pop(microbatch).run()

    def clear(self) -> None:
        """Forget every microbatch in flight."""
        self._saved.clear()
        self._work.clear()


def _set_apart(parameters: Iterable[nn.Parameter], needed: Iterable[Tensor | None]) -> None:
    """Copy each `.grad` that autograd made a view of a tensor still `needed`: the next microbatch adds to it in place."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in needed if tensor is not None}
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is Tensor and gradient.layout is torch.strided and gradient.untyped_storage().data_ptr() in storages:
            parameter.grad = gradient.clone()


def as_tensors(output: Any, index: int) -> Tensors:
    """A stage's output as a tuple; raises `TypeError` naming the stage for anything but a tensor or a tuple of tensors."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and all(isinstance(part, Tensor) for part in output):
        return tuple(output)
    got = type(output).__name__
    raise TypeError(f"stage {index} must return a tensor or a tuple of tensors for the next stage, got {got}")
