"""`split`: a model that was not written for pipelining, as what `Pipeline` builds its stages from."""

from __future__ import annotations

from typing import Any

from torch import nn

from zerobubble.arguments import takes
from zerobubble.errors import InputError
from zerobubble.models.choice import UnitCost, choose_stages
from zerobubble.models.cut import ModelCut, crossings, cut_at
from zerobubble.models.dataflow import Dataflow
from zerobubble.models.example import arguments_of, own_example
from zerobubble.models.observation import ObservedModel
from zerobubble.models.stage_model import stage_model
from zerobubble.models.units import find_units


class ModelSplit:
    """A model that can be cut: called with a stage and the number of stages, as `Pipeline` does, it gives the module of that stage.

    The modules train the model's own parameters, under the model's own names.
    """

    def __init__(self, model: nn.Module, example: Any = None) -> None:
        self._model = model
        self._units = find_units(model)
        self._observed = ObservedModel(model, self._units)
        self._flow = self._look(own_example(model) if example is None else example)
        self._cuts: dict[int, ModelCut] = {}

    def _look(self, example: Any) -> Dataflow:
        if example is None:
            raise InputError(
                f"{type(self._model).__name__} brings no example of its arguments: give zb.split(model, example=...) a small batch, "
                "as to step"
            )
        args, kwargs = arguments_of(example, self._model)
        return self._observed.flow(args, kwargs, training=self._model.training)

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        """The module of `stage`; raises `InputError` where the model cannot be cut into so many."""
        return stage_model(self._model, self._units, self._observed, self.cut(num_stages), stage)

    def cut(self, num_stages: int) -> ModelCut:
        """Where the model is cut into `num_stages`."""
        if num_stages not in self._cuts:
            stages = choose_stages(self._costs(), num_stages)
            self._cuts[num_stages] = cut = cut_at(self._flow, self._with_unused(stages), self._homes())
            crossings(self._flow, cut)
        return self._cuts[num_stages]

    def _costs(self) -> list[UnitCost]:
        """What each unit costs that the example calls, in the order of their calls."""
        flops = dict.fromkeys(self._flow.units, 0)
        for call, called in self._flow.calls.items():
            flops[call.unit] += called.flops
        units = self._units.units
        return [UnitCost(name, count, sum(p.numel() for p in units[name].parameters())) for name, count in flops.items()]

    def _with_unused(self, stages: list[list[str]]) -> list[list[str]]:
        """Units that the example does not call lie with the one that the model has before them."""
        stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
        found, stage = [list(units) for units in stages], 0
        for unit in self._units.units:
            if unit not in stage_of:
                found[stage].append(unit)
            stage = stage_of.get(unit, stage)
        return found

    def _homes(self) -> dict[str, str]:
        """For each parameter outside of all units, the unit that the model has before it, or its first."""
        names = list(self._units.units)
        inside = {id(parameter) for unit in self._units.units.values() for parameter in unit.parameters()}
        outside = [name for name, parameter in self._model.named_parameters() if id(parameter) not in inside]
        return dict.fromkeys(outside, names[0])

    def tied(self, num_stages: int) -> list[list[tuple[int, str]]]:
        """The parameters of the model that several stages hold, as groups for `Pipeline(tied=...)`."""
        cut = self.cut(num_stages)
        places: dict[int, dict[int, str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            for stage in range(num_stages):
                if name in cut.parameters[stage] or self._is_in_unit(name, cut, stage):
                    places.setdefault(id(parameter), {}).setdefault(stage, name)
        return [sorted(group.items()) for group in places.values() if len(group) > 1]

    def _is_in_unit(self, name: str, cut: ModelCut, stage: int) -> bool:
        return any(name.startswith(f"{unit}.") for unit, home in cut.stage_of.items() if home == stage)


@takes(model=nn.Module)
def split(model: nn.Module, example: Any = None) -> ModelSplit:
    """`model` cut into stages, for `zb.Pipeline(zb.split(model), schedule, num_microbatches, loss_fn)`.

    `model` has its weights, the same on every rank. Every stage runs its code, with stand-ins for the parts that other stages hold, so
    `pipe.step` is given what the model is called with, `loss_fn` what the model returns, and parameters keep their names. Parameters that
    several stages hold are tied by themselves.

    `example` is a small batch as `step` is given it, by which the model is cut; models of Transformers bring one. Nothing is computed of
    it but the shapes. Raises `InputError` for a model that has none, and for one that cannot be cut, naming the part and what would help.
    """
    return ModelSplit(model, example)
