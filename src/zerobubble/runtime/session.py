"""A session: the connected ranks of a pipeline, which have agreed on all arguments and hold equal values of what they share.

Order. `connect` has the phases of `zerobubble.runtime.failure`. Each needs the one before: the rendezvous gives a transport, on which
faults can be exchanged; stages are built before arguments are compared, because the comparison covers the schedule and the devices;
channels open only after the comparison, because ranks with different arguments would wait for each other; and values are broadcast over
open channels. A rank that finds a fault early does not raise at once, which would leave the others waiting: it brings the fault to the next
comparison, where every rank raises all faults of all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zerobubble.error_reports.text import describe, text_of
from zerobubble.error_reports.user_code import user_place, with_place
from zerobubble.errors import InputError, ZeroBubbleError, raise_faults
from zerobubble.ir import Schedule
from zerobubble.lowering import Compiled
from zerobubble.planned_run import Planned
from zerobubble.reductions import stage_sums
from zerobubble.runtime.device import accelerator_fault, hardware_queues, is_host, move
from zerobubble.runtime.executor.offloading import Offloads
from zerobubble.runtime.executor.overrides import Pace
from zerobubble.runtime.executor.program_cache import MakeSchedule, ProgramCache, every_channel, schedule_for
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.failure.setup_ranks import SetupRanks
from zerobubble.runtime.failure.setup_timeout import SetupTimeout
from zerobubble.runtime.hooks.changed_copies import ChangedCopies, watched_copies
from zerobubble.runtime.hooks.equal_optimizers import EqualOptimizers
from zerobubble.runtime.hooks.equal_values import EqualValues
from zerobubble.runtime.hooks.replicas import Replicas
from zerobubble.runtime.hooks.scaled_gradients import ScaledGradients
from zerobubble.runtime.hooks.shared_gradients import SharedGradients
from zerobubble.runtime.hooks.shared_parameters import KnowsTied, ParameterName, read_tied, refuse_forgotten
from zerobubble.runtime.hooks.summed_hooks import SummedHooks
from zerobubble.runtime.options import (
    GRADIENTS,
    NONE,
    PipelineOptions,
    dependency_faults,
    excluded_options,
    faults_in,
    gathered_bytes_of,
    layout_for,
    offloads_in,
    ordering_costs,
    planned_cut,
    recompute_levels,
    refuse_unusable,
    refuse_wrong,
    usable_timeout,
)
from zerobubble.runtime.split.stage_with_loss import stage_alone, with_loss
from zerobubble.runtime.stage.divided_head import DividedHead, head_parts_of
from zerobubble.runtime.stage.head_part import HeadPart
from zerobubble.runtime.stage.levels import refuse_empty_levels
from zerobubble.runtime.stage.loss_reads import refuse_model_in_loss
from zerobubble.runtime.stage.rank_stages import Build, CutsForSchedules, Stages, modules_of
from zerobubble.runtime.stage.replaced_parameters import ReplacedParameters
from zerobubble.runtime.stage.sharded import ShardedTensors
from zerobubble.runtime.stage.uncut_model import RankStages, refuse_uncut_models
from zerobubble.runtime.stage.whole_model import KnowsModel, ModelFacts, differences
from zerobubble.runtime.step.captured_step import CapturedStep, refuse_in_graphs
from zerobubble.runtime.step.divided_loss import DividedLoss
from zerobubble.runtime.step.hook import StepHook, StepHooks
from zerobubble.runtime.step.loss import StepLosses
from zerobubble.runtime.step.ordering import MicrobatchOrdering
from zerobubble.runtime.step.planner import Replanner, ReplanningHook, planner
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.runtime.step.stage_rng import StageRng
from zerobubble.runtime.transport.choice import fastest_for, refuse_unknown, transport_for
from zerobubble.runtime.transport.mesh import EXPERTS, Layout
from zerobubble.runtime.transport.peers import Peers, in_transport_ranks
from zerobubble.runtime.transport.rank_process import this_process
from zerobubble.runtime.transport.rendezvous import RendezvousRecord
from zerobubble.runtime.transport.terms import Terms, note, versions, without_note
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.values.buffers import making_tensors
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.random_state import next_seed


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


@dataclass(frozen=True)
class Session:
    """This rank's part in a pipeline whose ranks are connected.

    Attributes:
        transport: Connects all ranks of the mesh, which `layout` describes.
        peers: The ranks of this pipeline.
        guard: Reports a failure of any rank to all.
        setup_ranks: The ranks, while they set up the pipeline.
        shared: Parameters that several stages or ranks of the pipeline hold.
        sharded: The parameters and buffers that are sharded over ranks.
        replicas: The ranks with other shares of the batch; None if there are none.
        copies: Watches what has copies on other ranks or stages.
        seed: Seeds the random numbers of stages, on all ranks.
    """

    transport: Transport
    layout: Layout
    peers: Peers
    guard: FailureGuard
    setup_ranks: SetupRanks
    setup: Setup
    shared: SharedGradients
    sharded: ShardedTensors
    replicas: Replicas | None
    copies: ChangedCopies
    seed: int
    options: PipelineOptions

    def first_hooks(self) -> list[StepHook]:
        """Returns the first hooks in the order of their calls: sums over stages and replicas, hooks on gradients, planner, the user's."""
        sums: list[StepHook] = [self.shared] if self.shared.is_needed else []
        if self.replicas is not None:
            sums = [self.replicas.earlier, *sums, self.replicas]
        optimizers = EqualOptimizers([*self.shared.shared_with_others(), *(self.replicas.shared_with_others() if self.replicas else ())])
        values = EqualValues(self.shared.shared_with_others())
        sums = [*([self.copies] if self.copies.is_needed else []), *sums, *(hook for hook in (optimizers, values) if hook.is_needed)]
        if self.options.scale == GRADIENTS:
            scaled = ScaledGradients(self.setup.stages.modules, self.setup.gradients)
            sums = [scaled.earlier, *sums, scaled]
        hooks = SummedHooks(self.setup.stages.modules, self.setup.gradients)
        sums = [hooks.earlier, *sums, hooks]
        planner = [] if self.setup.planner is None else [self.setup.planner]
        return [*sums, *planner, *self.options.hooks]


_KIND_OF_DEVICE = "kind of device"


@making_tensors()
def connect(options: PipelineOptions, survivors: Layout | None = None) -> Session:
    """Meets the other ranks, builds this rank's stages, agrees on all arguments, connects, and makes shared values equal.

    With `survivors`, the remaining ranks of an earlier pipeline continue. Their values are equal, or will be once all have ended the same
    call.

    Raises `InputError` on every rank, with all faults and differences of all ranks, and `PipelineError` on every rank if one of them fails
    or does not arrive.
    """
    layout = survivors or layout_for(options)
    record = RendezvousRecord(faults_in(options), versions(), this_process())
    transport = transport_for(options.transport, layout, usable_timeout(options), record)
    lockstep = Peers(transport, layout.along[layout.lockstep]) if layout.lockstep else None
    peers = Peers(transport, layout.pipeline, lockstep)
    guard = FailureGuard(transport)
    ranks = SetupRanks(transport, guard, SetupTimeout(transport, guard, usable_timeout(options)))
    _rendezvous(ranks)
    own_seed = 0 if survivors is not None else next_seed()  # survivors have their modules and keep their seed
    with guard.opening("while agreeing on a seed"):
        seed: int = ranks.gather(own_seed, "agreeing on a seed")[0]
    with guard.during("while building its stages"):
        setup, fault, cause = _build(options, layout, peers, own_seed)
    # A rank with a fault goes on until here: the others wait for it in this comparison, and all raise its fault together.
    all_terms = ranks.agree(fault, _terms(options, setup), cause)
    assert setup is not None
    _place_stages_without_tensors(ranks, setup, all_terms)
    is_given = survivors is None and setup.whole is None
    _compare_models(ranks, layout, setup, RankStages.of(setup.stages, options.build_or_modules) if is_given else None)
    _refuse_empty_levels(ranks, setup)
    _open_channels(ranks, layout, setup, captures_steps=options.captures_steps)
    shared = SharedGradients(setup.schedule.placement, setup.stages.modules, peers, setup.tied, setup.gradients)
    sharded = _sharded(ranks, layout, setup)
    replicas = _replicas(transport, layout, setup, sharded, peers.rank, options.bucket_bytes) if layout.data else None
    # Copies within a pipeline first, so that all copies of the first replica agree on the values that other replicas receive.
    _make_equal(ranks, partial(shared.broadcast_initial_values, are_equal=survivors is not None), "making the copies of stages equal")
    if replicas is not None:
        _make_equal(ranks, replicas.broadcast_initial_values, "making replicas equal")
    setup.stages.refusals += [sums.refuse_other_parameters for sums in (shared, replicas) if sums is not None]
    setup.stages.replaced = ReplacedParameters(
        setup.stages.modules.values(), shared.names, _holders(peers, setup.stages), replicas=replicas is not None
    )
    copies = watched_copies(setup.stages.modules, shared, replicas)
    return Session(transport, layout, peers, guard, ranks, setup, shared, sharded, replicas, copies, seed, options)


def _holders(peers: Peers, stages: Stages) -> dict[str, set[int]]:
    """Returns the ranks that hold each parameter, by its name in stages."""
    names = {name for module in stages.modules.values() for name, _ in module.named_parameters(remove_duplicate=False)}
    with peers.collective("comparing the names of parameters"):
        of_ranks = peers.gather_objects(sorted(names))
    holders: dict[str, set[int]] = {}
    for rank, theirs in enumerate(of_ranks):
        for name in theirs:
            holders.setdefault(name, set()).add(rank)
    return holders


def _open_channels(ranks: SetupRanks, layout: Layout, setup: Setup, *, captures_steps: bool) -> None:
    """Opens the channels of the first schedule in every pipeline."""
    transport, channels = ranks.transport, every_channel(setup.compiled)
    of_all = [in_transport_ranks(channel, pipeline) for pipeline in layout.pipelines for channel in channels]
    with ranks.guard.opening("while connecting the ranks"):
        ranks.timeout.run(lambda: transport.open(setup.stages.device, of_all), "connecting the ranks")
        if captures_steps and not transport.capabilities.can_be_captured:
            raise InputError(
                "cuda_graphs='step' cannot capture messages of transport {transport!r}, for which the host waits",
                transport=transport.carrier.name,
                remedy="leave it out, or give each rank a GPU of its own and leave transport out",
            )


def _replicas(transport: Transport, layout: Layout, setup: Setup, sharded: ShardedTensors, rank: int, bucket_bytes: int) -> Replicas:
    """Returns the sums over replicas, in the order in which stages end in the schedule of `rank`.

    A planner may change the schedule of one replica before another's: without an order, sums go from the last stage to the first.
    """
    order = [] if setup.planner is not None else [gradients.stage for gradients in stage_sums(setup.compiled.graph)[rank]]
    return Replicas(transport, layout, setup.stages.modules, sharded, setup.gradients, order, bucket_bytes)


def _place_stages_without_tensors(ranks: SetupRanks, setup: Setup, all_terms: Sequence[Terms]) -> None:
    """Makes stages without tensors run on the kind of device of the other stages. Raises the same `InputError` on all ranks."""
    kinds = [without_note(terms[_KIND_OF_DEVICE]) for terms in all_terms if _KIND_OF_DEVICE in terms]
    if not kinds or len(kinds) == len(all_terms):
        return
    fault = ""
    if not setup.stages.has_tensors:
        try:
            setup.stages.go_to(kinds[0])
        except Exception as error:  # noqa: BLE001 - backends of torch raise errors of many types
            fault = f"stages without parameters run on {kinds[0]}, as on other ranks, but this rank cannot use it: {describe(error)}"
    ranks.agree(fault, {})


def _make_equal(ranks: SetupRanks, broadcast: Callable[[], None], doing: str) -> None:
    """Broadcasts initial values, which may take long."""
    with ranks.guard.opening(f"while {doing}"):
        ranks.timeout.run(broadcast, doing, is_brief=False)


@making_tensors()
def runner_of(session: Session, pace: Pace | None) -> StepRunner:
    """Returns the runner of the steps of a session, with the program of its first schedule."""
    peers, guard, setup, options = session.peers, session.guard, session.setup, session.options
    replicas = None if session.replicas is None else session.replicas.peers
    held = nn.ModuleList(setup.stages.modules.values())
    losses = StepLosses(
        peers,
        options.loss_fn,
        options.loss_weight,
        options.on_loss,
        replicas,
        scales_gradients=options.scale == GRADIENTS,
        sums=options.scale == NONE,
        held=held.parameters,
        has_state=setup.stages.has_state,
    )
    hooks = StepHooks(setup.stages.modules, guard.during)
    programs = ProgramCache(setup.given, setup.stages, peers, pace, options.overlap, hooks, gathered_bytes_of(options), setup.offloads)
    programs.play(setup.compiled)
    return StepRunner(
        peers,
        guard,
        setup.stages,
        setup.gradients,
        losses,
        step_hooks=hooks,
        programs=programs,
        counted_elsewhere=session.shared.counted_elsewhere,
        sharded=session.sharded,
        rng=StageRng(session.seed, *((0, 1) if replicas is None else (replicas.rank, replicas.size)), setup.stages.device),
        ordering=setup.ordering,
        divided_loss=DividedLoss(options.loss_fn, setup.heads, losses) if isinstance(options.loss_fn, DividedHead) else None,
        watching_copies=session.copies.unchanged,
        captured=CapturedStep(held, setup.gradients, setup.stages.device, options.num_microbatches) if options.captures_steps else None,
    )


def attach_first(session: Session, runner: StepRunner) -> None:
    """Attaches the first hooks of a pipeline, which may change values; a fault of any of them is raised on every rank."""
    fault = ""
    with session.guard.during("while attaching hooks"):
        for hook in session.first_hooks():
            try:
                runner.attach(hook)
            except InputError as error:
                fault = fault or str(error)
    session.setup_ranks.agree(fault, {})
    runner.cut_model.watch()


def _sharded(ranks: SetupRanks, layout: Layout, setup: Setup) -> ShardedTensors:
    """Returns the parts of the stages that ranks divide. If it cannot be trained, closes and raises the same `InputError` on all ranks."""
    fault, sharded, spread = "", None, False
    try:
        sharded = ShardedTensors(ranks.transport, layout, setup.stages.modules)
        spread = sharded.is_any_along(EXPERTS)
    except InputError as error:
        fault = str(error)
    if EXPERTS in layout.lockstep:
        with ranks.guard.opening("while comparing experts"):
            is_spread = any(ranks.gather(spread, "comparing experts"))
        if not is_spread and not fault:
            fault = (
                f"mesh has a dimension {EXPERTS!r}, but no stage holds parameters that are distributed over it: make experts DTensors over "
                f"mesh[{EXPERTS!r}], mark them with zb.nn.mark_experts, or count its ranks into 'dp'"
            )
    if layout.along:
        ranks.agree(fault, {})
    elif fault:
        raise InputError(fault)
    assert sharded is not None
    return sharded


def _rendezvous(ranks: SetupRanks) -> None:
    """Reaches the other ranks, and watches their processes from now on, or from before if they are already known."""
    doing, known = "meeting the other ranks", ranks.transport.group.processes
    with ranks.guard.during(f"while {doing}"):
        if known:
            ranks.guard.watch_processes(known)
        ranks.timeout.run(ranks.transport.connect, doing)
        if not known:
            ranks.guard.watch_processes(ranks.gather(this_process(), doing))


def _build(options: PipelineOptions, layout: Layout, peers: Peers, seed: int) -> tuple[Setup | None, str, Exception | None]:
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
    known = build.tied(schedule.num_stages) if isinstance(build, KnowsTied) else ()
    if not isinstance(build, KnowsTied) and not options.tied:
        refuse_forgotten({stage: stage_alone(module) for stage, module in modules.items()})
    tied = read_tied([*options.tied, *known], schedule.num_stages)
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
    given = planner().auto() if options.schedule == "auto" else options.schedule
    if isinstance(given, Replanner):
        hook = given.hook_for(num_ranks, options.num_microbatches)
        return hook.schedule, hook
    return given.to_run.schedule if isinstance(given, Planned) else given, None


def _terms(options: PipelineOptions, setup: Setup | None) -> Terms:
    """Returns what must be equal on all ranks."""
    transport = options.transport
    terms = {
        **versions(),
        "timeout": f"{usable_timeout(options):g} s",
        "pace": _fingerprint(options.pace),
        "overlap function": "one" if options.overlap else "none",
        "type of main_grad": str(options.main_grad),
        "scale": str(options.scale),
        "gathered_bytes": str(gathered_bytes_of(options)),
        "bucket_bytes": str(options.bucket_bytes),
        "survive": str(options.survive),
        "whole steps in CUDA graphs": str(options.captures_steps),
        "order_by": "a function" if callable(options.order_by) else str(options.order_by),
        "transport": transport if isinstance(transport, str) else type(transport).__name__,
    }
    if isinstance(options.loss_fn, DividedHead):
        terms["divided head"] = str(options.loss_fn)
    if setup is not None:
        schedule = setup.schedule
        terms["schedule"] = f"{schedule.name} of {options.num_microbatches} microbatches #{_fingerprint(schedule.to_text())}"
        terms["recompute"] = str(setup.stages.levels)
        if setup.stages.has_tensors:
            terms |= _terms_of_device(setup.stages.device)
        terms["offload"] = _fingerprint(None if setup.offloads is None else tuple(rank.offloads for rank in setup.offloads.ranks))
        terms["link"] = _fingerprint(options.link)
        terms["planning"] = "none" if setup.planner is None else f"auto with {setup.planner.limits_in_words}"
        rewinding = [type(hook).__name__ for hook in options.hooks if getattr(hook, "needs_rollback_point", False)]
        terms["hooks that let steps start over"] = ", ".join(rewinding) or "none"
        if schedule.num_stages - 1 in setup.stages.modules:
            terms["loss_weight"] = "none" if options.loss_weight is None else "a function"
    return terms


def _terms_of_device(device: torch.device) -> Terms:
    """Returns what must be equal on all ranks whose stages have tensors. A rank on the CPU says why it can use no accelerator."""
    if is_host(device):
        return {_KIND_OF_DEVICE: device.type + note(accelerator_fault())}
    return {_KIND_OF_DEVICE: device.type, "fastest transport": fastest_for(device), "number of hardware queues": str(hardware_queues())}


def _compare_models(ranks: SetupRanks, layout: Layout, setup: Setup, given: RankStages | None) -> None:
    """Raises the same `InputError` on all ranks, and closes, if ranks of a pipeline have cut different models, or pass one model uncut.

    They first exchange a short hash, and everything else only if hashes differ. `given` are the stages of this rank that no split made.
    """
    doing, ours = "comparing models", setup.facts
    with ranks.guard.opening(f"while {doing}"):
        gathered = ranks.gather_by_rank((_fingerprint(ours), None if given is None else tuple(given)), doing)
        if len({theirs for theirs, _ in gathered.values()}) > 1:
            facts = ranks.gather_by_rank(None if ours is None else list(ours), doing)
            facts = {rank: None if theirs is None else ModelFacts(*theirs) for rank, theirs in facts.items()}
            raise_faults(dict.fromkeys(differences({rank: facts[rank] for rank in pipeline}) for pipeline in layout.pipelines))
        uncut = {rank: theirs for rank, (_, theirs) in gathered.items()}
        refuse_uncut_models(layout.pipelines, uncut, warns=ranks.transport.group.is_first)


def _refuse_empty_levels(ranks: SetupRanks, setup: Setup) -> None:
    """Raises the same `InputError` on all ranks, and closes, if a recomputation level chooses no module on any rank."""
    stages = setup.stages
    if not stages.levels.given:
        return
    doing = "comparing levels of recomputation"
    with ranks.guard.opening(f"while {doing}"):
        refuse_empty_levels(stages.levels, ranks.gather((setup.choosing, stages.names_of_modules()), doing))


def _fingerprint(value: object) -> str:
    """Returns a short hash of `value`."""
    return "none" if value is None else hashlib.sha256(str(value).encode()).hexdigest()[:8]
