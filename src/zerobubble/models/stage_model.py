"""One stage of a model that was cut: the model's own code, with stand-ins for the units that other stages hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zerobubble.models.cut import ModelCut
from zerobubble.models.dataflow import UnitCall
from zerobubble.models.stand_in import ForwardInProgress, StandIn
from zerobubble.models.units import Units


class _StageIsDoneError(BaseException):
    """Raised in the forward of a stage when it has made all that it makes, to leave the model's code behind that."""


class _Making:
    """Makes the modules of one stage from those of the model."""

    def __init__(self, units: Units, cut: ModelCut, stage: int) -> None:
        self.cut = cut
        self.stage = stage
        self.progress: list[ForwardInProgress] = []
        self._names = {unit: name for name, unit in units.units.items()}
        self._around = units.around
        self._made: dict[nn.Module, nn.Module] = {}

    def module(self, name: str, given: nn.Module) -> nn.Module:
        """What is in the place of the model's module of this name, once for all its names."""
        if given not in self._made:
            self._made[given] = self._unit(given) if given in self._names else self._module_around(name, given)
        return self._made[given]

    def _unit(self, given: nn.Module) -> nn.Module:
        name = self._names[given]
        if self.cut.stage_of.get(name) != self.stage:
            forms = {call: called.form for call, called in self.cut.calls.items() if call.unit == name}
            return StandIn(name, given, forms, self.progress)
        made = _shallow(given)
        made.register_forward_hook(self._note(name))
        return made

    def _note(self, name: str) -> Callable[..., None]:
        """A hook that keeps what the unit gives, and ends the forward behind the stage's last unit."""
        last = self.cut.last_call(self.stage) if self.stage < self.cut.num_stages - 1 else None

        def note(_: nn.Module, __: Any, output: Any) -> None:
            progress = self.progress[0]
            call = progress.next_call(name)
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            changes = call in self.cut.calls and self.cut.calls[call].changed_later
            progress.made[call] = [tensor.clone() for tensor in tensors] if changes and call != last else tensors
            if call == last:
                raise _StageIsDoneError

        return note

    def _module_around(self, name: str, given: nn.Module) -> nn.Module:
        if name not in self._around:
            return copy.deepcopy(given)
        made = _shallow(given)
        made._modules = {
            child: None if part is None else self.module(f"{name}.{child}" if name else child, part) for child, part in given._modules.items()
        }
        made._buffers = {own: None if buffer is None else buffer.clone() for own, buffer in given._buffers.items()}
        made._parameters = {}
        for own, parameter in given._parameters.items():
            full = f"{name}.{own}" if name else own
            if parameter is None or full in self.cut.parameters[self.stage]:
                made._parameters[own] = parameter
            else:  # code that runs on every stage reads it, and what it makes of it is used elsewhere
                made.__dict__[own] = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        return made


def _shallow(module: nn.Module) -> nn.Module:
    """Another module with the same parts, parameters, buffers and hooks, to which more can be added."""
    made = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        made.__dict__[name] = module.__dict__[name].copy()
    return made


def stage_model(model: nn.Module, units: Units, cut: ModelCut, stage: int) -> nn.Module:
    """Stage `stage` of `model`: a module of the model's class, whose parameters are named as in the model.

    The first stage is called as the model is. It gives the next stage a dict, which becomes its named arguments: the inputs of the model,
    and the outputs of units that cross the boundary. The last stage gives what the model gives.
    """
    making = _Making(units, cut, stage)
    made = making.module("", model)
    kind = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        crossed: Mapping[UnitCall, list[Tensor]] = {}
        if stage > 0:
            args, kwargs, crossed = _unpacked(cut, stage, kwargs)
        progress = ForwardInProgress(crossed)
        making.progress[:] = [progress]
        try:
            output = kind.forward(self, *args, **kwargs)
        except _StageIsDoneError:
            output = None
        finally:
            making.progress.clear()
        if stage == cut.num_stages - 1:
            return output
        values = [progress.made[call] if call in progress.made else crossed[call] for call in cut.crossing[stage]]
        return {"args": list(args), "kwargs": kwargs, "values": values}

    made.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return made


def _unpacked(cut: ModelCut, stage: int, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], dict[UnitCall, list[Tensor]]]:
    """The model's arguments and what has crossed the boundary in front of `stage`."""
    arguments = dict(given)
    args = tuple(arguments.pop("args"))
    kwargs = {**arguments.pop("kwargs"), **{}}
    values = arguments.pop("values")
    return args, {**kwargs, **arguments}, dict(zip(cut.crossing[stage - 1], map(list, values), strict=True))
