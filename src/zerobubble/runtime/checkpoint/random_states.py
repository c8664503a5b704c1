"""The random states of this process: those of torch, Python and, if it is in use, numpy."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def tensor_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch, on the CPU and on `device`."""
    found = {"cpu": torch.random.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_tensor_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores what `tensor_states` returned."""
    torch.random.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def plain_states() -> dict[str, Any]:
    """Returns the states of Python and numpy in JSON form."""
    found: dict[str, Any] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = [kind, keys.tolist(), *rest]
    return found


def set_plain_states(states: Mapping[str, Any]) -> None:
    """Restores what `plain_states` returned, whose tuples JSON has made lists."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(tuple(states["numpy"]))


class RandomStates:
    """Sets the `plain` states and those of torch, if a checkpoint has any for this rank; undone by restoring the previous ones."""

    what = "the random states"

    def __init__(self, plain: Mapping[str, Any] | None, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._plain = plain
        self._tensors = tensors
        self._device = device
        self._before = plain_states(), tensor_states(device)

    def make(self) -> None:
        if self._plain is not None:
            set_plain_states(self._plain)
        if self._tensors:
            set_tensor_states(self._tensors, self._device)

    def undo(self) -> None:
        set_plain_states(self._before[0])
        set_tensor_states(self._before[1], self._device)
