"""The phase *build*: what one rank makes of its options before it compares them with the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from zerobubble.error_reports.text import describe, text_of
from zerobubble.error_reports.user_code import user_place, with_place
from zerobubble.errors import ZeroBubbleError, raise_faults
from zerobubble.ir import Schedule
from zerobubble.lowering import Compiled
from zerobubble.planned_run import Planned
from zerobubble.runtime.device import move
from zerobubble.runtime.executor.offloading import Offloads
from zerobubble.runtime.executor.program_cache import MakeSchedule, schedule_for
from zerobubble.runtime.hooks.shared_parameters import KnowsTied, ParameterName, read_tied, refuse_forgotten
from zerobubble.runtime.options import (
    PipelineOptions,
    dependency_faults,
    excluded_options,
    gathered_bytes_of,
    offloads_in,
    ordering_costs,
    planned_cut,
    recompute_levels,
    refuse_unusable,
    refuse_wrong,
)
from zerobubble.runtime.split.stage_with_loss import stage_alone, with_loss
from zerobubble.runtime.stage.divided_head import head_parts_of
from zerobubble.runtime.stage.head_part import HeadPart
from zerobubble.runtime.stage.loss_reads import refuse_model_in_loss
from zerobubble.runtime.stage.rank_stages import Build, CutsForSchedules, Stages, modules_of
from zerobubble.runtime.stage.whole_model import KnowsModel, ModelFacts
from zerobubble.runtime.step.captured_step import refuse_in_graphs
from zerobubble.runtime.step.ordering import MicrobatchOrdering
from zerobubble.runtime.step.planner import Replanner, ReplanningHook, planner
from zerobubble.runtime.transport.choice import refuse_unknown
from zerobubble.runtime.transport.mesh import Layout
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.values.gradients import Gradients


@dataclass(frozen=True)
class Setup:
    """What one rank has built from its options before it compares them with the others.

    Attributes:
        given: Makes the schedules for other numbers of microbatches.
        compiled: The first schedule, compiled.
        planner: Replans the schedule; None without `zb.Auto`.
        stages: This rank's stages.
        gradients: Where their gradients are summed.
        tied: The groups of tied parameters.
        is_cut_model: Whether the stages were cut from a model: they keep its names and know what it ties.
        whole: Knows the whole model of this rank, if it has one.
        facts: The facts about that model that must be equal on all ranks.
        ordering: Orders microbatches, if this rank does.
        offloads: What ranks offload, if anything.
        heads: This rank's parts of a divided head, by stage.
        choosing: The recomputation levels that choose any module in a stage of this rank.
    """

    given: str | Schedule | MakeSchedule
    compiled: Compiled
    planner: ReplanningHook | None
    stages: Stages
    gradients: Gradients
    tied: tuple[tuple[ParameterName, ...], ...]
    is_cut_model: bool
    whole: KnowsModel | None
    facts: ModelFacts | None
    ordering: MicrobatchOrdering | None
    offloads: Offloads | None
    heads: dict[int, HeadPart]
    choosing: list[str]

    @property
    def schedule(self) -> Schedule:
        """The first schedule."""
        return self.compiled.schedule


def build_stages(options: PipelineOptions, layout: Layout, peers: Peers, seed: int) -> tuple[Setup | None, str, Exception | None]:
    """Returns what this rank plays, or the faults of its options, which all ranks raise together.

    The error comes with a fault of the user's functions, whose line it shows, but not with a refusal of the arguments.
    """
    try:
        return _set_up(options, layout, peers, seed), "", None
    except ZeroBubbleError as error:
        return None, with_place(text_of(error), error), error if user_place(error) else None
    except Exception as error:  # noqa: BLE001 - the user's build function may raise anything
        return None, with_place(describe(error), error), error


def _set_up(options: PipelineOptions, layout: Layout, peers: Peers, seed: int) -> Setup:
    refuse_wrong(options)
    raise_faults((dependency_faults(options), excluded_options(options, layout)))
    if isinstance(options.transport, str):
        refuse_unknown(options.transport)
    given, planner = _what_to_play(options, peers.size)
    schedule = schedule_for(given, peers.size, options.num_microbatches, options.num_slices)
    gradients = Gradients(options.main_grad)
    build = options.build_or_modules
    if isinstance(build, CutsForSchedules):
        build = build.for_schedule(schedule, planned_cut(options), options.device)
    modules = _modules_with_loss(build, options, schedule, peers.rank, seed)
    heads = head_parts_of(options.loss_fn, schedule, modules, gradients)
    levels = recompute_levels(options, schedule)
    stages = Stages(modules, options.split, gradients, levels, options.loss_fn, cuda_graphs=options.cuda_graphs is True, heads=heads)
    if stages.has_tensors:
        refuse_unusable(options, stages.device)
    offloads = offloads_in(options, schedule)
    # These raise if the schedule or a level cannot run. All ranks should learn that now, not after they are connected.
    stages.for_schedule(schedule)
    compiled = Compiled.from_schedule(schedule)
    choosing = stages.levels_that_choose()
    tied_in_model = build.tied(schedule.num_stages) if isinstance(build, KnowsTied) else ()
    if not isinstance(build, KnowsTied) and not options.tied:
        refuse_forgotten({stage: stage_alone(module) for stage, module in modules.items()})
    tied = read_tied([*options.tied, *tied_in_model], schedule.num_stages)
    if options.captures_steps:
        refuse_in_graphs(schedule, modules, ties=bool(tied))
    whole = build if isinstance(build, KnowsModel) else None
    facts = None if whole is None else whole.model_facts(schedule.num_stages)
    ordering = None
    if options.order_by is not None and schedule.placement.routes[0][0] == peers.rank:
        # Offloads and gathers are planned for the rows of one schedule.
        plans_passes = offloads is None and gathered_bytes_of(options) is None
        ordering = MicrobatchOrdering(options.order_by, schedule, *ordering_costs(options), plans_passes=plans_passes)
    tied_by_cut = isinstance(build, KnowsTied)
    return Setup(given, compiled, planner, stages, gradients, tied, tied_by_cut, whole, facts, ordering, offloads, heads, choosing)


def _modules_with_loss(
    build: Build | nn.Module | Sequence[nn.Module], options: PipelineOptions, schedule: Schedule, rank: int, seed: int
) -> dict[int, nn.Module]:
    """Returns the modules of `rank` by stage, the last one with the loss, on the device of the options."""
    last = schedule.num_stages - 1
    built = modules_of(build, schedule, rank, seed)
    if last in built:
        refuse_model_in_loss(options.loss_fn, built[last])
    modules = {stage: with_loss(module, options.loss_fn if stage == last else None) for stage, module in built.items()}
    if options.device is not None:
        move(modules.values(), options.device)
    return modules


def _what_to_play(options: PipelineOptions, num_ranks: int) -> tuple[str | Schedule | MakeSchedule, ReplanningHook | None]:
    """Returns the given schedule, that of a plan instead of the plan, and the planner if `zb.Auto` is given."""
    schedule = planner().auto() if options.schedule == "auto" else options.schedule
    if isinstance(schedule, Replanner):
        hook = schedule.hook_for(num_ranks, options.num_microbatches)
        return hook.schedule, hook
    return schedule.to_run.schedule if isinstance(schedule, Planned) else schedule, None
