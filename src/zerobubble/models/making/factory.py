"""A model that a function makes, of which a rank has the numbers of its own stages alone.

The law: the function runs as on one device and takes the same random numbers, so that what a stage holds has the values of one device. It
runs once without numbers, which tells where those of each parameter begin, and then once for a stage, where only those are made or read
that the stage's parameters need (`making`).
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

MAKES_A_MODEL = Wanted("a function () -> nn.Module", callable)
_MOST_RUNS = 20
"""So often the function runs before all numbers are made."""
_ONE_AT_A_TIME = threading.Lock()
"""Held while a model is made: the generator of random numbers and the class of modules are there once in a process."""


class ModelFactory:
    """`function` with the state of the random numbers from which it draws; what it makes has its buffers, and parameters as asked."""

    def __init__(self, function: Callable[[], nn.Module]) -> None:
        self._function = function
        self._random_state = torch.random.get_rng_state()
        self._origins: dict[str, Origins] = {}
        self._needed: Origins | None = frozenset()
        self.drawn = "none"
        """Digits of the generator behind what it drew for parameters, which are others from another seed."""
        self.model = self.make(())
        """The model with all parameters on the meta device."""

    def make(self, keep: Collection[str]) -> nn.Module:
        """The model with the parameters named in `keep`, under any of their names, and others on the meta device.

        Random numbers are drawn from the state at the start, and the current state stays. Raises `InputError` where the function makes no
        module, and where it makes a parameter without numbers.
        """
        needed = self._needed
        if needed is not None:
            needed = needed.union(*(self._origins[name] for name in keep))
        for run in range(_MOST_RUNS + 1):
            found = _Run(self._function, self._random_state, None if run == _MOST_RUNS else needed, draws=bool(keep))
            if found.is_complete_with(keep):
                if not keep:
                    self._needed, self._origins, self.drawn = needed, found.origins_of_parameters(), found.drawn
                return found.without_numbers_but(keep)
            needed = found.needed
        raise AssertionError("a run in which all numbers are made lacks none")


class _Run:
    """A run of the function in which only numbers of the origins that are `needed` are made, or all of them, for None."""

    def __init__(self, function: Callable[[], nn.Module], random_state: Tensor, needed: Origins | None, *, draws: bool) -> None:
        self.needed = needed
        self._model: nn.Module | None = None
        self._making = making = Making(needed, draws=draws)
        self.drawn = "none"
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* which is a no-op")  # copies of a checkpoint into parameters without numbers
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
            except Exception:  # of whatever kind: somebody's code was given tensors without numbers
                if needed is None:
                    raise  # it had all numbers, so the failure is its own
                self.needed = None

    def is_complete_with(self, keep: Collection[str]) -> bool:
        """Whether the model has come to be, with the numbers of its buffers and of these parameters; if not, `needed` has more."""
        if self._model is None:
            return False
        lacking = self._making.origins_in((*_kept(self._model, keep), *_beside_parameters(self._model)))
        if lacking and self.needed is not None:
            self.needed |= lacking
        return not lacking

    def origins_of_parameters(self) -> dict[str, Origins]:
        """Where the numbers begin that each parameter needs and that were not made, by each of its names."""
        assert self._model is not None
        return {name: self._making.origins_in([p]) for name, p in self._model.named_parameters(remove_duplicate=False)}

    def without_numbers_but(self, keep: Collection[str]) -> nn.Module:
        """The model, with parameters on the meta device where they are not to be kept."""
        assert self._model is not None
        kept = {id(parameter) for parameter in _kept(self._model, keep)}
        lacking = [name for name in keep if dict(self._model.named_parameters(remove_duplicate=False))[name].is_meta]
        if lacking:
            raise InputError(
                f"the function that makes the model leaves parameter {lacking[0]!r} on the meta device, where it has no numbers; let it "
                "make or read all of them"
            )
        _put_on_meta(self._model, kept)
        return self._model


def _module(made: object) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise InputError(f"zb.split takes a module or a function that makes one, and the function gave a {type(made).__name__}")
    return made


def _kept(model: nn.Module, keep: Collection[str]) -> list[nn.Parameter]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return [named[name] for name in keep]


def _beside_parameters(model: nn.Module) -> Iterable[Any]:
    """What the modules of `model` hold beside parameters and modules: buffers and other attributes."""
    own = {id(parameter) for parameter in model.parameters()}
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_modules")}
        yield from (leaf for leaf in pytree.tree_leaves(list(held.values())) if id(leaf) not in own)


def _put_on_meta(model: nn.Module, kept: Collection[int]) -> None:
    """Parameters that were made because others were computed from them, and are none of this rank's."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta and id(parameter) not in kept:
                empty = type(parameter)(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), empty)
