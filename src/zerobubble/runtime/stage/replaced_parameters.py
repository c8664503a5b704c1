"""Refuses another parameter in a place that several stages, ranks or replicas hold, or may come to hold: the same error on all ranks.

Every rank has the whole model of which `zb.split` has cut its stages, and a user changes it on all ranks. So each rank finds the change
before it begins a call, also for parameters of other ranks' stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

import torch
from torch import nn

from zerobubble.errors import InputError
from zerobubble.runtime.stage.cut_model import models_of


class _Place(NamedTuple):
    """Where a model holds a parameter: the attribute `name` of `owner`, and the name in the whole model."""

    full_name: str
    owner: weakref.ref[nn.Module]
    name: str
    parameter: weakref.ref[nn.Parameter]

    def now(self) -> nn.Parameter | None:
        """Returns the parameter that is there now."""
        owner = self.owner()
        return self.parameter() if owner is None else owner._parameters.get(self.name)


class ReplacedParameters:
    """Looks for other parameters in the models of `stages`. Takes about 0.2 us for each parameter.

    Args:
        stages: The stages of this rank.
        shared: The names of parameters that several stages or ranks hold.
        holders: For each name, the ranks of the pipeline that hold the parameter.
        replicas: Whether there are replicas, whose sums know the parameters of the start only.
    """

    def __init__(self, stages: Iterable[nn.Module], shared: Set[str], holders: Mapping[str, Set[int]], *, replicas: bool) -> None:
        self._shared, self._holders, self._replicas = shared, holders, replicas
        self._known: weakref.WeakSet[nn.Parameter] = weakref.WeakSet()
        self._places: list[_Place] = []
        for model in dict.fromkeys(model for stage in stages for model in models_of(stage)):
            self._known.update(model.parameters())
            for path, owner in model.named_modules(remove_duplicate=False):
                if not isinstance(owner, torch.jit.ScriptModule):
                    named = [(name, parameter) for name, parameter in owner._parameters.items() if parameter is not None]
                    prefix = f"{path}." if path else ""
                    self._places += [_Place(prefix + name, weakref.ref(owner), name, weakref.ref(held)) for name, held in named]

    def refuse(self) -> None:
        """Raises `InputError` if a parameter was replaced."""
        changed = {place.full_name: now for place in self._places if (now := place.now()) is not place.parameter()}
        if not changed:
            return
        replaced = [name for name, now in changed.items() if name in self._shared or (self._replicas and self._is_new(now))]
        if replaced:
            raise InputError(
                "the model has another parameter as {names} than when the pipeline was made, and several stages, ranks or replicas hold it",
                names=", ".join(sorted(replaced)),
                remedy=f"put the former parameter back, and change its values in place; to train another one, {_ANEW}",
            )
        names_of: dict[nn.Parameter, list[str]] = {}
        for place in self._places:
            if (now := place.now()) is not None:
                names_of.setdefault(now, []).append(place.full_name)
        for name, now in changed.items():
            names = [] if now is None else names_of[now]
            if len(set().union(*(self._holders.get(other, ()) for other in names))) > 1:
                raise InputError(
                    "{names} were tied after the pipeline was made, and stages of several ranks hold them",
                    name=name,
                    names=", ".join(names),
                    remedy=f"tie them before zb.split, or {_ANEW}",
                )

    def _is_new(self, parameter: nn.Parameter | None) -> bool:
        return parameter is not None and parameter not in self._known


_ANEW = "close the pipeline inside `with zb.gathered(model):`, and make a new pipeline and optimizer for the changed model"
