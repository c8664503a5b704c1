"""All names of a model's parameters, and the stages of a cut that hold them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from zerobubble.models.cutting.cut import ModelCut
from zerobubble.models.observation.units import Units


class ParameterNames:
    """The names of the parameters of `model`, which is cut between these `units`. A parameter may have several names.

    `named` maps each name to its parameter, in the model's order. For each name outside of all units, `outside` has all such names of that
    parameter. `homes` has the unit whose stage keeps the parameter if no code uses it by that name: the unit that holds it under another
    name, otherwise the model's first unit.
    """

    def __init__(self, model: nn.Module, units: Units) -> None:
        self.named: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        self.outside = self._outside(units)
        holder = {id(parameter): name for name, unit in units.units.items() for parameter in unit.parameters()}
        first = next(iter(units.units), "")
        self.homes: Mapping[str, str] = {name: holder.get(id(self.named[name]), first) for name in self.outside}

    def _outside(self, units: Units) -> dict[str, list[str]]:
        inside = tuple(f"{unit}." for unit in units.units)
        outside = [name for name in self.named if not name.startswith(inside)]
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
