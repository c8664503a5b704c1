"""All names of a model's parameters, and the stages of a cut that hold them.

Distinct parameters that share memory are refused: autograd and optimizers do not know of it, and stages cannot preserve it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from zerobubble.errors import InputError
from zerobubble.models.cutting.cut import ModelCut
from zerobubble.models.observation.source_tracker import storage_of
from zerobubble.models.observation.units import Units
from zerobubble.runtime.values.released import is_released


class ParameterNames:
    """The names of the parameters of `model`, which is cut between these `units`. A parameter may have several names.

    `named` maps each name to its parameter, in the model's order. `outside` maps each name outside of all units to all such names of the
    same parameter. `homes` maps it to a unit, whose stage keeps the parameter if no code uses the parameter by this name: a unit that holds
    it under another name, or else the model's first unit.
    """

    def __init__(self, model: nn.Module, units: Units) -> None:
        self.named: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        self.outside = self._outside(model, units)
        holder = {id(parameter): name for name, unit in units.units.items() for parameter in unit.parameters()}
        first = next(iter(units.units), "")
        self.homes: Mapping[str, str] = {name: holder.get(id(self.named[name]), first) for name in self.outside}

    def _outside(self, model: nn.Module, units: Units) -> dict[str, list[str]]:
        """Returns the names outside of all units. A module of a unit may have another name there, such as T5's embedding in its encoder."""
        inside = {id(module) for unit in units.units.values() for module in unit.modules()}
        owners = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
        outside = [name for name in self.named if owners[name.rpartition(".")[0]] not in inside]
        of_parameters: dict[int, list[str]] = {}
        for name in outside:
            of_parameters.setdefault(id(self.named[name]), []).append(name)
        return {name: of_parameters[id(self.named[name])] for name in outside}

    def of_stage(self, cut: ModelCut, stage: int) -> list[str]:
        """Returns the names of the parameters of `stage`, in the model's order."""
        prefixes = tuple(f"{unit}." for unit, home in cut.stage_of.items() if home == stage)
        return [name for name in self.named if name.startswith(prefixes) or name in cut.parameters[stage]]

    def tied(self, cut: ModelCut) -> list[list[tuple[int, str]]]:
        """Returns the parameters that several stages hold, each as a list of stages and its first name there."""
        places: dict[int, dict[int, str]] = {}
        for stage in range(cut.num_stages):
            for name in self.of_stage(cut, stage):
                places.setdefault(id(self.named[name]), {}).setdefault(stage, name)
        return [sorted(group.items()) for group in places.values() if len(group) > 1]


class _Place(NamedTuple):
    """The location of a parameter (storage, first byte, end), and the stages that hold it."""

    storage: int
    begin: int
    end: int
    stages: tuple[int, ...]
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} of stage {self.stages[0]}"


def refuse_shared_memory(names: ParameterNames, cut: ModelCut) -> None:
    """Raises `InputError` if two parameters overlap in memory and are not in the same stages of `cut`.

    On one device, an optimizer step on either parameter changes both.
    """
    before: list[_Place] = []
    for place in sorted(_places(names, cut)):
        before = [other for other in before if other.storage == place.storage and other.end > place.begin]
        for other in before:
            if other.stages != place.stages:
                raise InputError(
                    "parameters {other} and {place} are different objects in the same memory: on one device, an optimizer that "
                    "changes one changes both, and stages cannot",
                    other=other,
                    place=place,
                    remedy="use a single parameter, which is tied automatically, give each its own memory, or cut the model so that "
                    "both are in one stage",
                )
        before.append(place)


def _places(names: ParameterNames, cut: ModelCut) -> Iterator[_Place]:
    """Yields the place of each parameter that has memory in a stage, under its first name."""
    parameters = {id(parameter): (name, parameter) for name, parameter in reversed(list(names.named.items()))}
    stages: dict[int, list[int]] = {key: [] for key in parameters}
    for stage in range(cut.num_stages):
        for key in {id(names.named[name]) for name in names.of_stage(cut, stage)}:
            stages[key].append(stage)
    for key, (name, parameter) in parameters.items():
        if _has_memory(parameter) and stages[key]:
            yield _place(name, parameter, stages[key])


def _has_memory(parameter: nn.Parameter) -> bool:
    return parameter.layout is torch.strided and parameter.numel() > 0 and not is_released(parameter)


def _place(name: str, parameter: nn.Parameter, stages: Sequence[int]) -> _Place:
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    begin, size = int(parameter.storage_offset()), parameter.element_size()
    return _Place(storage_of(parameter), begin * size, (begin + last + 1) * size, tuple(stages), name)
