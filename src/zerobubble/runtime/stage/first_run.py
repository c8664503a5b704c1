"""A forward that runs twice: first for what it gives, keeping its inputs alone, and again for what its backward needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerobubble.errors import InputError
from zerobubble.runtime.measure.memory_meter import Held, Meter
from zerobubble.runtime.stage.found_state import FoundState
from zerobubble.runtime.values.payload import Tensors

Finish = Callable[[Any], Tensor] | None


class FirstRun:
    """What the first run of a forward of stage `index` leaves for the second: its inputs, and what it found of all else that it used.

    Autocast needs no care, for both runs are in one call of the caller's. `meter` counts the inputs for as long as this lives.
    """

    def __init__(self, module: nn.Module, index: int, inputs: Tensors, finish: Finish, meter: Meter | None) -> None:
        self.inputs = inputs
        self.finish = finish
        self.num_to_go_back_from = 0
        self._index = index
        self._state = FoundState(module)
        self._versions = [tensor._version for tensor in inputs]
        self._counted: list[Held] = [] if meter is None else [meter.hold(tensor) for tensor in inputs]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the first run: autograd finds out what depends on what, and saves nothing."""
        with torch.autograd.graph.saved_tensors_hooks(_nothing, self._refuse_to_go_back):
            yield
        self._state.first_run_is_over()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the second run. Raises `InputError` where the first one changed its inputs."""
        for tensor, version in zip(self.inputs, self._versions, strict=True):
            if tensor._version != version:
                raise InputError(
                    f"stage {self._index} changed its input in place, a {tuple(tensor.shape)} {tensor.dtype}, so that its forward cannot "
                    "be computed again: let it work on x.clone(), or leave the stage out of the schedule's R passes"
                )
        with self._state.again():
            yield

    def _refuse_to_go_back(self, _: object) -> Tensor:
        raise InputError(
            f"stage {self._index} asks for gradients within its own forward, which keeps nothing to go back by: "
            "leave the stage out of the schedule's R passes"
        )


def _nothing(_: Tensor) -> None:
    """What a first run keeps of a tensor that autograd saves."""
