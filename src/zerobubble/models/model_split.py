"""`split`: a model that was not written for pipelining, as what `Pipeline` builds its stages from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zerobubble.arguments import either, optional, takes
from zerobubble.errors import InputError
from zerobubble.models.by_hand import CUTS, ByHand, stages_by_hand
from zerobubble.models.choice import UnitCost, choose_stages
from zerobubble.models.costs import COUNTING, Machine, estimated_layers
from zerobubble.models.cut import ModelCut, crossings, cut_at
from zerobubble.models.dataflow import Dataflow
from zerobubble.models.example import Arguments, arguments_of, own_example
from zerobubble.models.factory import MAKES_A_MODEL, make_model
from zerobubble.models.observation import ObservedModel
from zerobubble.models.proof import prove
from zerobubble.models.stage_model import stage_model
from zerobubble.models.units import find_units
from zerobubble.partition import Layer

_MOST_PROVED = 10_000_000
"""Models of up to so many parameters are proved on themselves."""


class StageSummary(NamedTuple):
    """The units of a stage in the order of their calls, the floating-point operations of their forward on the example, their parameters."""

    units: list[str]
    flops: int
    parameters: int


class ModelSplit:
    """A model that can be cut: called with a stage and the number of stages, as `Pipeline` does, it gives the module of that stage.

    The modules train the model's own parameters, under the model's own names.
    """

    def __init__(self, source: nn.Module | Callable[[], nn.Module], example: Any, cuts: ByHand | None) -> None:
        self._random_state = torch.random.get_rng_state()
        self._make = None if isinstance(source, nn.Module) else source
        self._model = source if isinstance(source, nn.Module) else make_model(source)
        _refuse_meta(source)
        self._units = find_units(self._model)
        self._observed = ObservedModel(self._model, self._units)
        self._arguments = self._looked_at_with(example)
        self._flow = self._look()
        self._by_hand = cuts
        self._cuts: dict[int, ModelCut] = {}

    def _looked_at_with(self, example: Any) -> Arguments:
        found = own_example(self._model) if example is None else example
        if found is None:
            raise InputError(
                f"{type(self._model).__name__} brings no example of its arguments: give zb.split(model, example=...) a small "
                "batch, as to step"
            )
        return arguments_of(found, self._model)

    def _look(self) -> Dataflow:
        args, kwargs = self._arguments
        try:
            return self._observed.flow(args, kwargs, training=self._model.training)
        except InputError:
            raise
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise InputError(
                f"{type(self._model).__name__} fails on the example, with its parts replaced by what has their shapes: {error}; "
                "give zb.split(model, example=...) a batch that the model takes, as to step"
            ) from error

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        """The module of `stage`; raises `InputError` where the model cannot be cut into so many."""
        cut = self.cut(num_stages)
        if self._make is None:
            return stage_model(self._model, self._units, self._observed, cut, stage)
        model = make_model(self._make, self._names_in(cut, stage), self._random_state)
        return stage_model(model, find_units(model), self._observed, cut, stage)

    def cut(self, num_stages: int) -> ModelCut:
        """Where the model is cut into `num_stages`; raises `InputError` where it cannot be, or where the cut gives other numbers."""
        if num_stages not in self._cuts:
            cut = cut_at(self._flow, self._with_unused(self._stages(num_stages)), self._homes())
            crossings(self._flow, cut)
            if self._make is None and sum(parameter.numel() for parameter in self._model.parameters()) <= _MOST_PROVED:
                prove(self._model, lambda copied: _stages_of(copied, cut), self._arguments)
            self._cuts[num_stages] = cut
        return self._cuts[num_stages]

    def _stages(self, num_stages: int) -> list[list[str]]:
        if self._by_hand is None:
            return choose_stages(self.layers(COUNTING), num_stages)
        stages = stages_by_hand(self._by_hand, self._flow.units, self._units.layers or frozenset(self._units.units))
        if len(stages) != num_stages:
            raise InputError(f"the cuts given to zb.split make {len(stages)} stages, and the schedule has {num_stages}")
        return stages

    def layers(self, machine: Machine | None = None) -> tuple[Layer, ...]:
        """The units that the example calls as layers to be planned for, in the order of their calls, estimated without running them.

        `machine` says how fast operations and messages are; if not given, as on a GPU of today. See `zerobubble plan --layers`.
        """
        return estimated_layers(self._units.units, self._flow, machine or Machine())

    def costs(self) -> list[UnitCost]:
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

    def _homes(self) -> Mapping[str, str]:
        """For each parameter outside of all units, the unit in whose stage it is kept where nothing uses it: the model's first."""
        inside = {id(parameter) for unit in self._units.units.values() for parameter in unit.parameters()}
        outside = [name for name, parameter in self._model.named_parameters() if id(parameter) not in inside]
        return dict.fromkeys(outside, next(iter(self._units.units)))

    def tied(self, num_stages: int) -> list[list[tuple[int, str]]]:
        """The parameters of the model that several stages hold, as groups for `Pipeline(tied=...)`."""
        cut = self.cut(num_stages)
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        places: dict[int, dict[int, str]] = {}
        for stage in range(num_stages):
            for name in self._names_in(cut, stage):
                places.setdefault(id(parameters[name]), {}).setdefault(stage, name)
        return [sorted(group.items()) for group in places.values() if len(group) > 1]

    def _names_in(self, cut: ModelCut, stage: int) -> list[str]:
        """The names of the parameters that `stage` holds, in the model's order."""
        prefixes = tuple(f"{unit}." for unit, home in cut.stage_of.items() if home == stage)
        names = [name for name, _ in self._model.named_parameters(remove_duplicate=False)]
        return [name for name in names if name.startswith(prefixes) or name in cut.parameters[stage]]

    def stages(self, num_stages: int) -> list[StageSummary]:
        """What each stage holds and does."""
        cut, costs = self.cut(num_stages), {cost.unit: cost for cost in self.costs()}
        found = []
        for stage in range(num_stages):
            units = [unit for unit in costs if cut.stage_of[unit] == stage]
            found.append(StageSummary(units, *(sum(getattr(costs[unit], name) for unit in units) for name in ("flops", "parameters"))))
        return found

    def describe(self, num_stages: int) -> str:
        """The cut in words, a line for each stage and for each tied parameter."""
        stages = self.stages(num_stages)
        whole = sum(stage.flops for stage in stages) or 1
        lines = [
            f"stage {number}: {' to '.join(dict.fromkeys((stage.units[0], stage.units[-1])))}: {stage.parameters:,} parameters, "
            f"{stage.flops / whole:.1%} of the operations of a forward"
            for number, stage in enumerate(stages)
        ]
        tied = [" and ".join(f"{name} of stage {stage}" for stage, name in group) for group in self.tied(num_stages)]
        return "\n".join([*lines, *(f"tied: {group}" for group in tied)])


def _stages_of(model: nn.Module, cut: ModelCut) -> list[nn.Module]:
    units = find_units(model)
    observed = ObservedModel(model, units)
    return [stage_model(model, units, observed, cut, stage) for stage in range(cut.num_stages)]


def _refuse_meta(source: object) -> None:
    if isinstance(source, nn.Module) and any(parameter.is_meta for parameter in source.parameters()):
        raise InputError(
            "zb.split was given a model on the meta device, which has no numbers: give it the function that makes the model with numbers, "
            "and each rank keeps those of its own stages alone"
        )


@takes(model=either(nn.Module, MAKES_A_MODEL), cuts=optional(CUTS))
def split(model: nn.Module | Callable[[], nn.Module], *, example: Any = None, cuts: ByHand | None = None) -> ModelSplit:
    """`model` cut into stages, for `zb.Pipeline(zb.split(model), schedule, num_microbatches, loss_fn)`.

    `model` has its weights, the same on every rank. Every stage runs its code, with stand-ins for the parts that other stages hold, so
    `pipe.step` is given what the model is called with, `loss_fn` what the model returns, and parameters keep their names. Parameters that
    several stages hold are tied by themselves. Instead of a model, a function that makes one on the CPU: then each rank has only the
    parameters of its own stages in memory, with the values of one device where ranks set the same seed.

    `example` is a small batch as `step` is given it, by which the model is cut; models of Transformers bring one. Nothing is computed of
    it but shapes, and, for models of up to 10 million parameters, the proof: cut and uncut must agree on it in float64.

    Stages do about as many floating-point operations, unless `cuts` says where they begin: names of parts for every stage but the first
    (`["model.layers.4"]`), the number of layers of each stage (`[4, 3]`), or a layout of Megatron (`"Ettt|ttttL"`).

    Raises `InputError` for a model that brings no example, and for one that cannot be cut, naming the part and what would help.

    >>> import torch
    >>> import zerobubble as zb
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> print(zb.split(model, example=torch.ones(1, 4)).describe(2))
    stage 0: 0: 40 parameters, 50.0% of the operations of a forward
    stage 1: 2: 36 parameters, 50.0% of the operations of a forward
    """
    return ModelSplit(model, example, cuts)
