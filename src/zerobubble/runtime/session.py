"""What is true of a pipeline for as long as it lives: its ranks have met and agreed, are connected, and hold equal values where they share.

`connect` makes a `Session` whole or not at all: whatever goes wrong on one rank ends it on all of them, with one error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from zerobubble.errors import InputError, ZeroBubbleError
from zerobubble.ir import Schedule
from zerobubble.planning import LayersPlan, Plan, Solved
from zerobubble.runtime.executor.program_cache import MakeSchedule, every_channel, proved, schedule_for
from zerobubble.runtime.failure.error_text import describe, text_of
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.failure.patience import Patience
from zerobubble.runtime.hooks.auto import Auto, AutoPlanner
from zerobubble.runtime.hooks.shared_gradients import SharedGradients
from zerobubble.runtime.hooks.shared_parameters import KnowsTied, ParameterName, Tied, read_tied
from zerobubble.runtime.options import PipelineOptions, faults_in, planned_schedule, refuse_unreachable, refuse_wrong, usable_timeout
from zerobubble.runtime.stage.rank_stages import Stages, modules_of
from zerobubble.runtime.transport.choice import refuse_unknown, transport_for
from zerobubble.runtime.transport.meeting import Arrival
from zerobubble.runtime.transport.rank_process import this_process
from zerobubble.runtime.transport.terms import Terms, faults_of, versions
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.values.gradients import Gradients


@dataclass(frozen=True)
class Setup:
    """What one rank has made from its options before it compares them with the others'.

    `given` makes the schedules for any number of microbatches, and `schedule` is the one to begin with; `planner` is there where it will be
    planned anew. `tied` are the groups of parameters that the user wants to be one.
    """

    given: str | Schedule | MakeSchedule
    schedule: Schedule
    planner: AutoPlanner | None
    stages: Stages
    gradients: Gradients
    tied: tuple[tuple[ParameterName, ...], ...]


@dataclass(frozen=True)
class Session:
    """This rank's part in a pipeline whose ranks are connected. `guard` stands between what it does and the failures of any rank.

    `shared` are the parameters that are held in several places; they are equal in all of them.
    """

    transport: Transport
    guard: FailureGuard
    patience: Patience
    setup: Setup
    shared: SharedGradients

    def agree(self, fault: str, terms: Terms) -> None:
        """See `agree`."""
        agree(self.transport, self.guard, self.patience, fault, terms)


def connect(options: PipelineOptions) -> Session:
    """Meet the other ranks, build this rank's stages, agree on what is played, connect, and make equal what is shared.

    Raises `InputError` on every rank, with all that is wrong on any of them or differs between them, and `PipelineError` on every rank when
    one of them fails or does not come.
    """
    refuse_unreachable(options)
    arrival = Arrival(faults_in(options), versions(), this_process())
    transport = transport_for(options.transport, options.group, usable_timeout(options), arrival)
    guard = FailureGuard(transport)
    patience = Patience(transport, guard, usable_timeout(options))
    _meet(transport, guard, patience)
    with guard.during("while building its stages"):
        setup, fault = _build(options, transport)
    agree(transport, guard, patience, fault, _terms(options, setup))
    assert setup is not None
    device, channels = setup.stages.device, every_channel(setup.schedule.placement)
    with guard.opening("while connecting the ranks"):
        patience.bear(lambda: transport.open(device, channels), "connecting the ranks")
    shared = SharedGradients(setup.schedule.placement, setup.stages.modules, transport, setup.tied, setup.gradients)
    with guard.opening("while making the copies of stages equal"):
        patience.bear(shared.broadcast_initial_values, "making the copies of stages equal", is_brief=False)
    return Session(transport, guard, patience, setup, shared)


def _meet(transport: Transport, guard: FailureGuard, patience: Patience) -> None:
    """Reach the other ranks, and hear from here on when their processes end: from before that where they are known already."""
    doing, known = "meeting the other ranks", transport.group.processes
    with guard.during(f"while {doing}"):
        if known:
            guard.watch_processes(known)
        patience.bear(transport.connect, doing)
        if not known:
            guard.watch_processes(patience.bear(lambda: transport.gather_objects(this_process()), doing))


def _build(options: PipelineOptions, transport: Transport) -> tuple[Setup | None, str]:
    """What this rank plays, or what is wrong with its options: then there is nothing, and the other ranks have to hear of it."""
    try:
        return _set_up(options, transport), ""
    except ZeroBubbleError as error:
        return None, text_of(error)
    except Exception as error:  # noqa: BLE001 - the user's build function may raise anything
        return None, describe(error)


def _set_up(options: PipelineOptions, transport: Transport) -> Setup:
    refuse_wrong(options)
    if isinstance(options.transport, str):
        refuse_unknown(options.transport)
    given, planner = _what_to_play(options, transport.size)
    schedule = schedule_for(given, transport.size, options.num_microbatches)
    gradients = Gradients(options.main_grad)
    modules = modules_of(options.build_or_modules, schedule, transport.rank)
    stages = Stages(modules, options.split, gradients, cuda_graphs=options.cuda_graphs)
    if options.pace is not None and stages.device.type != "cpu":
        raise InputError(f"pace is for rehearsals on CPUs; passes on {stages.device} take the time they take")
    # Both raise where this schedule cannot be run, which all ranks should hear of now and not when they are connected.
    stages.of(schedule)
    proved(schedule)
    return Setup(given, schedule, planner, stages, gradients, read_tied(_tied(options, schedule.num_stages), schedule.num_stages))


def _tied(options: PipelineOptions, num_stages: int) -> Tied:
    """The groups that the user gave, and those that what builds the stages knows of."""
    build = options.build_or_modules
    return [*options.tied, *(build.tied(num_stages) if isinstance(build, KnowsTied) else ())]


def _what_to_play(options: PipelineOptions, num_ranks: int) -> tuple[str | Schedule | MakeSchedule, AutoPlanner | None]:
    """What the user gave, with the schedule of a plan in the place of the plan, and the planner where it is to be planned by itself."""
    given = options.schedule
    if given == "auto":
        given = Auto()
    if isinstance(given, Auto):
        planner = AutoPlanner(given, num_ranks, options.num_microbatches)
        return planner.schedule, planner
    return planned_schedule(given) if isinstance(given, (Solved, Plan, LayersPlan)) else given, None


def _terms(options: PipelineOptions, setup: Setup | None) -> Terms:
    """What all ranks must have alike."""
    transport = options.transport
    terms = {
        **versions(),
        "timeout": f"{usable_timeout(options):g} s",
        "pace": _fingerprint(options.pace),
        "overlap function": "one" if options.overlap else "none",
        "type of main_grad": str(options.main_grad),
        "transport": transport if isinstance(transport, str) else type(transport).__name__,
    }
    if setup is not None:
        schedule = setup.schedule
        terms["schedule"] = f"{schedule.name} of {options.num_microbatches} microbatches #{_fingerprint(schedule.to_text())}"
        terms["kind of device"] = setup.stages.device.type
        terms["planning"] = "none" if setup.planner is None else f"auto with {setup.planner.limits_in_words}"
        rewinding = [type(hook).__name__ for hook in options.hooks if getattr(hook, "needs_rollback_point", False)]
        terms["hooks that let steps start over"] = ", ".join(rewinding) or "none"
        if schedule.num_stages - 1 in setup.stages.modules:
            terms["loss_weight"] = "none" if options.loss_weight is None else "a function"
    return terms


def agree(transport: Transport, guard: FailureGuard, patience: Patience, fault: str, terms: Terms) -> None:
    """Compare `terms` with every rank; where something is wrong, close, and raise the same `InputError` on all, with every fault."""
    with guard.opening("while comparing arguments"):
        faults = faults_of(patience.bear(lambda: transport.gather_objects((fault, terms)), "comparing arguments"))
        if faults:
            raise InputError(faults)


def _fingerprint(value: object) -> str:
    """A few digits that differ where `value` does."""
    return "none" if value is None else hashlib.sha256(str(value).encode()).hexdigest()[:8]
