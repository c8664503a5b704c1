"""States that a checkpoint restores besides the model: of optimizers, of a gradient scaler, and of random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from zerobubble.errors import InputError, with_article
from zerobubble.runtime.device import interface


class ParameterState(NamedTuple):
    """The state of an optimizer for a parameter: tensors and other values; the options of its group; the class of the optimizer."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    options: dict[str, Any]
    kind: str = ""


def states_of(optimizers: Iterable[Optimizer]) -> dict[nn.Parameter, ParameterState]:
    """Returns the state of each parameter of `optimizers`. Raises `InputError` for options that are neither numbers nor text."""
    found = {}
    for optimizer, group in groups_of(optimizers):
        options = {name: _plain(name, value) for name, value in group.items() if name != "params"}
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            values = {name: _plain(name, value) for name, value in state.items() if name not in tensors}
            found[parameter] = ParameterState(tensors, values, options, type(optimizer).__name__)
    return found


def groups_of(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
    """Returns each parameter group with its optimizer."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield optimizer, group


class OptimizerState:
    """Loads `states` into `optimizer`; parameters of a group have the same options. Undone by restoring the previous state."""

    def __init__(self, optimizer: Optimizer, states: Mapping[nn.Parameter, ParameterState]) -> None:
        self.what = f"the optimizer {type(optimizer).__name__}"
        self._optimizer = optimizer
        self._states = states
        self._before = {"state": optimizer.state, "param_groups": optimizer.param_groups}

    def make(self) -> None:
        optimizer, states = self._optimizer, self._states
        places = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {
            number: {**states[parameter].tensors, **states[parameter].values}
            for number, parameter in enumerate(places)
            if parameter in states and (states[parameter].tensors or states[parameter].values)
        }
        groups, first = [], 0
        for group in optimizer.param_groups:
            saved = next((states[parameter].options for parameter in group["params"] if parameter in states), {})
            kept = {name: _like(value, saved[name]) if name in saved else value for name, value in group.items() if name != "params"}
            groups.append({**kept, "params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def undo(self) -> None:
        """See `Change`. The optimizers of torch have created new containers, with the same tensors if they fit."""
        self._optimizer.__setstate__(self._before)


class ScalerState:
    """Loads the saved state into a scaler; undone by restoring the previous one."""

    what = "the scaler"

    def __init__(self, scaler: GradScaler, state: Mapping[str, Any]) -> None:
        self._scaler = scaler
        self._state = dict(state)
        self._before = scaler.state_dict()

    def make(self) -> None:
        self._scaler.load_state_dict(self._state)

    def undo(self) -> None:
        if self._before:  # a disabled scaler has none
            self._scaler.load_state_dict(self._before)


def _plain(name: str, value: Any) -> Any:
    """Returns an option in its JSON form."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)) and all(isinstance(each, (bool, int, float, str)) or each is None for each in value):
        return list(value)
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    message = "the optimizer's {name!r} is {got}, which a checkpoint cannot hold"
    raise InputError(message, name=name, got=with_article(type(value).__name__), remedy="restore it in your program")


def _like(now: Any, saved: Any) -> Any:
    """Returns a saved option in the form of the current one: a tuple, or a tensor."""
    if isinstance(now, Tensor):
        return now.new_tensor(saved)
    return tuple(saved) if isinstance(now, tuple) else saved


def tensor_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch, on the CPU and on `device`."""
    found = {"cpu": torch.random.get_rng_state()}
    on_device = interface(device)
    if on_device.has_generator:
        found[device.type] = on_device.random_state()
    return found


def set_tensor_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores what `tensor_states` returned."""
    torch.random.set_rng_state(states["cpu"])
    on_device = interface(device)
    if on_device.has_generator and device.type in states:
        on_device.set_random_state(states[device.type])


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
