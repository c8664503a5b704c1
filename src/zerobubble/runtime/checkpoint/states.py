"""States that a checkpoint restores in addition to the model: those of optimizers, of a gradient scaler, and of random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from zerobubble.errors import InputError, with_article
from zerobubble.runtime.checkpoint.nested import UnknownValueError, decoded, encoded, paired, tensors_in
from zerobubble.runtime.step.optimizers import SAVED_BY
from zerobubble.runtime.values.random_state import RandomState, RandomStates

MODEL_ONLY = "save the parameters and buffers alone, with model_only=True"
_OF_RANK = frozenset({"params", "param_names", SAVED_BY})
"""The entries of a parameter group that identify its parameters, of which each rank has others. All others are options."""


class ParameterState(NamedTuple):
    """The state of an optimizer for a parameter: its tensors by path, and its JSON form.

    `options` are the JSON forms of the options of its group, and `kind` is the class of the optimizer.
    """

    tensors: Mapping[str, Tensor]
    form: Any
    options: dict[str, Any]
    kind: str = ""


def states_of(optimizers: Iterable[Optimizer]) -> dict[nn.Parameter, ParameterState]:
    """Returns the state of each parameter of `optimizers`.

    Raises `InputError` for options and states that have no JSON form, and for a state that belongs to no parameter.
    """
    states = {}
    for optimizer in optimizers:
        shared = [key for key in optimizer.state if not isinstance(key, Tensor)]
        if shared:
            message = "{optimizer} has a state {name!r} that belongs to no parameter, and a checkpoint holds those of parameters"
            remedy = f"keep it in the options of its groups, or {MODEL_ONLY}"
            raise InputError(message, optimizer=type(optimizer).__name__, name=shared[0], remedy=remedy)
    for optimizer, group in groups_of(optimizers):
        options = {name: _option(name, value, type(optimizer).__name__) for name, value in group.items() if name not in _OF_RANK}
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter, {}))
            form = _form(state, type(optimizer).__name__)
            states[parameter] = ParameterState(dict(tensors_in(state)), form, options, type(optimizer).__name__)
    return states


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
        values = {parameter: decoded(states[parameter].form, states[parameter].tensors) for parameter in places if parameter in states}
        state = {number: values[parameter] for number, parameter in enumerate(places) if values.get(parameter)}
        optimizer.load_state_dict({"state": state, "param_groups": self._groups()})
        if type(optimizer).load_state_dict is Optimizer.load_state_dict:
            for parameter, saved_state in values.items():
                _undo_casts(optimizer.state, parameter, saved_state)

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the groups with their saved options and numbered parameters."""
        groups, first = [], 0
        for group in self._optimizer.param_groups:
            saved = next((self._states[parameter].options for parameter in group["params"] if parameter in self._states), {})
            loaded = {name: _like(group.get(name), decoded(form, {})) for name, form in saved.items() if name not in _OF_RANK}
            kept = {name: value for name, value in group.items() if name != SAVED_BY}
            groups.append({**kept, **loaded, "params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        return groups

    def undo(self) -> None:
        """See `Change`. torch's optimizers load into new containers, so restoring the previous ones suffices."""
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


def _undo_casts(states: MutableMapping[Any, Any], parameter: Tensor, saved: Mapping[Any, Any]) -> None:
    """Restores the dtypes of the `saved` state, which torch casts to the dtype of the parameter, and text, which it replaces."""
    if parameter not in states:
        return
    loaded = states[parameter]
    for name, value in loaded.items():
        if name != "step":  # torch chooses its device and dtype by the options of the group
            loaded[name] = paired(value, saved.get(name), _uncast)


def _uncast(loaded: Any, saved: Any) -> Any:
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor) and saved.dtype != loaded.dtype:
        return saved.to(loaded.device)
    return saved if isinstance(saved, str) else loaded


def _form(value: Any, optimizer: str, path: str = "") -> Any:
    """Returns the JSON form of a state or option. Raises `InputError` if it has none."""
    try:
        return encoded(value, path)
    except UnknownValueError as error:
        raise _unknown(error.path, error.value, optimizer) from None


def _unknown(path: str, value: Any, optimizer: str) -> InputError:
    message, got = "{name!r} of {optimizer} is {got}, which a checkpoint cannot hold", with_article(type(value).__name__)
    return InputError(message, name=path, optimizer=optimizer, got=got, remedy=MODEL_ONLY)


def _option(name: str, value: Any, optimizer: str) -> Any:
    """Returns the JSON form of an option, of a single number if it is a tensor."""
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    for path, tensor in tensors_in(plain, name):
        raise _unknown(path, tensor, optimizer)
    return _form(plain, optimizer, name)


def _like(now: Any, saved: Any) -> Any:
    """Returns a saved option in the form of the current one: a tuple, or a tensor."""
    if isinstance(now, Tensor):
        return now.new_tensor(saved)
    return tuple(saved) if isinstance(now, tuple) and isinstance(saved, list) else saved


def tensor_states(states: RandomStates) -> dict[str, Tensor]:
    """Returns the states of torch, of the CPU and of the device."""
    device, on_cpu, on_device = states.of_torch
    return {"cpu": on_cpu} | ({} if on_device is None else {device.type: on_device})


def plain_states(states: RandomStates) -> dict[str, Any]:
    """Returns the states of Python and NumPy in JSON form."""
    plain: dict[str, Any] = {"python": states.of_python}
    if states.of_numpy is not None:
        kind, words, *rest = states.of_numpy
        plain["numpy"] = [kind, words.tolist(), *rest]
    return plain


class SavedRandomStates:
    """Sets the states that `plain_states` and `tensor_states` returned, as far as a checkpoint has them for this rank. Can be undone."""

    what = "the random states"

    def __init__(self, plain: Mapping[str, Any] | None, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._before = RandomStates.now(device)
        of_torch, of_python, of_numpy = self._before
        if tensors:
            on_device = of_torch.on_device  # None if its generator is that of the CPU
            of_torch = RandomState(device, tensors["cpu"], None if on_device is None else tensors.get(device.type, on_device))
        if plain is not None:
            version, numbers, gauss = plain["python"]  # JSON has made tuples lists
            of_python = version, tuple(numbers), gauss
            of_numpy = tuple(plain["numpy"]) if "numpy" in plain else of_numpy
        self._saved = RandomStates(of_torch, of_python, of_numpy)

    def make(self) -> None:
        self._saved.set()

    def undo(self) -> None:
        self._before.set()
