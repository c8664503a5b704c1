"""The splitter of a stage, which leaves its backward pass whole unless a subclass splits it, and the call of autograd that all share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable

from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.split.report import InB, SplitReport
from zerobubble.runtime.values.payload import Cotangents, Payload, Tensors


class Splitter:
    """Runs the passes of one stage, and leaves its backward pass whole for this `reason`: B computes all gradients.

    Subclasses split it into B (gradients of the inputs) and W (gradients of the weights). A stage has one splitter, and calls it for each
    microbatch in the order F, B, W, interleaved with other microbatches. F runs under the caller's autocast, B and W outside of it.

    Attributes:
        splits: Whether W has any work. If it does, a pass BW runs B and then W.
        is_traced: Whether the module runs as a graph, in which its parts are not called.
        completes_by_parameter: Whether the last W's of a step can run parameter by parameter, see `begin_tail`.
    """

    splits = False
    is_traced = False
    completes_by_parameter = False

    def __init__(self, module: nn.Module, index: int, reason: str = "") -> None:
        self._module = module
        self._index = index
        self._reason = reason

    def begin(self, parameters: tuple[nn.Parameter, ...], meter: Meter | None) -> None:
        """Begins a step: inspects the module, which has these parameters. `meter` counts the bytes kept for W."""

    def refuse_hooks(self) -> None:
        """Raises `InputError` for hooks that the passes of the next step would not run."""

    def stepping(self) -> AbstractContextManager[object]:
        """Returns a context for a step, which prepares the module for its passes."""
        return nullcontext()

    def forward(self, microbatch: int, inputs: Tensors) -> Callable[[], Any]:
        """F: returns a call that runs the module on `inputs` and returns its output.

        Work with tensors that must not count as the forward's, such as tracing, happens before this returns.
        """
        positional, named = arguments_of(inputs)
        return partial(self._module, *positional, **named)

    def backward(self, microbatch: int, edges: list[Any], gradients: Cotangents) -> None:
        """B: runs backward from `edges`, if any, with their gradients. Adds the gradients of leaves to `.grad`, except deferred ones."""
        run_backward(edges, gradients)

    def weight(self, microbatch: int) -> None:
        """W: adds the weight gradients that B of this microbatch deferred."""

    def begin_tail(self, microbatches: Sequence[int], complete: Callable[[Collection[nn.Parameter]], object]) -> None:
        """Announces that the last W's of the step run now: the W's of `microbatches`, in this order, with no B in between.

        If the splitter `completes_by_parameter`, these W's complete one parameter after another, and each W does about as much work as
        before. `complete` is called with the parameters whose gradients are complete. Other splitters ignore the announcement.
        """

    def held(self, microbatch: int | None = None) -> Iterable[Tensor]:
        """Returns the tensors kept for the W of `microbatch`, or of all."""
        return ()

    def clear(self) -> None:
        """Drops all microbatches in flight."""

    def count(self) -> None:
        """Counts the work of W in the next step, on its first microbatch, for `report`."""

    def report(self) -> SplitReport:
        """Reports how the backward pass is split, as far as known."""
        return SplitReport(self._index, "whole", 0.0, (InB("every parameter", self._reason),))


def run_backward(edges: list[Any], gradients: Cotangents) -> None:
    """Runs autograd's engine from `edges`, if any."""
    if edges:
        # `torch.autograd.backward` without its checks, which the stage has already made
        run = Variable._execution_engine.run_backward
        run(tuple(edges), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def arguments_of(inputs: Tensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and the named arguments for a stage's module."""
    if isinstance(inputs, Payload):
        positional, named = inputs.arguments()
        return tuple(positional), named
    return inputs, {}
