"""What is true of a pipeline for as long as it lives: its ranks have met and agreed, are connected, and hold equal values where they share.

`connect` makes a `Session` whole or not at all: whatever goes wrong on one rank ends it on all of them, with one error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from zerobubble.errors import InputError, ZeroBubbleError
from zerobubble.ir import Schedule
from zerobubble.lowering import Compiled
from zerobubble.planning import Plan
from zerobubble.reductions import stage_sums
from zerobubble.runtime.exclusions import excluded_options
from zerobubble.runtime.executor.offloading import Offloads
from zerobubble.runtime.executor.pace import Pace
from zerobubble.runtime.executor.program_cache import MakeSchedule, ProgramCache, every_channel, schedule_for
from zerobubble.runtime.failure.error_text import describe, text_of
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.failure.setup_timeout import SetupTimeout
from zerobubble.runtime.hooks.auto import Auto, AutoPlanner
from zerobubble.runtime.hooks.replicas import Replicas
from zerobubble.runtime.hooks.scaled_gradients import ScaledGradients
from zerobubble.runtime.hooks.shared_gradients import SharedGradients
from zerobubble.runtime.hooks.shared_parameters import KnowsTied, ParameterName, read_tied, refuse_forgotten
from zerobubble.runtime.options import (
    GRADIENTS,
    PipelineOptions,
    faults_in,
    layout_for,
    lone_faults,
    offloads_in,
    planned_cut,
    priced_by,
    recompute_levels,
    refuse_wrong,
    room_for_weights,
    usable_timeout,
)
from zerobubble.runtime.split.stage_with_loss import stage_alone, with_loss
from zerobubble.runtime.stage.divided import DividedTensors
from zerobubble.runtime.stage.divided_head import DividedHead, head_parts_of
from zerobubble.runtime.stage.head_part import HeadPart
from zerobubble.runtime.stage.rank_stages import CutsForSchedules, Stages, modules_of
from zerobubble.runtime.stage.whole_model import KnowsModel, ModelFacts, differences
from zerobubble.runtime.step.divided_loss import DividedLoss
from zerobubble.runtime.step.hook import StepHook, StepHooks
from zerobubble.runtime.step.loss import StepLosses
from zerobubble.runtime.step.ordering import MicrobatchOrdering
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.runtime.step.stage_rng import StageRng
from zerobubble.runtime.transport.choice import refuse_unknown, transport_for
from zerobubble.runtime.transport.mesh import EXPERTS, Layout
from zerobubble.runtime.transport.peers import Peers, in_all
from zerobubble.runtime.transport.rank_process import this_process
from zerobubble.runtime.transport.rendezvous import RendezvousRecord
from zerobubble.runtime.transport.terms import Terms, faults_of, versions
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.values.gradients import Gradients
from zerobubble.runtime.values.random_state import drawn_seed


@dataclass(frozen=True)
class Setup:
    """What one rank has made from its options before it compares them with the others'.

    `given` makes the schedules for any number of microbatches, and `compiled` is the one to begin with; `planner` is there where it will be
    planned anew. `tied` are the groups of parameters that the user wants to be one. Of a cut model, which knows
    what it ties, stages keep the names. `whole` knows the model that this rank has as a whole, and `facts` are what others must
    have like it. `heads` are its parts of a divided head, by the stages that they go by. `ordering` is there where this rank is to order
    microbatches by what they cost, `offloads` where ranks move what waits to the host. `choosing` are the levels of recomputation by which
    R has anything to do in a stage of this rank.
    """

    given: str | Schedule | MakeSchedule
    compiled: Compiled
    planner: AutoPlanner | None
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
        """The schedule to begin with."""
        return self.compiled.schedule


@dataclass(frozen=True)
class Session:
    """This rank's part in a pipeline whose ranks are connected. `guard` stands between what it does and the failures of any rank.

    `transport` connects all ranks of the mesh, which `layout` tells, `peers` are those of this pipeline.
    `shared` are the parameters that several of them hold,
    `divided` are those of which ranks hold parts, and `replicas` the ranks that are given other data than this one, None where there are
    no others. What is held in several places is equal there. All ranks have one `seed` for the random numbers of stages.
    """

    transport: Transport
    layout: Layout
    peers: Peers
    guard: FailureGuard
    setup_timeout: SetupTimeout
    setup: Setup
    shared: SharedGradients
    divided: DividedTensors
    replicas: Replicas | None
    seed: int
    options: PipelineOptions

    def first_hooks(self) -> list[StepHook]:
        """The pipeline's own hooks, in the order in which they are called: gradients are summed over stages first, then over replicas."""
        sums: list[StepHook] = [self.shared] if self.shared.is_needed else []
        if self.replicas is not None:
            sums = [self.replicas.earlier, *sums, self.replicas]
        if self.options.scale == GRADIENTS:
            scaled = ScaledGradients(self.setup.stages.modules, self.setup.gradients)
            sums = [scaled.earlier, *sums, scaled]
        return sums

    def agree(self, fault: str, terms: Terms) -> None:
        """See `agree`."""
        agree(self.transport, self.guard, self.setup_timeout, fault, terms)


_KIND_OF_DEVICE = "kind of device"


def connect(options: PipelineOptions, survivors: Layout | None = None) -> Session:
    """Meet the other ranks, build this rank's stages, agree on what is played, connect, and make equal what is shared.

    With `survivors`, the ranks that are left of an earlier pipeline go on: what they hold is equal, or will be when all have ended the same
    call.

    Raises `InputError` on every rank, with all that is wrong on any of them or differs between them, and `PipelineError` on every rank when
    one of them fails or does not come.
    """
    layout = survivors or layout_for(options)
    record = RendezvousRecord(faults_in(options), versions(), this_process())
    transport = transport_for(options.transport, layout, usable_timeout(options), record)
    lockstep = Peers(transport, layout.along[layout.lockstep]) if layout.lockstep else None
    peers = Peers(transport, layout.pipeline, lockstep)
    guard = FailureGuard(transport)
    setup_timeout = SetupTimeout(transport, guard, usable_timeout(options))
    _rendezvous(transport, guard, setup_timeout)
    own_seed = 0 if survivors is not None else int(drawn_seed())  # they have modules, and the seed of before
    seed = _agree_on_seed(transport, guard, setup_timeout, own_seed)
    with guard.during("while building its stages"):
        setup, fault = _build(options, layout, peers, own_seed)
    told = agree(transport, guard, setup_timeout, fault, _terms(options, setup))
    assert setup is not None
    _place_stages_without_tensors(setup, told)
    _compare_models(transport, guard, setup_timeout, layout, setup)
    _refuse_empty_levels(transport, guard, setup_timeout, setup)
    device, used = setup.stages.device, every_channel(setup.compiled)
    channels = [in_all(channel, pipeline) for pipeline in layout.pipelines for channel in used]
    with guard.opening("while connecting the ranks"):
        setup_timeout.run(lambda: transport.open(device, channels), "connecting the ranks")
    shared = SharedGradients(setup.schedule.placement, setup.stages.modules, peers, setup.tied, setup.gradients)
    divided = _divided(transport, guard, setup_timeout, layout, setup)
    replicas = None
    if layout.data:
        order = _order_of_sums(setup, peers.rank)
        replicas = Replicas(transport, layout, setup.stages.modules, divided, setup.gradients, order, options.bucket_bytes)
    with guard.opening("while making the copies of stages equal"):
        make_equal = partial(shared.broadcast_initial_values, are_equal=survivors is not None)
        setup_timeout.run(make_equal, "making the copies of stages equal", is_brief=False)
    if replicas is not None:
        with guard.opening("while making replicas equal"):
            setup_timeout.run(replicas.broadcast_initial_values, "making replicas equal", is_brief=False)
    return Session(transport, layout, peers, guard, setup_timeout, setup, shared, divided, replicas, seed, options)


def runner_of(session: Session, options: PipelineOptions, pace: Pace | None) -> StepRunner:
    """What runs the steps of a session, with the program of its first schedule made ready."""
    peers, guard, setup, divided = session.peers, session.guard, session.setup, session.divided
    replicas = None if session.replicas is None else session.replicas.peers
    held = nn.ModuleList(setup.stages.modules.values())
    losses = StepLosses(
        peers,
        options.loss_fn,
        options.loss_weight,
        options.on_loss,
        replicas,
        scales_gradients=options.scale == GRADIENTS,
        held=held.parameters,
    )
    hooks = StepHooks(setup.stages.modules, guard.during)
    room = room_for_weights(options)
    programs = ProgramCache(setup.given, setup.stages, peers, pace, options.overlap, hooks, room, setup.offloads)
    programs.play(setup.compiled)
    elsewhere = session.shared.counted_elsewhere
    head = options.loss_fn
    divided_loss = DividedLoss(head, setup.heads, losses) if isinstance(head, DividedHead) else None
    place = (0, 1) if replicas is None else (replicas.rank, replicas.size)
    rng = StageRng(session.seed, *place, setup.stages.device)
    return StepRunner(
        peers, guard, setup.stages, setup.gradients, losses, hooks, programs, elsewhere, divided, rng, setup.ordering, divided_loss
    )


def attach_first(session: Session, runner: StepRunner, hooks: Sequence[StepHook]) -> None:
    """Attach the hooks that a pipeline begins with; every rank hears of what is wrong with one of them."""
    fault = ""
    with session.guard.during("while attaching hooks"):
        for hook in hooks:
            try:
                runner.attach(hook)
            except InputError as error:
                fault = fault or str(error)
    session.agree(fault, {})


def _divided(transport: Transport, guard: FailureGuard, setup_timeout: SetupTimeout, layout: Layout, setup: Setup) -> DividedTensors:
    """What ranks divide of the stages; where that cannot be trained, close, and raise the same `InputError` on all ranks."""
    fault, divided, spread = "", None, False
    try:
        divided = DividedTensors(transport, layout, setup.stages.modules)
        spread = divided.is_any_along(EXPERTS)
    except InputError as error:
        fault = str(error)
    if EXPERTS in layout.lockstep:
        with guard.opening("while comparing experts"):
            told = setup_timeout.run(lambda: transport.gather_objects(spread), "comparing experts")
        if not any(told) and not fault:
            fault = (
                f"mesh has a dimension {EXPERTS!r}, and no stage holds parameters that are spread over it: make experts DTensors over "
                f"mesh[{EXPERTS!r}], mark them with zb.nn.mark_experts, or count its ranks into 'dp'"
            )
    if layout.along:
        agree(transport, guard, setup_timeout, fault, {})
    elif fault:
        raise InputError(fault)
    assert divided is not None
    return divided


def _order_of_sums(setup: Setup, rank: int) -> list[int]:
    """In which order this rank sums its stages over replicas: as they end in the schedule, which all replicas begin with.

    A planner may change the schedule of one replica sooner than that of another: then they go from the last stage to the first.
    """
    if setup.planner is not None:
        return sorted(setup.stages.modules, reverse=True)
    return [one.stage for one in stage_sums(setup.compiled.graph)[rank]]


def _rendezvous(transport: Transport, guard: FailureGuard, setup_timeout: SetupTimeout) -> None:
    """Reach the other ranks, and hear from here on when their processes end: from before that where they are known already."""
    doing, known = "meeting the other ranks", transport.group.processes
    with guard.during(f"while {doing}"):
        if known:
            guard.watch_processes(known)
        setup_timeout.run(transport.connect, doing)
        if not known:
            guard.watch_processes(setup_timeout.run(lambda: transport.gather_objects(this_process()), doing))


def _agree_on_seed(transport: Transport, guard: FailureGuard, setup_timeout: SetupTimeout, own: int) -> int:
    """The seed that rank 0 has drawn."""
    doing = "agreeing on a seed"
    with guard.opening(f"while {doing}"):
        seed: int = setup_timeout.run(lambda: transport.gather_objects(own), doing)[0]
    return seed


def _build(options: PipelineOptions, layout: Layout, peers: Peers, seed: int) -> tuple[Setup | None, str]:
    """What this rank plays, or what is wrong with its options: then there is nothing, and the other ranks have to hear of it."""
    try:
        return _set_up(options, layout, peers, seed), ""
    except ZeroBubbleError as error:
        return None, text_of(error)
    except Exception as error:  # noqa: BLE001 - the user's build function may raise anything
        return None, describe(error)


def _set_up(options: PipelineOptions, layout: Layout, peers: Peers, seed: int) -> Setup:
    refuse_wrong(options)
    faults = [fault for fault in (lone_faults(options), excluded_options(options, layout)) if fault]
    if faults:
        raise InputError("; ".join(faults))
    if isinstance(options.transport, str):
        refuse_unknown(options.transport)
    given, planner = _what_to_play(options, peers.size)
    schedule = schedule_for(given, peers.size, options.num_microbatches)
    gradients = Gradients(options.main_grad)
    build = options.build_or_modules
    if isinstance(build, CutsForSchedules):
        build = build.for_schedule(schedule, planned_cut(options))
    modules = modules_of(build, schedule, peers.rank, seed)
    last = schedule.num_stages - 1
    modules = {stage: with_loss(module, options.loss_fn if stage == last else None) for stage, module in modules.items()}
    heads = head_parts_of(options.loss_fn, schedule, modules, gradients)
    levels = recompute_levels(options, schedule)
    stages = Stages(modules, options.split, gradients, levels, cuda_graphs=options.cuda_graphs, heads=heads)
    if options.pace is not None and stages.device.type != "cpu":
        raise InputError(f"pace is for rehearsals on CPUs; passes on {stages.device} take the time they take")
    if options.link is not None and stages.device.type != "cpu":
        raise InputError(f"link is for rehearsals on CPUs; copies between {stages.device} and the host take the time they take")
    offloads = offloads_in(options, schedule)
    # All raise where this schedule or a level cannot be run, which all ranks should hear of now and not when they are connected.
    stages.of(schedule)
    compiled = Compiled.of(schedule)
    choosing = stages.levels_that_choose()
    known = build.tied(schedule.num_stages) if isinstance(build, KnowsTied) else ()
    if not isinstance(build, KnowsTied) and not options.tied:
        refuse_forgotten({stage: stage_alone(module) for stage, module in modules.items()})
    tied = read_tied([*options.tied, *known], schedule.num_stages)
    whole = build if isinstance(build, KnowsModel) else None
    facts = None if whole is None else whole.model_facts(schedule.num_stages)
    ordering = None
    if options.order_by is not None and schedule.placement.routes[0][0] == peers.rank:
        # What goes to the host and what is gathered when fits the rows of one schedule.
        plans_passes = offloads is None and room_for_weights(options) is None
        ordering = MicrobatchOrdering(options.order_by, schedule, *priced_by(options), plans_passes=plans_passes)
    tied_by_cut = isinstance(build, KnowsTied)
    return Setup(given, compiled, planner, stages, gradients, tied, tied_by_cut, whole, facts, ordering, offloads, heads, choosing)


def _what_to_play(options: PipelineOptions, num_ranks: int) -> tuple[str | Schedule | MakeSchedule, AutoPlanner | None]:
    """What the user gave, with the schedule of a plan in the place of the plan, and the planner where it is to be planned by itself."""
    given = options.schedule
    if given == "auto":
        given = Auto()
    if isinstance(given, Auto):
        planner = AutoPlanner(given, num_ranks, options.num_microbatches)
        return planner.schedule, planner
    return given.schedule if isinstance(given, Plan) else given, None


def _terms(options: PipelineOptions, setup: Setup | None) -> Terms:
    """What all ranks must have alike."""
    transport = options.transport
    terms = {
        **versions(),
        "timeout": f"{usable_timeout(options):g} s",
        "pace": _fingerprint(options.pace),
        "overlap function": "one" if options.overlap else "none",
        "type of main_grad": str(options.main_grad),
        "scale": str(options.scale),
        "gathered_bytes": str(room_for_weights(options)),
        "bucket_bytes": str(options.bucket_bytes),
        "survive": str(options.survive),
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
            terms[_KIND_OF_DEVICE] = setup.stages.device.type
        terms["offload"] = _fingerprint(None if setup.offloads is None else tuple(rank.offloads for rank in setup.offloads.ranks))
        terms["link"] = _fingerprint(options.link)
        terms["planning"] = "none" if setup.planner is None else f"auto with {setup.planner.limits_in_words}"
        rewinding = [type(hook).__name__ for hook in options.hooks if getattr(hook, "needs_rollback_point", False)]
        terms["hooks that let steps start over"] = ", ".join(rewinding) or "none"
        if schedule.num_stages - 1 in setup.stages.modules:
            terms["loss_weight"] = "none" if options.loss_weight is None else "a function"
    return terms


def agree(transport: Transport, guard: FailureGuard, setup_timeout: SetupTimeout, fault: str, terms: Terms) -> list[Terms]:
    """Compare `terms` with every rank, and return those of all; where something is wrong, close, and raise the same `InputError` on all,
    with every fault."""
    with guard.opening("while comparing arguments"):
        told = setup_timeout.run(lambda: transport.gather_objects((fault, terms)), "comparing arguments")
        faults = faults_of(told)
        if faults:
            raise InputError(faults)
    return [theirs for _, theirs in told]


def _place_stages_without_tensors(setup: Setup, told: list[Terms]) -> None:
    """Put stages that have no parameters or buffers on the kind of device on which the others are, by the terms of all ranks."""
    kinds = [terms[_KIND_OF_DEVICE] for terms in told if _KIND_OF_DEVICE in terms]
    if kinds and not setup.stages.has_tensors:
        setup.stages.go_to(kinds[0])


def _compare_models(transport: Transport, guard: FailureGuard, setup_timeout: SetupTimeout, layout: Layout, setup: Setup) -> None:
    """Where ranks of a pipeline have cut other models, close, and raise the same `InputError` on all of them.

    First they tell a few digits, and all that they know only where these differ.
    """
    ours = setup.facts
    with guard.opening("while comparing models"):
        digits = _fingerprint(ours)
        told = setup_timeout.run(lambda: transport.gather_objects(digits), "comparing models")
        if len(set(told)) > 1:
            facts = setup_timeout.run(lambda: transport.gather_objects(None if ours is None else list(ours)), "comparing models")
            known = [None if each is None else ModelFacts(*each) for each in facts]
            found = [differences({rank: known[rank] for rank in pipeline}) for pipeline in layout.pipelines]
            if any(found):
                raise InputError("; ".join(filter(None, dict.fromkeys(found))))
    if setup.whole is not None:
        setup.whole.was_connected()


def _refuse_empty_levels(transport: Transport, guard: FailureGuard, setup_timeout: SetupTimeout, setup: Setup) -> None:
    """Where a level of recomputation chooses no module on any rank, close, and raise the same `InputError` on all of them."""
    stages = setup.stages
    if not stages.levels.given:
        return
    doing = "comparing levels of recomputation"
    with guard.opening(f"while {doing}"):
        told = setup_timeout.run(lambda: transport.gather_objects((setup.choosing, stages.names_of_modules())), doing)
        empty = [name for name in stages.levels.given if not any(name in those for those, _ in told)]
        if empty:
            names = list(dict.fromkeys(name for _, names in told for name in names))
            known = f"Modules in stages are called {', '.join(names)}: give patterns such as '*.{names[0]}'" if names else "They have none"
            raise InputError(f"recompute={{{empty[0]!r}: ...}} chooses no module of any stage; the levels are {stages.levels}. {known}")


def _fingerprint(value: object) -> str:
    """A few digits that differ where `value` does."""
    return "none" if value is None else hashlib.sha256(str(value).encode()).hexdigest()[:8]
