"""`split`: a model that was not written for pipelining, as what `Pipeline` builds its stages from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast, overload

from torch import nn
from torch.distributed.pipelining import Pipe

from zerobubble.arguments import either, optional, takes
from zerobubble.errors import InputError
from zerobubble.garbage_pause import garbage_collection_paused
from zerobubble.ir import Placement, Schedule
from zerobubble.models.cutting.by_hand import CUTS, ByHand, spelled_out, stages_by_hand
from zerobubble.models.cutting.choice import MEMORY, UnitCost, Where, choose_cuts, joined_in_groups, joined_inside_blocks, memory_bytes
from zerobubble.models.cutting.costs import COUNTING, Machine, estimated_layers
from zerobubble.models.cutting.cut import ModelCut, crossings, cut_at, groups_in_order, parts_of_the_output, units_in_order
from zerobubble.models.cutting.parameter_names import ParameterNames
from zerobubble.models.cutting.shared_memory import refuse_shared_memory
from zerobubble.models.cutting.summary import StageSummary, cut_in_words
from zerobubble.models.making.configuration import CONFIGURATION, is_configuration, maker_of
from zerobubble.models.making.exported import EXPORTED, example_of, module_of
from zerobubble.models.making.factory import MAKES_A_MODEL, ModelFactory
from zerobubble.models.making.source import ModelSource
from zerobubble.models.observation.dataflow import Dataflow
from zerobubble.models.observation.example import Arguments, arguments_of, own_example
from zerobubble.models.observation.fingerprint import trains_in_parts
from zerobubble.models.observation.observed_model import ObservedModel
from zerobubble.models.observation.operations import parameters_of
from zerobubble.models.observation.units import Units, blocks_around, find_units
from zerobubble.models.proof.proof_in_words import proved
from zerobubble.models.proof.tiny import MOST_PROVED
from zerobubble.models.proof.trace_numbers import refuse_other_numbers
from zerobubble.models.stages.stage_model import stage_model
from zerobubble.models.stages.torch_pipe import PIPE, PipeStages
from zerobubble.partition import Layer, LayerCut, cut_layers
from zerobubble.planning import Plan
from zerobubble.runtime.failure.error_text import describe
from zerobubble.runtime.stage.whole_model import ModelFacts
from zerobubble.units import NS_PER_MS

MODEL = either(PIPE, nn.Module, MAKES_A_MODEL, CONFIGURATION, EXPORTED)
Look = tuple[Units, Dataflow]
"""The parts of a model, and what they get from each other."""


class ModelSplit:
    """A model that can be cut: called with a stage and the number of stages, as `Pipeline` does, it gives the module of that stage.

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
        self._source = ModelSource.of(source)
        self._units = find_units(self._model)
        self._blocks = self._units.layers
        self._arguments = self._looked_at_with(example)
        self._cuts: dict[int, ModelCut] = {}
        self._opened: frozenset[str] | None = None
        self._other_ways = ""
        with garbage_collection_paused():  # which would go through the whole process again and again, as modules are made and go
            self._by_hand = self._opened_for(cuts)
            if cuts is None:
                self._by_hand = self._marked(chooses=memory is not None or inside_blocks)
            self._fine: Look = self._looked_at(self._blocks) if inside_blocks else (self._units, self._flow)
        self._memory = memory
        self._schedule: Schedule | None = None
        self._proofs: dict[int, str] = {}
        self._layers: dict[Machine, tuple[Layer, ...]] = {}

    def _marked(self, *, chooses: bool) -> ByHand | None:
        """The cuts that the model's code names itself, by `pipe_split()` of torch.distributed.pipelining; None where it does not."""
        marked = self._flow.marked
        if not marked or not self._order:
            return None
        if chooses:
            raise InputError(
                "the model says by pipe_split() where it is cut, and memory and inside_blocks are for cuts that zb.split chooses: leave "
                "them out"
            )
        if None in marked:
            raise InputError(
                f"the model calls pipe_split() {len(marked)} times in a forward, and not each time a part of the model follows before the "
                f"next call and the end: the parts are {', '.join(map(repr, self._order))}"
            )
        return [unit for unit in marked if unit is not None]

    @property
    def _model(self) -> nn.Module:
        """The model that is cut; one that a function makes has its parameters on the meta device."""
        return self._source.model

    def for_schedule(self, schedule: Schedule, first_parts: Sequence[str] = ()) -> ModelSplit:
        """The same split for the stages of `schedule`: balanced for its ranks, within the memory that it takes.

        `first_parts` are those with which a plan begins its stages, which count where the user gave no cuts. `Pipeline` asks for this.
        """
        made = copy.copy(self)
        made._schedule, made._cuts, made._proofs, made._layers = schedule, {}, {}, dict(self._layers)
        if self._by_hand is None and first_parts:
            made._by_hand = made._opened_for(tuple(first_parts))
            made._fine, made._layers = (made._units, made._flow), {}
        return made

    def _opened_for(self, cuts: ByHand | None) -> ByHand | None:
        """These cuts, after the blocks inside of which they are have been opened. One in front of a block's first part is not inside."""
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
        """Cut the model between the parts of these blocks, too, and no others: what adds up there is added up on every later stage."""
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
        """The parts of the model with these blocks open."""
        units = find_units(self._model, blocks)
        return units, self._look(ObservedModel(self._model, units))

    def _looked_at_with(self, example: Any) -> Arguments:
        found = own_example(self._model) if example is None else example
        if found is None:
            raise InputError(
                f"{type(self._model).__name__} brings no example of its arguments: give zb.split(model, example=...) a small "
                "batch, as to step"
            )
        return arguments_of(found, self._model)

    def _look(self, observed: ObservedModel) -> Dataflow:
        args, kwargs = self._arguments
        try:
            return observed.flow(args, kwargs, training=self._model.training)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{type(self._model).__name__} fails on the example, with its parts replaced by what has their shapes: {describe(error)}; "
                "give zb.split(model, example=...) a batch that the model takes, as to step"
            ) from error

    def __call__(self, stage: int, num_stages: int) -> nn.Module:
        """The module of `stage`; raises `InputError` where the model cannot be cut into so many."""
        cut = self.cut(num_stages)
        model, units = self._model, self._units
        if not self._source.is_given:
            model = self._source.as_it_is_cut(self._source.with_numbers(self._names.of_stage(cut, stage)))
            units = find_units(model, self._opened or ())
        made = stage_model(model, units, self._observed, cut, stage)
        made.tied_in_the_model = [group for group in self._names.tied(cut) if any(holder == stage for holder, _ in group)]  # type: ignore[assignment]
        return made

    def cut(self, num_stages: int) -> ModelCut:
        """Where the model is cut into `num_stages`; raises `InputError` where it cannot be, or where the cut gives other numbers."""
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
        """Lets operations be parts where the model has no blocks and too few parts; keeps why not, or what else can be cut."""
        self._other_ways = ""
        if self._by_hand is not None or len(self.layers(COUNTING)) >= num_stages:
            return
        if self._blocks:  # a graph of many layers takes minutes, and its operations are not what the user calls the model's parts
            self._other_ways = self._inside_blocks()
            return
        try:
            found = self._source.traced(self._arguments, num_stages)
            if sum(parameter.numel() for parameter in found.model.parameters()) <= MOST_PROVED:
                whole = found.with_numbers([name for name, _ in found.model.named_parameters()])
                refuse_other_numbers(whole, found.as_it_is_cut(whole), self._arguments)
        except InputError as error:
            self._other_ways = f"; and {error}"
            return
        self._source, self._opened = found, None
        self._layers = {}
        self._open(())
        self._fine = (self._units, self._flow)

    def _inside_blocks(self) -> str:
        """How many stages the model can have if its blocks are cut, too, as the end of a sentence; empty if no more than it has parts."""
        try:
            most = len(self._layers_of(self._looked_at(self._blocks), COUNTING))
        except InputError:  # not every block can be cut
            return ""
        if most <= len(self.layers(COUNTING)):
            return ""
        return f"; cut inside its blocks, too, by inside_blocks=True (--inside-blocks in a shell), it has up to {most} stages"

    def _prove(self, cut: ModelCut) -> str:
        opened = self._opened or ()
        return proved(self._model, self._whole, lambda model: _stages_of(model, opened, cut), cut, self._arguments)

    def _whole(self) -> nn.Module:
        """The model that is cut, with all of its numbers."""
        return self._source.as_it_is_cut(self._source.with_numbers(list(self._names.named)))

    def _stages(self, num_stages: int) -> list[list[str]]:
        if self._by_hand is None:
            names = self._opened_for(choose_cuts(self.layers(COUNTING), self._where(num_stages), self._other_ways))
            return stages_by_hand(names or [], self._order, frozenset())
        blocks = self._units.layers or frozenset(self._units.units)
        stages = stages_by_hand(self._by_hand, self._order, blocks, parts_of_the_output(self._flow))
        if len(stages) != num_stages:
            told = "the model's calls of pipe_split()" if self._flow.marked else "the cuts given to zb.split"
            raise InputError(f"{told} make {len(stages)} stages, and the schedule has {num_stages}")
        return stages

    def _where(self, num_stages: int) -> Where:
        """Where the stages lie: as the schedule says, one to a rank where there is none. A rank of several routes counts by its copies."""
        schedule = self._schedule
        if schedule is None or schedule.num_stages != num_stages:
            return Where(Placement.linear(num_stages), self._memory)
        if len(schedule.placement.routes) == 1:
            return Where(schedule.placement, self._memory, schedule)
        if self._memory is not None:
            raise InputError(f"zb.split cuts within memory for schedules of one route, and {schedule.name!r} has several: leave memory out")
        return Where(Placement.linear(num_stages))

    def layers(self, machine: Machine | None = None) -> tuple[Layer, ...]:
        """The units that the example calls as layers to be planned for, in the order of the model, estimated without running them.

        `machine` says how fast operations and messages are; if not given, as on a GPU of today, and for models that would take it less than
        a millisecond, 10^9 a second of both, so that whole ns tell parts from each other. See `zerobubble plan --layers`.
        """
        machine = self._machine if machine is None else machine
        if machine not in self._layers:
            self._layers[machine] = self._layers_of(self._fine, machine)
        return self._layers[machine]

    def _layers_of(self, look: Look, machine: Machine) -> tuple[Layer, ...]:
        units, flow = look
        with garbage_collection_paused():
            layers = estimated_layers(units, flow, machine)
        if self._by_hand is None:
            return joined_inside_blocks(joined_in_groups(layers, groups_in_order(flow)))
        return joined_in_groups(layers, [[unit] for unit in units_in_order(flow)])

    @property
    def _machine(self) -> Machine:
        """A GPU of today, or where that takes less than a millisecond, the machine that counts operations."""
        return Machine() if sum(layer.time for layer in self.layers(Machine())) >= NS_PER_MS else COUNTING

    def layer_cut(self, num_stages: int) -> LayerCut:
        """The cut into `num_stages` as that of `layers`, with the bound on it: what no cut can do better."""
        stage_of, layers, placement = self.cut(num_stages).stage_of, self.layers(), self._where(num_stages).placement
        homes = [stage_of[layer.full_name if layer.full_name in stage_of else layer.block] for layer in layers]
        cuts = tuple(number for number, (before, here) in enumerate(pairwise(homes), 1) if before != here)
        best = cut_layers(layers, placement)
        return replace(best, cuts=cuts)

    def costs(self) -> list[UnitCost]:
        """What each unit costs that the example calls, in the order of the model."""
        flops = dict.fromkeys(self._order, 0)
        for call, called in self._flow.calls.items():
            flops[call.unit] += called.flops
        units = self._units.units
        return [UnitCost(name, count, sum(p.numel() for p in parameters_of(units[name]))) for name, count in flops.items()]

    def _with_unused(self, stages: list[list[str]]) -> list[list[str]]:
        """Units that the example does not call lie with one that has them inside, too, or else with the one that the model has before."""
        stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
        holders = {part: stage for unit, stage in stage_of.items() for part in self._units.units[unit].modules()}
        found, stage = [list(units) for units in stages], 0
        for unit, module in self._units.units.items():
            if unit not in stage_of:
                found[holders.get(module, stage)].append(unit)
            stage = stage_of.get(unit, stage)
        return found

    def model_facts(self, num_stages: int) -> ModelFacts:
        """What other ranks must have, too: the model, its parameters with their values, and the cut."""
        begins: dict[int, str] = {}
        for unit, stage in self.cut(num_stages).stage_of.items():
            begins.setdefault(stage, unit)
        return self._source.facts({"cut of the model": f"stages from {', '.join(map(repr, begins.values()))}"})

    def was_connected(self) -> None:
        """From here on each rank trains its own stages of the model."""
        trains_in_parts(self._source.untraced)

    def tied(self, num_stages: int) -> list[list[tuple[int, str]]]:
        """The parameters of the model that several stages hold, as groups for `Pipeline(tied=...)`."""
        return self._names.tied(self.cut(num_stages))

    def stages(self, num_stages: int) -> list[StageSummary]:
        """What each stage holds and does."""
        cut, costs, home = self.cut(num_stages), {cost.unit: cost for cost in self.costs()}, self._where(num_stages).placement.routes[0]
        found = []
        for stage in range(num_stages):
            units = [unit for unit in costs if cut.stage_of[unit] == stage]
            flops, parameters = (sum(getattr(costs[unit], name) for unit in units) for name in ("flops", "parameters"))
            found.append(StageSummary(units, flops, parameters, home[stage]))
        return found

    def describe(self, num_stages: int) -> str:
        """The cut in words: a line for each stage, each tied parameter and each rank, what no cut can do better, and the proof."""
        words = cut_in_words(self.stages(num_stages), self.tied(num_stages), self.layer_cut(num_stages))
        words += f"\nTimes are estimates at {self._machine.flops_per_second:.0e} operations a second"
        words += "." if self._machine != COUNTING else ", as the example is small: give its real size (--sequence) for those of a GPU."
        if self._source.trace is not None:
            words += "\nCut between operations, which torch.export found: the model has too few parts."
        return f"{words}\n{self._proofs[num_stages]}"


def _stages_of(model: nn.Module, opened: Collection[str], cut: ModelCut) -> list[nn.Module]:
    units = find_units(model, opened)
    observed = ObservedModel(model, units)
    return [stage_model(model, units, observed, cut, stage) for stage in range(cut.num_stages)]


@overload
def split(model: Pipe) -> PipeStages:  # type: ignore[overload-overlap]
    """The stages of a pipe of torch.distributed.pipelining."""


@overload
def split(
    model: nn.Module | Callable[[], nn.Module] | Any,
    *,
    example: Any = None,
    cuts: ByHand | Plan | None = None,
    memory: int | str | None = None,
    inside_blocks: bool = False,
) -> ModelSplit:
    """A model cut into stages."""


@takes(model=MODEL, cuts=optional(CUTS), memory=optional(MEMORY), inside_blocks=bool)
def split(
    model: nn.Module | Callable[[], nn.Module] | Any,
    *,
    example: Any = None,
    cuts: ByHand | Plan | None = None,
    memory: int | str | None = None,
    inside_blocks: bool = False,
) -> ModelSplit | PipeStages:
    """`model` cut into stages, for `zb.Pipeline(zb.split(model), schedule, num_microbatches, loss_fn)`.

    `model` has its weights, the same on every rank. Every stage runs its code, with stand-ins for the parts that other stages hold, so
    `pipe.step` is given what the model is called with, `loss_fn` what the model returns, and parameters keep their names. Parameters that
    several stages hold are tied by themselves. Instead of a model, a function that makes one on the CPU, or that reads one: then each rank
    has only the parameters of its own stages in memory, with the values of one device where ranks set the same seed. Or a configuration of
    Transformers, whose model then begins with random weights, or a program of `torch.export`, whose parts torch puts back into modules.
    Or a `Pipe` of torch.distributed.pipelining, whose stages are the cut, as are those of a model that calls its `pipe_split()`.

    `example` is a small batch as `step` is given it, by which the model is cut; models of Transformers bring one. Nothing is computed of
    it but shapes, and the proof: cut and uncut must agree in float64, the model itself if it has up to 10 million parameters, and else a
    tiny one that its configuration of Transformers makes. `describe` tells what was proved.

    The model is cut for the schedule: its slowest rank has the fewest floating-point operations that it can have, within `memory` for
    each rank if that is given: bytes, or such as "40GB", for parameters, gradients, the moments of Adam and activations. These are those
    of the `example`, which is then as large as a microbatch. Or `cuts` says where stages begin: names of parts for every stage but the
    first (`["model.layers.4"]`), the number of layers of each stage (`[4, 3]`), a layout of Megatron (`"Ettt|ttttL"`), or a plan for
    layers (`zb.io.load_plan("plan.json")`), which a `Pipeline` that plays the plan takes by itself. With `inside_blocks` it may also cut
    between the parts of a block, such as attention and MLP, whose own forward then runs on both stages; names say so by themselves.

    Raises `InputError` for a model that brings no example, and for one that cannot be cut, naming the part and what would help.

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
                "zb.split takes a Pipe of torch.distributed.pipelining as it is cut: leave out example, cuts, memory and inside_blocks"
            )
        return PipeStages(cast(Pipe, model))
    if is_configuration(model):
        model = maker_of(model)
    elif EXPORTED.accepts(model):
        example = example_of(model) if example is None else example
        model = module_of(model)
    if memory is not None and (example is None or cuts is not None):
        raise InputError(
            "zb.split: memory is for cuts that it chooses, by the activations of an example as large as a microbatch: give example=..., "
            "and no cuts"
        )
    if inside_blocks and cuts is not None:
        raise InputError(
            "zb.split: inside_blocks is for cuts that it chooses; cuts by names may be inside of blocks as they are: leave it out"
        )
    by_hand, limit = None if cuts is None else spelled_out(cuts), None if memory is None else memory_bytes(memory)
    return ModelSplit(model, example, by_hand, limit, inside_blocks=inside_blocks)
