"""`split`: converts a model that was not written for pipelining into a builder of stages for `Pipeline`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast, overload

import torch
from torch import nn
from torch.distributed.pipelining import Pipe

from zerobubble.arguments import BYTES, either, optional, takes
from zerobubble.cost_model.machine import COUNTING, Machine
from zerobubble.error_reports.text import describe
from zerobubble.error_reports.user_code import keep_only_user_code
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Placement, Schedule
from zerobubble.models.cutting.by_hand import CUTS, ByHand, spelled_out, stages_by_hand
from zerobubble.models.cutting.choice import UnitCost, Where, choose_cuts, joined_in_groups, joined_inside_blocks
from zerobubble.models.cutting.costs import estimated_layers
from zerobubble.models.cutting.cut import ModelCut, called_again, crossings, cut_at, groups_in_order, parts_of_the_output, units_in_order
from zerobubble.models.cutting.parameter_names import ParameterNames, refuse_shared_memory
from zerobubble.models.cutting.summary import StageSummary, cut_in_words
from zerobubble.models.making.configuration import CONFIGURATION, is_configuration, maker_of
from zerobubble.models.making.exported import EXPORTED, example_of, module_of
from zerobubble.models.making.factory import MAKES_A_MODEL, ModelFactory
from zerobubble.models.making.source import ModelSource
from zerobubble.models.observation.copies import copy_of
from zerobubble.models.observation.dataflow import Dataflow
from zerobubble.models.observation.drawn_around import REMEDY
from zerobubble.models.observation.example import Arguments, arguments_of, own_example
from zerobubble.models.observation.following import ModuleSnapshot
from zerobubble.models.observation.observed_model import ObservedModel
from zerobubble.models.observation.operations import parameters_of
from zerobubble.models.observation.units import Units, blocks_around, find_units
from zerobubble.models.proof.lost_code import refuse_lost
from zerobubble.models.proof.prove import proved
from zerobubble.models.proof.tiny import MOST_PROVED
from zerobubble.models.proof.trace_numbers import refuse_other_numbers
from zerobubble.models.stages.code_values import CodeValues
from zerobubble.models.stages.stage_model import stage_model
from zerobubble.models.stages.torch_pipe import PIPE, PipeStages
from zerobubble.partition import Layer, LayerCut, cut_layers
from zerobubble.planning import Plan
from zerobubble.runtime.device import move
from zerobubble.runtime.stage.cut_model import note_model
from zerobubble.runtime.stage.whole_model import ModelFacts
from zerobubble.runtime.values.buffers import making_tensors
from zerobubble.runtime.values.python_state import PythonState, named_generators
from zerobubble.runtime.values.released import is_released
from zerobubble.runtime.without_weights import refuse_copy
from zerobubble.units import NS_PER_MS, as_bytes, counted

MODEL = either(PIPE, nn.Module, MAKES_A_MODEL, CONFIGURATION, EXPORTED)
Look = tuple[Units, Dataflow]
"""The units of a model, and their dataflow."""


class ModelSplit:
    """A model that can be cut: called with a stage and the number of stages, as by `Pipeline`, it returns the module of that stage.

    The modules train the model's own parameters, under the model's own names.
    """

    def __init__(
        self,
        source: nn.Module | Callable[[], nn.Module] | ModelFactory,
        example: Any,
        cuts: ByHand | None = None,
        memory: int | None = None,
        *,
        inside_blocks: bool = False,
    ) -> None:
        self._make_again = partial(ModelSplit, source, example, cuts, memory, inside_blocks=inside_blocks)
        self._source = ModelSource.from_given(source)
        self._state = [ModuleSnapshot(module, contents=True) for module in self._modules_of_user()]
        self._units = find_units(self._model)
        self._blocks = self._units.layers
        self._arguments = self._looked_at_with(example)
        self._cuts: dict[int, ModelCut] = {}
        self._opened: frozenset[str] | None = None
        self._other_ways = self._untraced = ""
        self._has_made = False
        self._code_values: CodeValues | None = None
        """The values that the trace saw, if there is one."""
        with garbage_collection_paused():  # creating many modules would trigger many full collections
            self._by_hand = self._opened_for(cuts)
            if cuts is None:
                self._by_hand = self._marked(chooses=memory is not None or inside_blocks)
            self._fine: Look = self._looked_at(self._blocks) if inside_blocks else (self._units, self._flow)
        self._memory = memory
        self._schedule: Schedule | None = None
        self._device: torch.device | None = None
        self._proofs: dict[int, str] = {}
        self._layers: dict[Machine, tuple[Layer, ...]] = {}

    __deepcopy__ = refuse_copy

    def _marked(self, *, chooses: bool) -> ByHand | None:
        """Returns the cuts marked in the model's code by `pipe_split()` of torch.distributed.pipelining, None without marks."""
        marked = self._flow.marked
        if not marked or not self._order:
            return None
        if chooses:
            raise InputError(
                "the model marks its cuts with pipe_split(), but memory and inside_blocks are for cuts that zb.split chooses",
                remedy="leave them out",
            )
        if None in marked:
            raise InputError(
                "the model calls pipe_split() {num_marked} times in a forward, but not every call is followed by a part of the "
                "model before the next call or the end: the parts are {order}",
                num_marked=len(marked),
                order=", ".join(map(repr, self._order)),
            )
        return [unit for unit in marked if unit is not None]

    @property
    def _model(self) -> nn.Module:
        """The model to cut; if a function creates it, its parameters are on the meta device."""
        return self._source.model

    def __repr__(self) -> str:
        return f"<ModelSplit of {type(self._model).__name__}: {len(self._units.units)} parts>"

    def for_schedule(self, schedule: Schedule, first_parts: Sequence[str] = (), device: torch.device | str | None = None) -> ModelSplit:
        """Returns this split for the stages of `schedule`: balanced over its ranks, within its memory.

        `first_parts` are the first parts of a plan's stages, used if the user gave no cuts. What runs on every stage of a given model is
        moved to `device`. Called by `Pipeline`.
        """
        split = copy.copy(self)
        split._renew_if_changed()
        split._device = None if device is None else torch.device(device)
        split._schedule, split._cuts, split._proofs, split._layers = schedule, {}, {}, dict(split._layers)
        if self._by_hand is None and first_parts:
            split._by_hand = split._opened_for(tuple(first_parts))
            split._fine, split._layers = (split._units, split._flow), {}
        return split

    def _modules_of_user(self) -> list[nn.Module]:
        """Returns the modules that the user may change: the modules of a model that was passed as a module."""
        return list(self._source.untraced.modules()) if self._source.is_given else []

    def _is_as_observed(self) -> bool:
        is_traced_as_now = self._code_values is None or not self._code_values.changed()
        return is_traced_as_now and len(self._modules_of_user()) == len(self._state) and all(snapshot.holds() for snapshot in self._state)

    def _renew_if_changed(self) -> None:
        """Observes the model anew if it was changed since, before its first stage is made."""
        if not self._has_made and not self._is_as_observed():
            self.__dict__.update(self._make_again().__dict__)
        self._has_made = True

    def _opened_for(self, cuts: ByHand | None) -> ByHand | None:
        """Opens the blocks that these cuts are inside of, and returns the cuts. A cut before a block's first part is not inside."""
        names = [] if cuts is None or isinstance(cuts, str) else [name for name in cuts if isinstance(name, str)]
        self._open(blocks_around(names, find_units(self._model)))
        first_parts = {block: unit for unit in reversed(self._order) if (block := self._units.block_of.get(unit)) is not None}
        blocks = {unit: block for block, unit in first_parts.items()}
        if blocks.keys().isdisjoint(names):
            return cuts
        outside = [blocks.get(name, name) for name in names]
        self._open(blocks_around(outside, find_units(self._model)))
        return outside

    def _open(self, blocks: Collection[str]) -> None:
        """Allows cuts between the parts of only these blocks: every later stage repeats the residual sums of an opened block."""
        if frozenset(blocks) == self._opened:
            return
        self._opened = frozenset(blocks)
        self._units = find_units(self._model, self._opened)
        self._names = ParameterNames(self._model, self._units)
        self._observed = ObservedModel(self._model, self._units)
        self._flow = self._look(self._observed)
        self._order = units_in_order(self._flow)
        self._cuts.clear()

    def _looked_at(self, blocks: Collection[str]) -> Look:
        """Observes the model with these blocks opened."""
        units = find_units(self._model, blocks)
        return units, self._look(ObservedModel(self._model, units))

    def _looked_at_with(self, example: Any) -> Arguments:
        inputs = own_example(self._model) if example is None else example
        if inputs is None:
            raise InputError(
                "{model} has no example of its arguments",
                model=type(self._model).__name__,
                remedy="give zb.split(model, example=...) a small batch, as in step",
            )
        return arguments_of(inputs, self._model)

    def _look(self, observed: ObservedModel) -> Dataflow:
        args, kwargs = self._arguments
        try:
            return observed.flow(args, kwargs, training=self._model.training)
        except InputError:
            raise
        except Exception as error:
            keep_only_user_code(error)
            raise InputError(
                "{model} fails on the example, with its parts replaced by shape-only ones: {reason}",
                model=type(self._model).__name__,
                reason=describe(error),
                remedy="give zb.split(model, example=...) a batch that the model accepts, as in step, and pass a part as arguments what "
                "else it needs: each runs alone, without what the forward around it sets",
            ) from error

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        """Returns the module of `stage`; raises `InputError` if the model cannot be cut into `num_stages`."""
        self._renew_if_changed()
        cut = self.cut(num_stages)
        self._refuse_released(cut, stage)
        self._refuse_counts(self._observed.counts() if self._has_routes else ())
        self._refuse_draws(self._flow.drawn)
        model, units = self._model, self._units
        if not self._source.is_given:
            model = self._source.as_it_is_cut(self._source.with_numbers(self._names.of_stage(cut, stage)))
            units = find_units(model, self._opened or ())
        if self._device is not None:
            self._refuse_moved_trace(self._device)
            _move_around(model, units, self._device)
        is_alone, refuse_counts = self._is_alone(stage), self._refuse_counts if self._has_routes else None
        module = stage_model(
            model,
            units,
            self._observed,
            cut,
            stage,
            self._traced,
            self._device,
            is_alone=is_alone,
            refuse_counts=refuse_counts,
            code_values=self._code_values,
            refuse_draws=self._refuse_draws,
        )
        module.tied_in_the_model = [group for group in self._names.tied(cut) if any(holder == stage for holder, _ in group)]  # type: ignore[assignment]
        if self._source.is_given:
            note_model(module, [self._source.untraced])
        return module

    def _is_alone(self, stage: int) -> bool:
        """Returns whether no rank has another stage next to this one. Without a schedule, each rank has one."""
        placement = None if self._schedule is None else self._schedule.placement
        stages = [] if placement is None else [{number for _, number in placement.stages(rank)} for rank in range(placement.num_ranks)]
        return not any(stage in of_rank and len(of_rank) > 1 for of_rank in stages)

    @property
    def _has_routes(self) -> bool:
        """Whether the schedule has several routes, each with a copy of the stages."""
        return self._schedule is not None and len(self._schedule.placement.routes) > 1

    def _refuse_counts(self, names: Sequence[str]) -> None:
        """Raises `InputError` for these counts of the model, under a schedule whose routes each have a copy of the stages."""
        if names:
            assert self._schedule is not None
            raise InputError(
                "schedule {schedule!r} runs microbatches along {routes} routes, each of which would count its own {names} of the model",
                schedule=self._schedule.name,
                routes=len(self._schedule.placement.routes),
                names=", ".join(map(repr, names)),
                remedy="choose a schedule with one route, such as zb-v",
            )

    def _refuse_draws(self, generators: Collection[str]) -> None:
        """Raises `InputError` if the code around the parts draws from these, under a schedule with several routes, or with slices."""
        if generators and self._schedule is not None and (self._has_routes or self._schedule.slices > 1):
            raise InputError(
                "the model's code draws random numbers between its parts, from {generators}, in the order of microbatches, but schedule "
                "{schedule!r} {runs}",
                generators=named_generators(generators),
                schedule=self._schedule.name,
                runs="runs them along several routes" if self._has_routes else "runs slices of sequences",
                remedy=f"{REMEDY}, or choose a schedule with one route and without slices, such as zb-v",
            )

    def _refuse_moved_trace(self, device: torch.device) -> None:
        """Raises `InputError` for a model that is cut between operations and is elsewhere: its trace has constants."""
        if self._source.trace is not None and any(tensor.device.type != device.type for tensor in self._source.untraced.parameters()):
            raise InputError(
                "device={device} cannot move {model}, which is cut between operations because it has too few parts",
                device=str(device),
                model=type(self._source.untraced).__name__,
                remedy="move the model and the example before zb.split: model.to(device)",
            )

    def _refuse_released(self, cut: ModelCut, stage: int) -> None:
        """Raises `InputError` for a stage that another pipeline has trained on another rank."""
        for name in self._names.of_stage(cut, stage):
            if is_released(self._names.named[name]):
                raise InputError(
                    "stage {stage} has {name!r}, which an earlier pipeline of this model has trained on another rank",
                    stage=stage,
                    name=name,
                    remedy="close that pipeline inside `with zb.gathered(model):`, after which the model is whole, or load a checkpoint",
                )

    @property
    def _traced(self) -> nn.Module | None:
        """The given model of which the model to cut is a trace."""
        return self._source.untraced if self._source.is_given and self._source.trace is not None else None

    def cut(self, num_stages: int) -> ModelCut:
        """Returns the cut into `num_stages`; raises `InputError` if there is none, or if the cut model computes different values."""
        if num_stages not in self._cuts:
            self._trace_where_needed(num_stages)
            stages = self._stages(num_stages)
            cut = cut_at(self._flow, self._with_unused(stages), self._names.homes, self._names.outside)
            refuse_shared_memory(self._names, cut)
            crossings(self._flow, cut)
            with garbage_collection_paused():
                self._proofs[num_stages] = self._prove(cut)
            self._cuts[num_stages] = cut
        return self._cuts[num_stages]

    def _trace_where_needed(self, num_stages: int) -> None:
        """Traces a model without blocks and with too few parts, so that operations become parts; otherwise keeps the reason."""
        self._other_ways = self._untraced = ""
        if self._by_hand is not None or len(self.layers(COUNTING)) >= num_stages:
            return
        if self._blocks:  # tracing many layers takes minutes, and users do not think of operations as the model's parts
            self._other_ways = self._inside_blocks()
            return
        try:
            refuse_lost(self._source.untraced, self._arguments)
            traced = self._source.traced(self._arguments, num_stages)
            if sum(parameter.numel() for parameter in traced.model.parameters()) <= MOST_PROVED:
                whole = traced.with_numbers([name for name, _ in traced.model.named_parameters()])
                refuse_other_numbers(whole, traced.as_it_is_cut(whole), self._arguments)
        except InputError as error:
            self._untraced = f", and {error}"
            return
        self._source, self._opened = traced, None
        self._layers = {}
        self._open(())
        self._fine = (self._units, self._flow)
        self._code_values = CodeValues(traced.untraced)

    def _inside_blocks(self) -> str:
        """Returns the maximum number of stages with cuts inside blocks, as the end of a remedy; empty if that does not help."""
        try:
            most = len(self._layers_of(self._looked_at(self._blocks), COUNTING))
        except InputError:  # not every block can be cut
            return ""
        if most <= len(self.layers(COUNTING)):
            return ""
        return f", or cut inside its blocks, too, by inside_blocks=True (--inside-blocks in a shell): then it has up to {most} stages"

    def _prove(self, cut: ModelCut) -> str:
        opened = self._opened or ()
        return proved(self._model, self._whole, lambda model: _stages_of(model, opened, cut), cut, self._arguments)

    def _whole(self) -> nn.Module:
        """The model to cut, with all of its weights."""
        return self._source.as_it_is_cut(self._source.with_numbers(list(self._names.named)))

    def _skipped(self) -> str:
        """Returns which layers the example did not run, such as by LayerDrop, as the end of a sentence; empty if it ran all."""
        skipped = [name for name in self._units.units if name in self._blocks and name not in self._flow.units]
        return f"; the example skipped {counted(len(skipped), 'layer')}, such as {skipped[0]!r}" if skipped else ""

    def _stages(self, num_stages: int) -> list[list[str]]:
        if self._by_hand is None:
            reason, other_ways = self._skipped(), self._other_ways + called_again(self._flow)
            if reason:
                other_ways += ", or do not skip layers at random: set layerdrop to 0, or decide in the forward of the layer"
            names = self._opened_for(choose_cuts(self.layers(COUNTING), self._where(num_stages), self._untraced + reason, other_ways))
            return stages_by_hand(names or [], self._order, frozenset())
        blocks = self._units.layers or frozenset(self._units.units)
        stages = stages_by_hand(self._by_hand, self._order, blocks, parts_of_the_output(self._flow))
        if len(stages) != num_stages:
            origin = "the model's calls of pipe_split()" if self._flow.marked else "the cuts given to zb.split"
            raise InputError(
                "{origin} make {got} stages, but the schedule has {expected}", origin=origin, got=len(stages), expected=num_stages
            )
        return stages

    def _where(self, num_stages: int) -> Where:
        """Returns the placement of the schedule, or of one stage per rank without a schedule."""
        schedule = self._schedule
        if schedule is None or schedule.num_stages != num_stages:
            return Where(Placement.linear(num_stages), self._memory)
        if len(schedule.placement.routes) == 1:
            return Where(schedule.placement, self._memory, schedule)
        if self._memory is not None:
            raise InputError(
                "zb.split supports memory limits only for schedules with one route, and {name!r} has several",
                name=schedule.name,
                remedy="leave memory out",
            )
        return Where(Placement.linear(num_stages))

    def layers(self, machine: Machine | None = None) -> tuple[Layer, ...]:
        """Returns the units that the example calls as layers for planning, in model order, with costs estimated without running them.

        `machine` sets the speed of compute and messages. The default is a current GPU or, for models that take less than a millisecond on
        it, 10^9 FLOPs and bytes per second, so that times in whole ns stay distinct. See `zerobubble plan --layers`.
        """
        machine = self.machine if machine is None else machine
        if machine not in self._layers:
            self._layers[machine] = self._layers_of(self._fine, machine)
        return self._layers[machine]

    def _layers_of(self, look: Look, machine: Machine) -> tuple[Layer, ...]:
        units, flow = look
        with garbage_collection_paused(), PythonState(self._model).restored():
            layers = estimated_layers(units, flow, machine)
        if self._by_hand is None:
            return joined_inside_blocks(joined_in_groups(layers, groups_in_order(flow)))
        return joined_in_groups(layers, [[unit] for unit in units_in_order(flow)])

    @property
    def machine(self) -> Machine:
        """The default machine: a current GPU, or one FLOP per ns if the model takes less than a millisecond."""
        return Machine() if sum(layer.time for layer in self.layers(Machine())) >= NS_PER_MS else COUNTING

    def layer_cut(self, num_stages: int) -> LayerCut:
        """Returns the cut of `layers` into `num_stages`, with its lower bound."""
        stage_of, layers, placement = self.cut(num_stages).stage_of, self.layers(), self._where(num_stages).placement
        homes = [stage_of[layer.full_name if layer.full_name in stage_of else layer.block] for layer in layers]
        cuts = tuple(number for number, (before, here) in enumerate(pairwise(homes), 1) if before != here)
        best = cut_layers(layers, placement)
        return replace(best, cuts=cuts)

    def costs(self) -> list[UnitCost]:
        """Returns the cost of each unit that the example calls, in model order."""
        flops = dict.fromkeys(self._order, 0)
        for call, called in self._flow.calls.items():
            flops[call.unit] += called.flops
        units = self._units.units
        return [UnitCost(name, count, sum(p.numel() for p in parameters_of(units[name]))) for name, count in flops.items()]

    def _with_unused(self, stages: list[list[str]]) -> list[list[str]]:
        """Adds units that the example does not call: each joins a unit that contains it too, or else the unit before it in the model."""
        stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
        holders = {part: stage for unit, stage in stage_of.items() for part in self._units.units[unit].modules()}
        completed, stage = [list(units) for units in stages], 0
        for unit, module in self._units.units.items():
            if unit not in stage_of:
                completed[holders.get(module, stage)].append(unit)
            stage = stage_of.get(unit, stage)
        return completed

    def model_facts(self, num_stages: int) -> ModelFacts:
        """Returns the facts that all ranks must share: the model, its parameters with their values, and the cut."""
        begins: dict[int, str] = {}
        for unit, stage in self.cut(num_stages).stage_of.items():
            begins.setdefault(stage, unit)
        return self._source.facts({"cut of the model": f"stages from {', '.join(map(repr, begins.values()))}"})

    def tied(self, num_stages: int) -> list[list[tuple[int, str]]]:
        """Returns the parameters that several stages hold, as groups for `Pipeline(tied=...)`."""
        return self._names.tied(self.cut(num_stages))

    def stages(self, num_stages: int) -> list[StageSummary]:
        """Returns a summary of each stage."""
        cut, costs, home = self.cut(num_stages), {cost.unit: cost for cost in self.costs()}, self._where(num_stages).placement.routes[0]
        summaries = []
        for stage in range(num_stages):
            units = [unit for unit in costs if cut.stage_of[unit] == stage]
            flops, parameters = (sum(getattr(costs[unit], name) for unit in units) for name in ("flops", "parameters"))
            summaries.append(StageSummary(units, flops, parameters, home[stage]))
        return summaries

    def describe(self, num_stages: int) -> str:
        """Describes the cut: a line for each stage, each tied parameter and each rank, the lower bound, and the proof."""
        words = cut_in_words(self.stages(num_stages), self.tied(num_stages), self.layer_cut(num_stages))
        if self._schedule is None:
            words += "\nEach rank has one stage. For another placement: split.for_schedule(schedule), or --schedule on the command line."
        if self.machine == COUNTING:
            words += "\nTimes are estimates at 1 GFLOP/s, as the example is small. For those of a GPU, give an example of the real size "
            words += "(on the command line, --sequence)."
        else:
            words += f"\nTimes are estimates for an assumed GPU of {self.machine}."
        if self._source.trace is not None:
            words += "\nCut between operations, which torch.export found: the model has too few parts."
        return f"{words}\n{self._proofs[num_stages]}"


def _move_around(model: nn.Module, units: Units, device: torch.device) -> None:
    """Moves what every stage of `model` uses: all buffers, and the parameters outside of the units. Stages then move their own units."""
    inside = tuple(f"{unit}." for unit in units.units)
    modules = dict(model.named_modules())
    move((module for name, module in modules.items() if not f"{name}.".startswith(inside)), device, recurse=False)
    for module in modules.values():
        module._buffers.update({name: buffer.to(device) for name, buffer in module._buffers.items() if buffer is not None})


def _stages_of(model: nn.Module, opened: Collection[str], cut: ModelCut) -> list[nn.Module]:
    """Returns the stages of copies of `model`, which share only its parameters, as on ranks."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    copies = [copy_of(model, dict(parameters)) for _ in range(cut.num_stages)]
    observed = ObservedModel(model, find_units(model, opened))
    return [stage_model(copied, find_units(copied, opened), observed, cut, stage) for stage, copied in enumerate(copies)]


@overload
def split(model: Pipe) -> PipeStages:  # type: ignore[overload-overlap]
    """Splits a pipe of torch.distributed.pipelining."""


@overload
def split(
    model: nn.Module | Callable[[], nn.Module] | Any,
    *,
    example: Any = None,
    cuts: ByHand | Plan | None = None,
    memory: int | str | None = None,
    inside_blocks: bool = False,
) -> ModelSplit:
    """Splits a model into stages."""


@takes(model=MODEL, cuts=optional(CUTS), memory=optional(BYTES), inside_blocks=bool)
@making_tensors()
def split(
    model: nn.Module | Callable[[], nn.Module] | Any,
    *,
    example: Any = None,
    cuts: ByHand | Plan | None = None,
    memory: int | str | None = None,
    inside_blocks: bool = False,
) -> ModelSplit | PipeStages:
    """Cuts `model` into stages, for `zb.Pipeline(zb.split(model), schedule, num_microbatches, loss_fn)`.

    `model` has the same weights on every rank. Every stage runs the model's own code, with stand-ins for the parts of other stages. So
    `pipe.step` takes the arguments of the model, `loss_fn` its output, and parameters keep their names. Parameters that several stages hold
    are tied automatically.

    `model` may also be

    - a function that creates or loads a model on the CPU: each rank then has only the parameters of its own stages in memory, with the
      values of one device if all ranks set the same seed;
    - a configuration of Transformers, whose model starts with random weights;
    - a program of `torch.export`, which is converted back to modules;
    - a `Pipe` of torch.distributed.pipelining, whose stages are the cut.

    A model that calls `pipe_split()` of torch.distributed.pipelining is cut there.

    The model is cut for the schedule: the slowest rank has the minimum number of FLOPs. The cut and the uncut model must agree in float64:
    the proof runs on the model itself if it has up to 10 million parameters, else on a tiny one created from its Transformers
    configuration. `describe` reports what was proved.

    Args:
        model: The model, or what stands for it.
        example: A small batch, as for `step`, used to find the cut; models of Transformers have their own. Only its shapes are used, except
            for the proof.
        cuts: Where stages begin, instead of at equal FLOPs: names of parts for every stage after the first (`["model.layers.4"]`), the
            number of layers of each stage (`[4, 3]`), a Megatron layout (`"Ettt|ttttL"`), or a plan for layers
            (`zb.io.load_plan("plan.json")`), which a `Pipeline` that plays the plan uses by default.
        memory: The most memory of each rank, in bytes or as text such as "40GB": parameters, gradients, Adam moments, and activations of
            the `example`, which must then have the size of a microbatch. None for no limit.
        inside_blocks: Whether to also cut between the parts of a block, such as attention and MLP; the block's own forward then runs on
            both stages. Names of parts inside blocks imply this.

    Raises `InputError` for a model that has no example or cannot be cut, naming the part and the remedy.

    >>> import torch
    >>> import zerobubble as zb
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> print("\\n".join(zb.split(model, example=torch.ones(1, 4)).describe(2).splitlines()[:4]))
    stage 0: 0: 40 parameters, 50.0% of the operations of a forward
    stage 1: 2: 36 parameters, 50.0% of the operations of a forward
    rank 0 |#############       | 0.800 x an even share of F, B and W; keeps 640 B, and 16 B for a microbatch
    rank 1 |####################| 1.200 x an even share of F, B and W; keeps 576 B, and 32 B for a microbatch
    """
    if PIPE.accepts(model):
        if example is not None or cuts is not None or memory is not None or inside_blocks:
            raise InputError(
                "zb.split takes a Pipe of torch.distributed.pipelining with its own cut",
                remedy="leave out example, cuts, memory and inside_blocks",
            )
        return PipeStages(cast(Pipe, model))
    if is_configuration(model):
        model = maker_of(model)
    elif EXPORTED.accepts(model):
        example = example_of(model) if example is None else example
        model = module_of(model)
    _refuse_options_of_search(memory is not None, inside_blocks, has_example=example is not None, has_cuts=cuts is not None)
    by_hand, limit = None if cuts is None else spelled_out(cuts), None if memory is None else as_bytes(memory)
    return ModelSplit(model, example, by_hand, limit, inside_blocks=inside_blocks)


def _refuse_options_of_search(memory: bool, inside_blocks: bool, *, has_example: bool, has_cuts: bool) -> None:
    """Raises `InputError` for an option that only applies to cuts that `split` searches."""
    if memory and (not has_example or has_cuts):
        raise InputError(
            "zb.split: memory is for cuts that it chooses, from the activations of an example with the size of a microbatch",
            remedy="give example=..., and no cuts",
        )
    if inside_blocks and has_cuts:
        raise InputError(
            "zb.split: inside_blocks is for cuts that it chooses; cuts by name may be inside of blocks anyway", remedy="leave it out"
        )
