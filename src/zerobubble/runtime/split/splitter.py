"""The interface between a stage and the splitter of its backward pass, and the call of autograd that all splitters share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd import Variable

from zerobubble.runtime.measure.memory_meter import Meter
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.values.payload import Cotangents, Payload, Tensors


class Splitter(Protocol):
    """Splits the backward pass of one stage into B, the gradients of its inputs, and W, those of its weights.

    A stage has one splitter, and calls it for each microbatch in the order F, B, W, interleaved with other microbatches. F runs under the
    caller's autocast, B and W outside of it.
    """

    @property
    def splits(self) -> bool:
        """Whether W has any work. If it does, a pass BW runs B and then W."""

    @property
    def completes_by_parameter(self) -> bool:
        """Whether the last W's of a step can run parameter by parameter, see `begin_tail`."""

    def begin(self, parameters: tuple[nn.Parameter, ...], meter: Meter | None) -> None:
        """Begins a step: inspects the module, which has these parameters. `meter` counts the bytes kept for W."""

    def stepping(self) -> AbstractContextManager[object]:
        """Returns a context for a step, which prepares the module for its passes."""

    def forward(self, microbatch: int, inputs: Tensors) -> Callable[[], Any]:
        """F: returns a call that runs the module on `inputs` and returns its output.

        Work whose tensors must not count as those of the forward, such as tracing, happens before this returns.
        """

    def backward(self, microbatch: int, edges: list[Any], gradients: Cotangents) -> None:
        """B: runs backward from `edges`, if any, with their gradients. Adds the gradients of leaves to `.grad`, except deferred ones."""

    def weight(self, microbatch: int) -> None:
        """W: adds the weight gradients that B of this microbatch deferred."""

    def begin_tail(self, microbatches: Sequence[int], complete: Callable[[Collection[nn.Parameter]], object]) -> None:
        """Announces the last W's of the step: those of `microbatches`, in this order, with no B in between.

        If the splitter `completes_by_parameter`, these W's complete one parameter after another, and each W does about as much work as
        before. `complete` is called with the parameters whose gradients are complete. Other splitters ignore the announcement.
        """

    def held(self, microbatch: int | None = None) -> Iterable[Tensor]:
        """Returns the tensors kept for the W of `microbatch`, or of all."""

    def clear(self) -> None:
        """Drops all microbatches in flight."""

    def count(self) -> None:
        """Counts the work of W in the next step, on its first microbatch, for `report`."""

    def report(self) -> SplitReport:
        """Reports how the backward pass is split, as far as known."""


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
