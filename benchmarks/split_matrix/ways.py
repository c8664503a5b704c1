"""The ways to train one module on a few microbatches: plain autograd, our split and PyTorch's, all in the order of zb-h1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from zerobubble.runtime.stage.stage import make_stage

ORDER = "F0 F1 F2 B0 B1 W0 F3 B2 W1 B3 W2 W3"
"""Other microbatches stand between the F, the B and the W of each."""
SHAPE = (2, 5, 6)

Tensors = tuple[Tensor, ...]


class Outcome(NamedTuple):
    """What training leaves: `tensors` by name (gradients of inputs and parameters, buffers, what hooks saw) and `waited`, the
    parameters that had no gradient before the first W and have one after it."""

    tensors: dict[str, Tensor | None]
    waited: set[str]


class Plain:
    """Autograd on the whole: B does everything."""

    def __init__(self, module: nn.Module, inputs: list[Tensors]) -> None:
        self.module = module
        self.inputs = inputs
        self.outputs: dict[int, Tensors] = {}

    def forward(self, j: int) -> None:
        self.outputs[j] = as_tuple(self.module(*self.inputs[j]))

    def backward(self, j: int) -> None:
        outputs = [y for y in self.outputs.pop(j) if y.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, cotangents(outputs, j))
        send_at_once(self.inputs[j])

    def weight(self, j: int) -> None:
        pass


class Ours:
    def __init__(self, module: nn.Module, inputs: list[Tensors]) -> None:
        self.stage = make_stage("deferred", module, 1)
        self.inputs = inputs
        self.outputs: dict[int, Tensors] = {}

    def forward(self, j: int) -> None:
        self.outputs[j] = self.stage.forward(j, self.inputs[j])

    def backward(self, j: int) -> None:
        outputs = [y for y in self.outputs.pop(j) if y.requires_grad]
        leaves = [x for x in self.inputs[j] if x.requires_grad]
        for leaf, gradient in zip(leaves, self.stage.backward(j, cotangents(outputs, j)), strict=True):
            leaf.grad = gradient

    def weight(self, j: int) -> None:
        self.stage.weight(j)


class PyTorch(Plain):
    """`torch.distributed.pipelining`'s split as its stages call it: the first stage, here one that takes tokens, does all in W."""

    def __init__(self, module: nn.Module, inputs: list[Tensors]) -> None:
        super().__init__(module, inputs)
        self.is_first = not inputs[0][0].is_floating_point()
        self.groups: dict[int, Any] = {}

    def backward(self, j: int) -> None:
        if not self.is_first:
            outputs = self.outputs[j]
            gradients = list(cotangents(outputs, j))
            _, self.groups[j] = stage_backward_input(list(outputs), gradients, list(self.inputs[j]), self.module.parameters())
            send_at_once(self.inputs[j])

    def weight(self, j: int) -> None:
        outputs = self.outputs.pop(j)
        if self.is_first:
            stage_backward(outputs, cotangents(outputs, j), self.inputs[j])
        else:
            stage_backward_weight(self.module.parameters(), self.groups.pop(j))


class PyTorchCopied(PyTorch):
    """The same with the remedy for its best-known limit: outputs are copied, so that none is a view."""

    def forward(self, j: int) -> None:
        self.outputs[j] = tuple(y.clone() for y in as_tuple(self.module(*self.inputs[j])))


def train(build: Callable[[], nn.Module], takes: str, way: type[Plain] | type[Ours]) -> Outcome:
    """Build the module and its inputs from a seed, and run every pass in `ORDER`."""
    with double_precision():
        torch.manual_seed(0)
        module, inputs = build(), [make_inputs(takes) for _ in range(4)]
        trained = way(module, inputs)
        passes = {"F": trained.forward, "B": trained.backward, "W": trained.weight}
        before: set[str] = set()
        waited: set[str] = set()
        with trained.stage.stepping() if isinstance(trained, Ours) else nullcontext():
            for step in ORDER.split():
                if step == "W0":
                    before = without_gradient(module)
                passes[step[0]](int(step[1:]))
                if step == "W0":
                    waited = before - without_gradient(module)
        return Outcome(left(module, inputs), waited)


def make_inputs(takes: str) -> Tensors:
    """One microbatch: `x` vectors with gradient, `fixed` vectors without, `tokens` integers."""
    made = {
        "x": lambda: torch.randn(SHAPE, requires_grad=True),
        "fixed": lambda: torch.randn(SHAPE),
        "tokens": lambda: torch.randint(0, 11, SHAPE[:2]),
    }
    return tuple(made[word]() for word in takes.split())


def as_tuple(output: Any) -> Tensors:
    return (output,) if isinstance(output, Tensor) else tuple(output)


def send_at_once(inputs: Tensors) -> None:
    """Copy the gradients of inputs: autograd may have made them views of a `.grad` that still grows. Ours must do without."""
    for x in inputs:
        x.grad = None if x.grad is None else x.grad.clone()


def cotangents(outputs: Iterable[Tensor], seed: int) -> Tensors:
    """A gradient for each output, the same for every way."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs)


def without_gradient(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.grad is None}


def left(module: nn.Module, inputs: list[Tensors]) -> dict[str, Tensor | None]:
    found = {f"input {i} of microbatch {j}": x.grad for j, taken in enumerate(inputs) for i, x in enumerate(taken)}
    found |= {f"parameter {name}": parameter.grad for name, parameter in module.named_parameters()}
    found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return found | {f"seen {i}": tensor for i, tensor in enumerate(getattr(module, "seen", ()))}


def difference(mine: Outcome, theirs: Outcome) -> float:
    """The largest error relative to the oracle's norm of anything left; infinite where something is missing."""
    if mine.tensors.keys() != theirs.tensors.keys():
        return math.inf
    return max(_error(tensor, theirs.tensors[name]) for name, tensor in mine.tensors.items())


def _error(mine: Tensor | None, theirs: Tensor | None) -> float:
    if mine is None or theirs is None:
        return 0.0 if mine is theirs else math.inf
    difference = (mine.to_dense() - theirs.to_dense()).to(torch.complex128)
    return 0.0 if torch.equal(mine.to_dense(), theirs.to_dense()) else (difference.norm() / theirs.to_dense().norm()).item()


@contextmanager
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
