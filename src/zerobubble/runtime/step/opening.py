"""Opens a step: chooses its program, splits the batch, and shakes hands with the other ranks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from zerobubble.arguments import optional, require
from zerobubble.errors import InputError
from zerobubble.runtime.executor.batch import Batch
from zerobubble.runtime.executor.executor import Executor
from zerobubble.runtime.executor.program_cache import MICROBATCHES, ReadyProgram
from zerobubble.runtime.mailbox.handshake import MicrobatchCosts, StepMessages, Stepped
from zerobubble.runtime.step.batch import StepInputs, as_target
from zerobubble.runtime.step.captured_step import CapturedStep
from zerobubble.runtime.step.input_gradients import parameters_behind
from zerobubble.runtime.step.named_arguments import known_names
from zerobubble.runtime.step.ordering import MicrobatchOrdering
from zerobubble.runtime.step.outputs import Outputs
from zerobubble.runtime.step.rank_inputs import RankInputs
from zerobubble.runtime.step.runner import StepRunner
from zerobubble.runtime.step.stage_rng import TRAINS
from zerobubble.runtime.values.payload import tensors_in


def choose(runner: StepRunner, num_microbatches: int | None, step_inputs: StepInputs | None = None, *, trains: bool = True) -> ReadyProgram:
    """Returns the program for this number of microbatches, None for the default one, and makes it current.

    If there is none, or if it must train and cannot, or if a captured step cannot train with `step_inputs`, the call is refused on
    every rank.
    """
    with runner.refusals.of_call():
        if step_inputs is not None and runner.captured is not None:
            runner.captured.refuse(runner.schedule.num_microbatches if num_microbatches is None else num_microbatches, step_inputs)
        if trains:
            _refuse_to_train(runner)
        require("num_microbatches", num_microbatches, optional(MICROBATCHES))
        count = runner.schedule.num_microbatches if num_microbatches is None else num_microbatches * runner.schedule.slices
        if trains:
            runner.programs.refuse_to_train(count)
        compiled = runner.programs.choose(count)
        runner.stages.follow_models()
    runner.guard.stages = compiled.stages
    return compiled


def _refuse_to_train(runner: StepRunner) -> None:
    if runner.schedule.is_forward_only:
        message = "schedule {schedule!r} has no backward passes"
        raise InputError(message, schedule=runner.schedule.name, remedy="evaluate with eval_step, or choose one that trains")
    if not torch.is_grad_enabled():
        context = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise InputError("there are no gradients inside torch.{context}()", context=context, remedy="use it around eval_step only")


def open_step(
    runner: StepRunner,
    executor: Executor,
    step_inputs: StepInputs,
    outputs: Outputs | None,
    ordering: MicrobatchOrdering | None = None,
    evaluation: int = TRAINS,
    captured: CapturedStep | None = None,
    *,
    has_loss: bool = True,
) -> tuple[Batch, tuple[int, ...]]:
    """Splits what was given and opens the step with the other ranks.

    Returns the inputs of the executor, and the passes if the step plays others than the schedule's. The inputs of a `captured` step are
    where its graph reads them.
    """
    executor.recording = runner.recording
    runner.input_gradients.begin(len(executor.program.placement.routes))
    mine = RankInputs(step_inputs, executor, runner.rank, runner.modules, runner.input_gradients, captured)
    runner.refusals.of_unknown_dims(step_inputs.batch_dims, partial(known_names, step_inputs, runner.modules))
    with runner.refusals.of_batch(executor, outputs):
        runner.stages.refuse_replaced()
        runner.stages.refuse_hooks()
        step_inputs.refuse_missing(
            runner.peers.members[runner.rank], is_first=mine.is_first, needs_targets=mine.is_last and outputs is None
        )
        mine.cut()
        costs = None if ordering is None else ordering.costs_of(runner.programs.now.schedule, mine.batch.microbatches)
        if mine.is_first:
            runner.stages.refuse_calls(mine.arguments, mine.named)
    with runner.refusals.of_others(executor, outputs):
        opened = _shake_hands(runner, executor, step_inputs, mine, costs, trains=outputs is None)
    mine.know_size(opened.batch_size, runner.peers.members[executor.ends[0][0]])
    # Before any pass: it posts the receives of losses, so that those sent with the last forward need not be waited for later.
    if outputs is None and runner.num_steps == 0:
        runner.optimizers.elsewhere = _trained_elsewhere(runner, step_inputs, mine)
    if outputs is not None:
        outputs.targets = [as_target(target) for target in mine.targets.microbatches]
    targets = mine.targets.microbatches if has_loss else None
    runner.losses.open(executor.ends[1], targets or None, mine.targets.sizes, outputs)
    return _batch(runner, executor, step_inputs, mine, opened, evaluation), opened.passes


def _trained_elsewhere(runner: StepRunner, step_inputs: StepInputs, mine: RankInputs) -> dict[Tensor, str]:
    """Returns the parameters outside of this rank's stages behind inputs and targets that another rank uses, with what they make."""
    unused = {"inputs": None if mine.is_first else step_inputs.inputs, "targets": None if mine.is_last else step_inputs.targets}
    held = set(runner.parameters())
    return {parameter: name for name, value in unused.items() for parameter in parameters_behind(tensors_in(value)) - held}


def _shake_hands(
    runner: StepRunner, executor: Executor, step_inputs: StepInputs, mine: RankInputs, costs: MicrobatchCosts | None, *, trains: bool
) -> StepMessages:
    """Opens the step with the other ranks, and returns what they agree on."""
    form = (*executor.trained, runner.stages.num_changes)
    stepped = _stepped(runner) if trains else Stepped.UNKNOWN
    firsts, lasts = executor.ends
    pairs_ranks = {runner.rank} < {*firsts, *lasts} and step_inputs.inputs is not None and step_inputs.targets is not None
    batch, is_first_step = (step_inputs.inputs, step_inputs.targets), trains and runner.num_steps == 0
    data = runner.digests.of(runner.guard.num_calls, batch, waits=is_first_step) if pairs_ranks else 0
    opened = executor.handshake.open(runner.guard.num_calls, mine.arguments, mine.batch.batch_size, form, costs, stepped, data)
    runner.digests.compare(opened.data, data, (runner.peers.members[firsts[0]], runner.peers.members[runner.rank]))
    if trains:  # in a call that is refused, other ranks did not ask
        runner.optimizers.has_stepped = False
    return opened


def _batch(
    runner: StepRunner, executor: Executor, step_inputs: StepInputs, mine: RankInputs, opened: StepMessages, evaluation: int
) -> Batch:
    """Returns the inputs of the executor for a step that is open on all ranks."""
    seed = partial(runner.scaling.seed, step_inputs.scaler)
    if runner.divided_loss is not None:
        runner.divided_loss.begin(seed)
    return Batch(
        mine.arguments,
        runner.losses.finish if runner.divided_loss is None else runner.losses.store_output,
        partial(runner.losses.gradient_of, seed),
        opened.known,
        opened.announced,
        mine.named,
        opened.order,
        runner.rng.seed_pass_of(runner.num_steps, executor.program.num_microbatches, evaluation),
        runner.divided_loss,
        mine.sizes(opened.batch_size),
        runner.losses.comparison.arrive,
    )


def _stepped(runner: StepRunner) -> Stepped:
    """Returns whether an optimizer of this rank has stepped since the last training step, if any ever has."""
    if runner.optimizers.validated or not runner.optimizers.seen:
        return Stepped.UNKNOWN
    return Stepped.YES if runner.optimizers.has_stepped else Stepped.NO
