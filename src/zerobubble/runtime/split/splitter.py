"""What a stage asks of whatever splits its backward pass, and the run of autograd that all ways of splitting share."""

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
    """How the backward pass of one stage comes apart in B, the gradients of its inputs, and W, those of its weights.

    A stage has one, and calls it for each microbatch in the order F, B, W; other microbatches may come in between. F runs under the
    caller's autocast, B and W outside of it.
    """

    @property
    def splits(self) -> bool:
        """Whether W has something to do; a pass BW is then B and W."""

    @property
    def ends_by_parameter(self) -> bool:
        """Whether the last W's of a step can go parameter by parameter, as `begin_tail` asks."""

    def begin(self, parameters: tuple[nn.Parameter, ...], meter: Meter | None) -> None:
        """A step begins: find out what the module is now, whose parameters are these. `meter` counts the bytes that wait for W."""

    def stepping(self) -> AbstractContextManager[object]:
        """Around a step: inside, the module is as its passes need it."""

    def forward(self, microbatch: int, inputs: Tensors) -> Callable[[], Any]:
        """F: the call that runs the module on `inputs` and gives its output.

        What must not be counted among the tensors of the forward, such as tracing the module, is done before the call is given.
        """

    def backward(self, microbatch: int, edges: list[Any], gradients: Cotangents) -> None:
        """B: go back from `edges`, if any, with their gradients. Those of leaves are added to `.grad`, but for what waits for W."""

    def weight(self, microbatch: int) -> None:
        """W: add the weight gradients that B of this microbatch has left."""

    def begin_tail(self, microbatches: Sequence[int], complete: Callable[[Collection[nn.Parameter]], object]) -> None:
        """The W's that come next are the last of the step, those of `microbatches` in this order, and no B comes any more.

        Where the splitter `ends_by_parameter`, they do their work parameter by parameter, each about as much as by itself, and `complete`
        is told of the parameters to whose gradients nothing is added any more. Elsewhere nothing changes, and nothing is told.
        """

    def held(self, microbatch: int | None = None) -> Iterable[Tensor]:
        """The tensors kept for the W of `microbatch`, or of all."""

    def clear(self) -> None:
        """Forget every microbatch in flight."""

    def count(self) -> None:
        """Count what W does in the next step, by its first microbatch, for `report`."""

    def report(self) -> SplitReport:
        """How the backward pass comes apart, as far as it is known by now."""


def go_back(edges: list[Any], gradients: Cotangents) -> None:
    """Run autograd's engine from `edges`, if any."""
    if edges:
        # what `torch.autograd.backward` calls, without the checks of what a stage has checked already
        run = Variable._execution_engine.run_backward
        run(tuple(edges), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def arguments_of(inputs: Tensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments of a stage's module in what came to it."""
    if isinstance(inputs, Payload):
        positional, named = inputs.arguments()
        return tuple(positional), named
    return inputs, {}
