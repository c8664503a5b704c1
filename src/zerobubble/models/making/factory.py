"""Creates a model with a user's function, but with values only for the parameters of a rank's own stages.

Invariant: the function draws the same random numbers as on one device, so every parameter has the same value as there. The function first
runs without values, which shows the draws and reads that each parameter depends on. It then runs once per stage, and computes only the
values that the stage's parameters need (see `runs`).
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.arguments import Wanted
from zerobubble.errors import InputError
from zerobubble.models.making.checkpoint_reads import reading
from zerobubble.models.making.runs import Making, NeededError, Origins, making_by
from zerobubble.runtime.values.stateful import refuse_lazy

MAKES_A_MODEL = Wanted("a function () -> nn.Module", callable)
_MOST_RUNS = 20
"""Number of runs before giving up and computing all values."""
_ONE_AT_A_TIME = threading.Lock()
"""Held while a model is created: the random generator and `nn.Module` are patched for the whole process."""


class ModelFactory:
    """A `function` and the random state it starts from. Creates models with all buffers and the requested parameters."""

    def __init__(self, function: Callable[[], nn.Module]) -> None:
        self._function = function
        self._random_state = torch.random.get_rng_state()
        self._origins: dict[str, Origins] = {}
        self._needed: Origins | None = frozenset()
        self._has_run = False
        self.drawn = "none"
        """A digest of the generator state after the parameters were drawn, which differs between seeds."""
        self.model = self.make(())
        """The model with all parameters on the meta device."""

    def make(self, keep: Collection[str]) -> nn.Module:
        """Creates the model with the parameters named in `keep`, under any of their names, and all others on the meta device.

        Draws random numbers from the initial state, and restores the current state. Raises `InputError` if the function returns no module,
        or a parameter without values.
        """
        needed = self._needed
        if needed is not None:
            needed = needed.union(*(self._origins[name] for name in keep))
        for run in range(_MOST_RUNS + 1):
            attempt = _Run(self._function, self._random_state, None if run == _MOST_RUNS else needed, bool(keep), warns=not self._has_run)
            self._has_run = True
            if attempt.is_complete_with(keep):
                if not keep:
                    _refuse_without_values(attempt.left_on_meta())
                    self._needed, self._origins, self.drawn = needed, attempt.origins_of_parameters(), attempt.drawn
                return attempt.only_with_values_of(keep)
            needed = attempt.needed
        raise AssertionError("a run that computes all values is complete")


class _Run:
    """A run of the function that computes values only for the `needed` origins, or for all if None.

    The function runs often. Only a run that `warns` shows the warnings of the libraries that it calls.
    """

    def __init__(self, function: Callable[[], nn.Module], random_state: Tensor, needed: Origins | None, draws: bool, warns: bool) -> None:
        self.needed = needed
        self._model: nn.Module | None = None
        self._making = making = Making(needed, draws=draws)
        self.drawn = "none"
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* which is a no-op" if warns else "")  # copies of a checkpoint into meta parameters
            torch.random.set_rng_state(random_state)
            try:
                with reading(making), making_by(making):
                    self._model = _module(function())
                if making.has_drawn:
                    self.drawn = f"those with digits {hashlib.sha256(torch.random.get_rng_state().numpy().tobytes()).hexdigest()[:8]}"
            except NeededError as error:
                self.needed = None if needed is None else needed | error.origins
            except InputError:
                raise
            except Exception:  # any type: the user's code got tensors without values
                if needed is None:
                    raise  # it had all values, so the failure is its own
                self.needed = None

    def is_complete_with(self, keep: Collection[str]) -> bool:
        """Returns whether the model has values for its buffers and these parameters. If not, adds the missing values to `needed`."""
        if self._model is None:
            return False
        lacking = self._making.origins_in((*_kept(self._model, keep), *_other_attributes(self._model)))
        if lacking and self.needed is not None:
            self.needed |= lacking
        return not lacking

    def origins_of_parameters(self) -> dict[str, Origins]:
        """Returns the missing origins of each parameter, by each of its names."""
        assert self._model is not None
        return {name: self._making.origins_in([p]) for name, p in self._model.named_parameters(remove_duplicate=False)}

    def left_on_meta(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers for which the function has computed no values."""
        assert self._model is not None
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor for name, tensor in named if tensor.is_meta and not self._making.origins_in([tensor])}

    def only_with_values_of(self, keep: Collection[str]) -> nn.Module:
        """Returns the model, with all parameters on the meta device except the ones named in `keep`."""
        assert self._model is not None
        kept = {id(parameter) for parameter in _kept(self._model, keep)}
        named = dict(self._model.named_parameters(remove_duplicate=False))
        _refuse_without_values({name: named[name] for name in keep if named[name].is_meta})
        _put_on_meta(self._model, kept)
        return self._model


def _refuse_without_values(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        raise InputError(
            "the function that creates the model leaves {kind} {missing!r} on the meta device, without values",
            kind="parameter" if isinstance(tensor, nn.Parameter) else "buffer",
            missing=name,
            remedy="let it initialize or load all parameters and buffers",
        )


def _module(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InputError(
            "zb.split takes a module or a function that returns one, but the function returned a {kind}", kind=type(model).__name__
        )
    refuse_lazy(model)
    return model


def _kept(model: nn.Module, keep: Collection[str]) -> list[nn.Parameter]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return [named[name] for name in keep]


def _other_attributes(model: nn.Module) -> Iterable[Any]:
    """Yields the attributes of the modules of `model` other than parameters and modules, buffers included."""
    parameters = {id(parameter) for parameter in model.parameters()}
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_modules")}
        yield from (leaf for leaf in pytree.tree_leaves(list(held.values())) if id(leaf) not in parameters)


def _put_on_meta(model: nn.Module, kept: Collection[int]) -> None:
    """Frees parameters that were created only because others were computed from them."""
    on_meta: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta and id(parameter) not in kept:
                empty = type(parameter)(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = on_meta.setdefault(id(parameter), empty)
