"""Full recomputation: a forward runs first for its outputs, keeping only its inputs, and a second time to save tensors for backward.

In the first run, hooks on saved tensors drop every tensor that autograd saves, so its graph serves only to find out which outputs require
grad. The second run starts from the same inputs, random state and buffers, and its graph is the one that backward uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.stage.forward_state import ForwardState
from zerobubble.runtime.values.payload import Tensors

Finish = Callable[[Any], Tensor] | None


class FirstRun:
    """The state that the second run of a forward of stage `index` needs: the inputs, and the random state and buffers of the first run.

    Autocast needs no care: both runs are within one call of the user's. `meter` counts the inputs during the lifetime of this object.
    """

    def __init__(self, module: nn.Module, index: int, inputs: Tensors, finish: Finish, meter: Meter | None) -> None:
        self.inputs = inputs
        self.finish = finish
        self.num_outputs_with_grad = 0
        self._index = index
        self._state = ForwardState(module)
        self._versions = [tensor._version for tensor in inputs]
        self._counted: list[Held] = [] if meter is None else [meter.hold(tensor) for tensor in inputs]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the first run: autograd builds a graph, but saves nothing."""
        with torch.autograd.graph.saved_tensors_hooks(_drop, self._refuse_backward):
            yield
        self._state.end_first_run()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context of the second run. Raises `InputError` if the first one changed its inputs."""
        for tensor, version in zip(self.inputs, self._versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"stage {self._index} changed its input in place, a {tuple(tensor.shape)} {tensor.dtype}, so that its forward cannot "
                    "be recomputed: let it work on x.clone(), or leave the stage out of the schedule's R passes"
                )
        with self._state.restored():
            yield

    def _refuse_backward(self, _: object) -> Tensor:
        raise InputError(
            f"stage {self._index} computes gradients within its own forward, which has saved no tensors: "
            "leave the stage out of the schedule's R passes"
        )


def _drop(_: Tensor) -> None:
    """Replaces a tensor that autograd saves by None."""
