"""Starts the steps of a connected session: their programs, losses and first hooks."""

from __future__ import annotations

from torch import nn

from zerobubble.errors import InputError
from zerobubble.runtime.executor.overrides import Pace
from zerobubble.runtime.executor.program_cache import ProgramCache
from zerobubble.runtime.hooks.scaled_gradients import ScaledGradients
from zerobubble.runtime.hooks.summed_hooks import SummedHooks
from zerobubble.runtime.options import (
    GRADIENTS,
    NONE,
    gathered_bytes_of,
)
from zerobubble.runtime.session import Session
from zerobubble.runtime.stage.divided_head import DividedHead
from zerobubble.runtime.step.captured_step import CapturedStep
from zerobubble.runtime.step.divided_loss import DividedLoss
from zerobubble.runtime.step.hook import StepHook, StepHooks
from zerobubble.runtime.step.loss import StepLosses
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.runtime.step.stage_rng import StageRng
from zerobubble.runtime.values.buffers import making_tensors


@making_tensors()
def runner_of(session: Session, pace: Pace | None) -> StepRunner:
    """Returns the runner of the steps of a session, with the program of its first schedule."""
    peers, guard, setup, options = session.peers, session.guard, session.setup, session.options
    replicas = None if session.values.replicas is None else session.values.replicas.peers
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
        counted_elsewhere=session.values.shared.counted_elsewhere,
        sharded=session.values.sharded,
        rng=StageRng(session.seed, *((0, 1) if replicas is None else (replicas.rank, replicas.size)), setup.stages.device),
        ordering=setup.ordering,
        divided_loss=DividedLoss(options.loss_fn, setup.heads, losses) if isinstance(options.loss_fn, DividedHead) else None,
        watching_copies=session.values.copies.unchanged,
        captured=CapturedStep(held, setup.gradients, setup.stages.device, options.num_microbatches) if options.captures_steps else None,
    )


def attach_first(session: Session, runner: StepRunner) -> None:
    """Attaches the first hooks of a pipeline, which may change values; a fault of any of them is raised on every rank."""
    fault = ""
    with session.guard.during("while attaching hooks"):
        for hook in _first_hooks(session):
            try:
                runner.attach(hook)
            except InputError as error:
                fault = fault or str(error)
    session.setup_ranks.agree(fault, {})
    runner.cut_model.watch()


def _first_hooks(session: Session) -> list[StepHook]:
    """Returns the first hooks in the order of their calls: sums over stages and replicas, hooks on gradients, planner, the user's."""
    sums, modules, gradients = session.values.hooks(), session.setup.stages.modules, session.setup.gradients
    if session.options.scale == GRADIENTS:
        scaled = ScaledGradients(modules, gradients)
        sums = [scaled.earlier, *sums, scaled]
    hooks = SummedHooks(modules, gradients)
    planner = [] if session.setup.planner is None else [session.setup.planner]
    return [hooks.earlier, *sums, hooks, *planner, *session.options.hooks]
